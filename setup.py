"""Packaging of fairseq-rope.

`fairseq-train --user-dir fairseq_rope` needs none of it: fairseq loads the folder as it is. This is
for `import fairseq_rope` from anywhere, and for the tools that the recipes use. `make` installs all
of it into .venv.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """The `__version__` of fairseq_rope, read as text: importing it needs torch."""
    text = (HERE / "fairseq_rope" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('fairseq_rope/__init__.py has no line `__version__ = "…"`')
    return found.group(1)


def long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="fairseq-rope",
    version=version(),
    description="Rotary position embedding (RoPE) for machine translation with fairseq",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="the fairseq-rope developers",
    license="MIT",
    packages=find_packages(include=["fairseq_rope", "fairseq_rope.*"]),
    python_requires=">=3.8",
    # torch and fairseq are left out on purpose: whoever has them has chosen a build (CUDA or CPU,
    # git or package), and no installation of this plugin may replace it.
    install_requires=[
        "subword-nmt>=0.3.8,<0.4",
        # Exact: what this version writes is what Moses' own tokenizer writes, byte for byte.
        # Another could change BLEU. It needs Python 3.9; only the recipes use it, on 3.11.
        "sacremoses==0.2.0; python_version >= '3.9'",
        "sacrebleu>=2.3,<3",
        "sentencepiece>=0.1.99,<0.3",
        "tqdm>=4.66.3,<5",
    ],
    extras_require={
        # fairseq compiles against torch: install torch first, with numpy, cython, setuptools and
        # wheel, then this extra with --no-build-isolation. With isolation, pip builds against a
        # second torch that it downloads for it.
        "fairseq": ["torch>=2.0,<2.14", "fairseq-fixed==0.12.3.1; python_version >= '3.11'"],
        # The report of recipes/compare, and the plots of docs/.
        "plots": ["matplotlib>=3.8,<4", "jinja2>=3,<4"],
        # fairseq_rope.tools.export and fairseq_rope.tools.translate
        "ctranslate2": ["ctranslate2>=4.6.3,<5"],
        "test": ["pytest>=9,<10", "pytest-xdist>=3.8,<4", "hypothesis>=6.100,<7"],
        # Exact: another version of ruff formats differently.
        "lint": ["ruff==0.17.5"],
    },
    entry_points={"console_scripts": ["fairseq-rope = fairseq_rope.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
)
