"""``ugro launch --launcher ray``: a driver with a cluster of its own, ended with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Nodes
from tests.rig.ray import LIMIT_S

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

DRIVER = """
import json, sys
import ray
import helper

ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=0.1)
def where(x):
    return helper.plus_one(x)

nodes = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
tasks = [where.options(resources={f"node-n{i:03}": 0.1}).remote(i) for i in (1, 2)]
print(json.dumps({"nodes": nodes, "results": ray.get(tasks)}))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 7])
def test_a_driver_has_all_nodes_and_its_exit_code_is_the_jobs(ugro: Ugro, nodes: Nodes, code: int) -> None:
    nodes(2)
    folder = Path(ugro.home / "code")
    folder.mkdir()
    (folder / "driver.py").write_text(DRIVER)
    (folder / "helper.py").write_text("def plus_one(x):\n    return x + 1\n")
    words = ("launch", "--launcher", "ray", "--nodes", "2", "--cpus", "1", "driver.py", "--", str(code))
    done = ugro(*words, cwd=folder, timeout=LIMIT_S)
    assert done.returncode == code, done.stdout + done.stderr
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert said == {"nodes": ["n001-0", "n002-1"], "results": [2, 3]}
