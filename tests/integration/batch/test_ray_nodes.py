"""A pool on two Ray nodes, one of which is lost while the map runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.proof

DRIVER = """
import time, ray, ugro
from ray.cluster_utils import Cluster

def slow(number):
    time.sleep(0.02)
    return number

if __name__ == "__main__":
    settings = {"include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **settings})
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    with ugro.Pool(address="auto") as pool:
        print("slots", pool.start())
        found = []
        for result in pool.map(slow, range(300), retries=0):
            found.append(result)
            if len(found) == 50:
                cluster.remove_node(other, allow_graceful=False)
        print("right" if found == list(range(300)) else found)
    ray.shutdown()
    cluster.shutdown()
"""


def test_the_items_of_a_lost_node_run_elsewhere_and_none_is_blamed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    # Ray's own paths must be short; with a token in somebody's home, its head would ask for one.
    env = {**os.environ, "TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    lines = done.stdout.splitlines()  # Ray writes there, too
    assert "slots 2" in lines, done.stderr[-3000:]
    assert "right" in lines, done.stdout[-3000:]
    assert len(list(tmp_path.glob("ugro-note-*"))) <= 1  # that of the lost node
