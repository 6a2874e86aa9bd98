"""Tests of what uses one store most run on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.rig.engines import engine, on_both  # noqa: F401  # a fixture

_ON_BOTH = ("test_retention", "test_services", "test_service_runner")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in _ON_BOTH:
        on_both(metafunc)
