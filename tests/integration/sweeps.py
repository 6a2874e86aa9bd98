"""A sweep as its command line shows it."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.conftest import Ugro
from tests.rig.waiting import wait_until

_OVER_S = 60


def shown(ugro: Ugro, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("sweep", "status", name, "--json").stdout)["sweep"]
    return found


def over(ugro: Ugro, name: str) -> dict[str, Any]:
    """The sweep, once none of its jobs runs."""

    def look() -> dict[str, Any] | None:
        found = shown(ugro, name)
        is_open = any(one["state"] in ("pending", "running") for one in found["workers"] or found["trials"])
        return None if found["state"] == "running" or is_open else found

    found = wait_until(look, _OVER_S, f"sweep {name} to be over")
    assert found is not None
    return found
