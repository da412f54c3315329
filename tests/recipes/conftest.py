"""Fixtures for the tests of the recipes."""

import pytest

from tests.recipes.small_demo import check_flags_here


@pytest.fixture(autouse=True)
def _flags_checked_here(monkeypatch):
    check_flags_here(monkeypatch)
