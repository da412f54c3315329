"""The tests of this project."""

import os

# One thread is enough for tiny models, and test processes do not compete for the cores. torch and CTranslate2 read this
# when they are loaded, and this file is loaded first.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.quick_start import sitecustomize  # noqa: E402, F401  importing it makes fairseq's import shorter
