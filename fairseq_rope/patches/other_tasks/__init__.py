"""Replacements that a training of a translation model, and its search, do not meet: other tasks and rare flags."""
