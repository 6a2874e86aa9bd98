"""Pools on the only Ray cluster of UGRO's that runs: nobody sets a variable for them, and none stays set."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Clusters, Nodes
from tests.rig.ray import LIMIT_S, run_driver

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

DRIVER = """
import os
import ugro

def square(x):
    return x * x

def settings():
    return sorted(name for name in os.environ if name.startswith(("RAY_ADDRESS", "RAY_AUTH", "RAY_NAMESPACE")))

for _ in range(2):
    with ugro.Client() as client, client.pool(engine="ray") as pool:
        print(pool.engine, sum(pool.map(square, range(10))))
print("left", settings())
"""


def test_a_pool_finds_the_only_cluster_and_leaves_the_environment_as_it_was(
    ugro: Ugro, nodes: Nodes, clusters: Clusters
) -> None:
    nodes(1)
    clusters.start()
    done = run_driver({"UGRO_HOME": str(ugro.home), "UGRO_CLUSTER": str(ugro.cluster)}, DRIVER)
    lines = done.stdout.splitlines()  # Ray writes there, too
    assert lines.count("ray 285") == 2, done.stdout + done.stderr
    assert "left []" in lines, done.stdout

    folder = ugro.home / "code"
    folder.mkdir()
    (folder / "score.py").write_text("def square(x):\n    return x * x\n")
    (folder / "items.jsonl").write_text("1\n2\n3\n")
    words = ("map", "score.py:square", "--input", "items.jsonl", "--output", "out.jsonl", "--engine", "ray")
    mapped = ugro(*words, cwd=folder, timeout=LIMIT_S)
    assert mapped.returncode == 0, mapped.stderr
    found = [json.loads(line)["result"] for line in (folder / "out.jsonl").read_text().splitlines()]
    assert found == [1, 4, 9]
