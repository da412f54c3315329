"""Fixtures for the tests of the recipes."""

import pytest

from recipes.run import machine
from tests.recipes.small_demo import AVX2, check_flags_here


@pytest.fixture(autouse=True)
def _flags_checked_here(monkeypatch):
    check_flags_here(monkeypatch)


@pytest.fixture(autouse=True)
def _cpu_without_bf16(monkeypatch):
    """Without this, ``precision: auto`` would depend on the machine that runs the tests."""
    monkeypatch.setattr(machine, "cpu_info", lambda: AVX2)
