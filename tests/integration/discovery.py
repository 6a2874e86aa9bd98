"""Machines that are found, as the command line shows them, and a registry of them that is a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from tests.integration.conftest import Ugro
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import wait_until

LIMIT_S = 30
NO_KEY = "host key not accepted: ugro node trust {}"


class Lab:
    """Some sshds, a registry that is a file, and a cluster file that lists no nodes."""

    def __init__(self, farm: SshdFarm, *, keys: dict[str, Any] | None = None, **section: Any) -> None:
        """``keys``: more of the cluster file; ``section``: of ``discovery``."""
        self.farm = farm
        self.registry = farm.directory / "registry.json"
        self.cluster = farm.directory / "cluster.yaml"
        config = farm.directory / "any_ssh_config"
        # As careless as a user may be: ssh would accept every key.
        config.write_text(
            f"Host *\n  User {farm.user}\n  IdentityFile {farm.client_key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {farm.known_hosts}\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n"
        )
        discovery = {"command": ["cat", str(self.registry)], "interval": 0.2, "leave_after": 0.5, **section}
        tree = {"ssh": {"config_file": str(config)}, "discovery": discovery, **(keys or {})}
        self.cluster.write_text(yaml.safe_dump(tree, sort_keys=False))
        self.list()

    def list(self, *nodes: SshdNode) -> None:
        found = [{"name": node.name, "host": node.host, "port": node.port, "labels": ["found"]} for node in nodes]
        self.registry.write_text(json.dumps(found))

    def accept(self, *nodes: SshdNode) -> None:
        self.farm.trust(nodes)


def document(ugro: Ugro, *words: str) -> Any:
    answer = ugro(*words, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def nodes(ugro: Ugro) -> dict[str, Any]:
    return {node["name"]: node for node in document(ugro, "node", "ls")["nodes"]}


def found(ugro: Ugro, *words: str) -> dict[str, Any]:
    return {one["name"]: one for one in document(ugro, "node", "discover", *words)["found"]}


def eventually(what: Callable[[], object], text: str) -> Any:
    return wait_until(what, LIMIT_S, text)
