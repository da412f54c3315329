"""For pip versions that read no pyproject.toml. The metadata is in pyproject.toml."""

from setuptools import setup

setup()
