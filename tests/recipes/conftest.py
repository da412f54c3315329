"""Fixtures for the tests of the recipes."""

import pytest

from recipes import machine


@pytest.fixture(autouse=True)
def _cpu_without_bf16(monkeypatch):
    """Without this, ``precision: auto`` would depend on the machine that runs the tests."""
    monkeypatch.setattr(machine, "cpu_info", lambda: "model name\t: A CPU\nflags\t\t: fpu sse2 avx2\n")
