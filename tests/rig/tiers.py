"""Which cases of a matrix run in ``make test``; the others are for ``make proof``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sample(cases: Sequence[str], *chosen: str) -> list[Any]:
    """All cases as parameters; those that are not chosen carry the mark ``proof``."""
    unknown = set(chosen) - set(cases)
    assert not unknown, f"no such case: {unknown}"
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.proof) for case in cases]
