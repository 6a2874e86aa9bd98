"""What holds for every test."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long something takes says more about the machine than about the code.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")

# Files that take minutes: begun first, they keep no process waiting at the end. The others follow by name, and so the
# quick ones of tests/unit come last and fill the gaps.
_LONG = ("test_demo.py", "test_crash_points.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))
