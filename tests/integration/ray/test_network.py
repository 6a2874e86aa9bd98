"""A cluster over real addresses: each node in a network of its own, joined by cables that can be cut."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.integration.conftest import Completed, Farms, Ugro
from tests.integration.ray.conftest import Clusters
from tests.integration.ray.test_faults import shown
from tests.rig.ray import ASKS, LIMIT_S, TASKS, run_driver
from tests.rig.waiting import wait_until

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


def drive(ugro: Ugro, clusters: Clusters) -> Completed:
    """A driver on the head's node."""
    env = [f"{name}={value}" for name, value in clusters.env().items()]
    return ugro("exec", "n001", "--", "env", *env, sys.executable, "-c", TASKS, "4", timeout=LIMIT_S)


def test_a_cluster_uses_the_addresses_of_its_nodes_and_survives_a_cut_cable(
    ugro: Ugro, farm_of: Farms, clusters: Clusters
) -> None:
    farm = farm_of.with_cables(2)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})
    clusters.start("--head", "n001")
    head, port = shown(ugro)["address"].split(":")
    assert head == farm["n001"].host
    assert "14" in drive(ugro, clusters).stdout

    # From a third machine: no token, no entry; and the dashboard is not there at all.
    refused = run_driver({"RAY_ADDRESS": f"{head}:{port}", "RAY_AUTH_MODE": "disabled"}, ASKS)
    assert "AuthenticationError" in refused.stderr
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((head, shown(ugro)["dashboard_port"]), 5)

    farm["n002"].cut()
    wait_until(lambda: shown(ugro)["workers"][1]["is_alive"] is False, LIMIT_S, "Ray to miss it")
    assert "14" in drive(ugro, clusters).stdout
    farm["n002"].heal()
    wait_until(lambda: _is_well(ugro), LIMIT_S, "the worker to join again")
    assert "14" in drive(ugro, clusters).stdout


def _is_well(ugro: Ugro) -> bool:
    worker = shown(ugro)["workers"][1]
    return bool(worker["is_ready"] and worker["is_alive"])
