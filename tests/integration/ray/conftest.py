"""Nodes with a Ray, and clusters on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.ray import LIMIT_S, document, leftovers
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

Nodes = Callable[[int], SshdFarm]
SMALL = ("--cpus", "1", "--memory", "600MB")


@pytest.fixture
def nodes(ugro: Ugro, farm_of: Farms) -> Nodes:
    """``nodes(2)``: so many sshds, with the Python of this test."""

    def make(count: int) -> SshdFarm:
        farm = farm_of(count)
        ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})
        return farm

    return make


class Clusters:
    """Starts clusters; at the end all are stopped, and nothing of them may be left."""

    def __init__(self, ugro: Ugro) -> None:
        self._ugro = ugro
        self._keys: dict[str, str] = {}
        self.said = ""  # by the last start

    def start(self, *words: str, name: str = "ray") -> str:
        """Its key."""
        done = self._ugro("cluster", "start", "--name", name, *SMALL, *words, timeout=LIMIT_S)
        self.said = done.stdout + done.stderr
        assert done.returncode == 0, self.said
        self._keys[name] = key = str(document(self._ugro("cluster", "status", name, "--json"))["cluster"]["id"])
        return key

    def env(self, name: str = "ray") -> dict[str, str]:
        found: dict[str, str] = document(self._ugro("cluster", "env", name, "--json"))["env"]
        return found

    def stop_all(self) -> None:
        for name, key in self._keys.items():
            self._ugro("cluster", "stop", name, timeout=LIMIT_S)
            wait_until(lambda key=key: not leftovers(key), 20, f"nothing of {name}: {leftovers(key)}")  # type: ignore[misc]


@pytest.fixture
def clusters(ugro: Ugro) -> Iterator[Clusters]:
    made = Clusters(ugro)
    yield made
    made.stop_all()
