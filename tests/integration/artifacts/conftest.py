"""What ``ugro results`` says of a job, for tests of its files."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.conftest import Ugro
from tests.rig.waiting import wait_until


def results_of(ugro: Ugro, job: str) -> dict[str, Any]:
    done = ugro("results", job, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["job"]["results"]
    return found


def until_home(ugro: Ugro, job: str) -> dict[str, Any]:
    wait_until(lambda: results_of(ugro, job)["state"] in ("home", "none"), 30, f"the files of {job} to be here")
    return results_of(ugro, job)
