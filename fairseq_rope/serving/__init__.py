"""Serving: exports to CTranslate2 and their checks, the translator, shortlists, packages for Argos Translate."""
