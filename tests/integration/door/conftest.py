"""What tests of a service's door share."""

from __future__ import annotations

import pytest

from tests.rig.door import missing_haproxy


@pytest.fixture(autouse=True)
def _haproxy() -> None:
    if (reason := missing_haproxy()) is not None:
        pytest.skip(reason)
