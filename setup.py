"""The README in the package's metadata. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

readme = Path("README.md").read_text(encoding="utf-8")
# PyPI does not have the files of the repository: their pictures go, and links to them become plain text.
readme = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]+\)\n*", "", readme)
readme = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
