"""The store's tests run on SQLite and on PostgreSQL; what is about SQLite's files runs there alone.

In ``make test`` the first test of each file runs on both, and all of ``test_the_others``, which has several stores.
"""

from __future__ import annotations

import pytest

from tests.rig.engines import engine, on_both  # noqa: F401  # a fixture

_FILES_OF_SQLITE = ("test_backup", "test_damage", "test_dialect", "test_address", "test_reserve")
_TESTS_OF_SQLITE = ("test_nobody_else_can_read_the_file", "test_the_state_of_a_newer_version_is_refused_and_left_alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in _FILES_OF_SQLITE:
        on_both(metafunc, quick=["test_the_others"], left_out=_TESTS_OF_SQLITE)
