"""A real Ray on real sshds, from the first command to the last file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Clusters, Nodes
from tests.rig.ray import ASKS, LIMIT_S, SHARED, document, leftovers, run_driver
from tests.rig.waiting import wait_until


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_a_cluster_runs_tasks_for_its_token_and_leaves_nothing(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(1)
    before = shared_files()
    key = clusters.start()

    env = clusters.env()
    done = run_driver(env)
    assert done.stdout.strip() == "14", done.stderr
    [shown] = document(ugro("cluster", "status", "--json"))["clusters"]
    assert (shown["state"], [part["state"] for part in (shown["head"], *shown["workers"])]) == (
        "running",
        ["running", "running"],
    )
    refused = run_driver({"RAY_ADDRESS": env["RAY_ADDRESS"], "RAY_AUTH_MODE": "disabled"}, ASKS)
    assert "AuthenticationError" in refused.stderr
    assert env["RAY_AUTH_TOKEN_PATH"] not in ugro("status", "--json").stdout

    assert leftovers(key)  # it would see them
    stopped = document(ugro("cluster", "stop", "--json", timeout=LIMIT_S))["cluster"]
    assert stopped["state"] == "stopped"
    assert not Path(env["RAY_AUTH_TOKEN_PATH"]).exists()
    assert leftovers(key) == []
    # Another test may have a file there for a moment; ours would stay.
    wait_until(lambda: shared_files() <= before, 30, f"nothing new in {SHARED}: {shared_files() - before}")


def shared_files() -> set[Path]:
    """As Ray makes them. Folders there are of other tests."""
    return {path for path in SHARED.iterdir() if not path.is_dir()}
