"""The store's tests run on SQLite and on PostgreSQL; what is about SQLite's files runs there alone.

In ``make test`` the first test of each file runs on both, and all of ``test_the_others``, which has several stores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig import postgres
from tests.rig.stores import ENGINES, on_engine
from tests.rig.tiers import sample

_FILES_OF_SQLITE = ("test_backup", "test_damage", "test_dialect", "test_address")
_TESTS_OF_SQLITE = ("test_nobody_else_can_read_the_file", "test_the_state_of_a_newer_version_is_refused_and_left_alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module not in _FILES_OF_SQLITE and metafunc.function.__name__ not in _TESTS_OF_SQLITE:
        metafunc.fixturenames.append("engine")
        quick = ENGINES if _is_for_both(metafunc, module) else ("sqlite",)
        metafunc.parametrize("engine", sample(ENGINES, *quick), indirect=True)


def _is_for_both(metafunc: pytest.Metafunc, module: str) -> bool:
    tests = [name for name in vars(metafunc.module) if name.startswith("test_") and name not in _TESTS_OF_SQLITE]
    return module == "test_the_others" or metafunc.function.__name__ == tests[0]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "postgres":
        postgres.needed()
    with on_engine(request.param):
        yield request.param
