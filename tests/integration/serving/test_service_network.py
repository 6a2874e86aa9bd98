"""A service over real addresses: each node in a network of its own, joined by cables that can be cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig import needs
from tests.rig.service import SERVER
from tests.rig.sshd import SshdNode
from tests.rig.waiting import processes_with, wait_until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(300),
    needs.programs("haproxy"),
]
LIMIT_S = 90
PORT = "8123"
ASK = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{PORT}/', timeout=30).read().decode())"
MOVING = f"""
name: echo
command: ["{{python}}", server.py, "{{port}}", one]
port: {PORT}
replicas: 2
probes: {{ready: {{path: /health}}}}
door: n001
door_lost_after: 4s
"""


def shown(ugro: Ugro) -> dict[str, Any]:
    done = ugro("serve", "status", "echo", "--json", timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["service"]
    return found


def ask(ugro: Ugro, node: str = "n001") -> str:
    """On the node of the door."""
    done = ugro("exec", node, "--", sys.executable, "-c", ASK, timeout=LIMIT_S)
    return done.stdout + done.stderr


def test_a_service_uses_the_addresses_of_its_nodes_and_replaces_what_a_cut_cable_took(
    ugro: Ugro, farm_of: Farms
) -> None:
    farm = farm_of.with_cables(3)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})
    (Path(ugro.home) / "cwd" / "server.py").write_text(SERVER)
    command = ("--", "{python}", "server.py", "{port}", "one")
    words = ("--name", "echo", "--port", PORT, "--replicas", "2", "--health", "/health", "--door", "n001")
    started = ugro("serve", *words, *command, timeout=LIMIT_S)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        found = shown(ugro)
        hosts = {one["node"]: one["address"].rpartition(":")[0] for one in found["replicas"]}
        far = next(node for node in hosts if node != "n001")
        assert hosts[far] == farm[far].host
        assert {ask(ugro).split()[-1] for _ in range(3)} == {"one"}

        farm[far].cut()
        wait_until(lambda: far not in _ready_on(shown(ugro)), LIMIT_S, "its replica to be missed")
        assert ask(ugro).split()[-1] == "one"
        wait_until(lambda: len(_ready_on(shown(ugro))) == 2, LIMIT_S, "a substitute")
        assert far not in _ready_on(shown(ugro))
        farm[far].heal()
        wait_until(lambda: len(shown(ugro)["replicas"]) == 2, LIMIT_S, "the old one to go")
    finally:
        for node in farm.nodes:
            node.heal()
        stopped = ugro("serve", "stop", "echo", timeout=LIMIT_S)
        assert stopped.returncode == 0, stopped.stderr


def test_a_node_that_was_away_when_the_service_began_serves_later(ugro: Ugro, farm_of: Farms) -> None:
    farm = farm_of.with_cables(2)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})
    (Path(ugro.home) / "cwd" / "server.py").write_text(SERVER)
    farm["n002"].cut()
    words = ("--name", "echo", "--port", PORT, "--health", "/health", "--door", "n001")
    started = ugro("serve", *words, "--", "{python}", "server.py", "{port}", "one", timeout=LIMIT_S)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        farm["n002"].heal()
        wait_until(lambda: ugro("exec", "n002", "--", "true", timeout=LIMIT_S).returncode == 0, LIMIT_S, "n002")
        scaled = ugro("serve", "scale", "echo", "2", timeout=LIMIT_S)
        assert scaled.returncode == 0, scaled.stdout + scaled.stderr
        hosts = {one["node"]: one["address"].rpartition(":")[0] for one in shown(ugro)["replicas"]}
        assert hosts == {"n001": "127.0.0.1", "n002": farm["n002"].host}
        assert {ask(ugro).split()[-2] for _ in range(10)} == {"1", "2"}
    finally:
        farm["n002"].heal()
        assert ugro("serve", "stop", "echo", timeout=LIMIT_S).returncode == 0


def test_a_door_whose_node_is_lost_is_started_elsewhere_when_the_old_one_is_dead(ugro: Ugro, farm_of: Farms) -> None:
    farm = farm_of.with_cables(3)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})
    folder = Path(ugro.home) / "cwd"
    (folder / "server.py").write_text(SERVER)
    (folder / "service.yaml").write_text(MOVING)
    started = ugro("serve", "-f", "service.yaml", timeout=LIMIT_S)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        before = shown(ugro)
        assert before["door"]["node"] == "n001"
        assert doors_on(farm["n001"])

        farm["n001"].cut()
        wait_until(lambda: shown(ugro)["door"]["node"] != "n001", 2 * LIMIT_S, "another node for the door")
        assert not doors_on(farm["n001"]), "the old door has ended by itself, although nobody reaches it"
        after = shown(ugro)
        node = after["door"]["node"]
        assert any("moved from n001" in note and node in note for note in after["notes"])
        assert "the door moved from n001" in ugro("events", timeout=LIMIT_S).stdout
        wait_until(lambda: len(_ready_on(shown(ugro))) == 2, LIMIT_S, "two replicas on the nodes that are left")
        wait_until(lambda: ask(ugro, node).split()[-1:] == ["one"], LIMIT_S, "an answer at the new door")
        farm["n001"].heal()
        wait_until(lambda: ugro("exec", "n001", "--", "true", timeout=LIMIT_S).returncode == 0, LIMIT_S, "n001")
        assert shown(ugro)["door"]["node"] == node
        assert ask(ugro, node).split()[-1] == "one"
    finally:
        farm["n001"].heal()
        assert ugro("serve", "stop", "echo", timeout=LIMIT_S).returncode == 0
    wait_until(lambda: not any(doors_on(one) for one in farm.nodes), LIMIT_S, "no door is left")


def doors_on(node: SshdNode) -> list[int]:
    """The processes of doors whose folder is on this node."""
    return processes_with(f"{node.home}/grid_workspace/.ugro/services/".encode())


def _ready_on(found: dict[str, Any]) -> list[str]:
    return [one["node"] for one in found["replicas"] if one["state"] == "ready"]
