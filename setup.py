"""The README in the package's metadata. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

# PyPI shows the README without the files of the repository: links to them become plain text.
readme = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", Path("README.md").read_text(encoding="utf-8"))
setup(long_description=readme, long_description_content_type="text/markdown")
