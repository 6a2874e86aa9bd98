"""Tests that run on SQLite and on PostgreSQL. They take their store from ``tests.rig.stores``.

In ``make test`` the first test of each file runs on both, the others on SQLite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest

from tests.rig import postgres
from tests.rig.stores import ENGINES, current_engine, on_engine
from tests.rig.tiers import sample


def on_both(metafunc: pytest.Metafunc, *, quick: Collection[str] = (), left_out: Collection[str] = ()) -> None:
    """For ``pytest_generate_tests``. ``quick``: files all of which run on both in ``make test``."""
    tests = [name for name in vars(metafunc.module) if name.startswith("test_") and name not in left_out]
    name = metafunc.function.__name__
    if name not in left_out:
        is_for_both = metafunc.module.__name__.rpartition(".")[2] in quick or name == tests[0]
        assert "engine" in metafunc.fixturenames, "the fixture is to be imported by the conftest"
        metafunc.parametrize("engine", sample(ENGINES, *(ENGINES if is_for_both else ("sqlite",))), indirect=True)


on_each = pytest.mark.parametrize("engine", ENGINES, indirect=True)  # with ``use_engine`` for an agent


@pytest.fixture(autouse=True)  # tests that know nothing of it get it, too: pytest forgets one that is added later
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    name = getattr(request, "param", current_engine())
    if name == "postgres":
        postgres.needed()
    with on_engine(name):
        yield name
