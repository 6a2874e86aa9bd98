"""Scripts that connect with ``ray.init("ray://HOST:PORT")``, as they are: with the cluster's token, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Clusters, Nodes
from tests.rig.ray import document, run_driver
from ugro.features.ray.on_node_start import REFUSAL

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1500)]

SCRIPT = """
import os
import sys

import ray

ray.init(sys.argv[1])

@ray.remote
def square(x):
    return x * x, os.environ.get("SHARD_FOLDER")

@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self, by):
        self.count += by
        return self.count

counter = Counter.remote()
found = ray.get([square.remote(x) for x in range(4)])
print("sum", sum(ray.get([counter.add.remote(x) for x, _ in found])[-1:]), {folder for _, folder in found})
"""


def test_a_script_connects_from_elsewhere_with_the_token_and_is_told_without_it(
    ugro: Ugro, nodes: Nodes, clusters: Clusters, tmp_path: Path
) -> None:
    nodes(1)
    clusters.start("--env", "SHARD_FOLDER=/data/shards")
    assert "looking at the nodes\n" in clusters.said, "it says what it waits for, without a terminal"
    address = document(ugro("cluster", "status", "ray", "--json"))["cluster"]["client_address"]
    assert address.startswith("ray://127.0.0.2:100")
    assert address in clusters.said
    assert address in ugro("cluster", "status").stdout
    assert address in ugro("cluster", "env").stderr

    token = {name: value for name, value in clusters.env().items() if name.startswith("RAY_AUTH")}
    done = run_driver(token, SCRIPT, address)
    assert "sum 14 {'/data/shards'}" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    assert "ray://" not in ugro("cluster", "env").stdout, "a shell reads it"

    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    for secret in ({}, wrong):
        refused = run_driver({"HOME": str(tmp_path), **secret}, SCRIPT, address)
        assert refused.returncode != 0
        assert REFUSAL in refused.stderr, refused.stderr
