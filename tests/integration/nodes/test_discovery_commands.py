"""``ugro node discover`` with each source that is not a program: what it lists is shown, and added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Farms
from tests.integration.discovery import NO_KEY, Lab, found
from tests.integration.sharing import commands
from tests.rig import netns
from tests.rig.consul import consul_server
from tests.rig.mdns import inside
from tests.rig.netns import Cable
from tests.rig.sshd import SshdFarm, SshdNode

pytestmark = pytest.mark.proof

SERVICE = "_ugro-rig._tcp"


@dataclass(frozen=True)
class Registry:
    """What the cluster file has for it, and what becomes of a machine that it lists."""

    section: dict[str, Any]
    labels: list[str]
    keys: dict[str, Any] = field(default_factory=dict)

    def target(self, node: SshdNode) -> str:
        return f"{node.host}:{node.port}"

    def entry(self, node: SshdNode) -> dict[str, Any]:
        return {"host": node.host, "port": node.port, "labels": self.labels}


class SshConfig(Registry):
    """What ssh needs to know of a machine stays in its configuration."""

    def target(self, node: SshdNode) -> str:
        return node.name

    def entry(self, node: SshdNode) -> dict[str, Any]:
        return {}


@contextmanager
def ssh_config(farm: SshdFarm) -> Iterator[Registry]:
    yield SshConfig({"ssh_config": "n*"}, [], {"ssh": {"config_file": str(farm.ssh_config)}})


@contextmanager
def consul(farm: SshdFarm) -> Iterator[Registry]:
    with consul_server() as server:
        for node in farm.nodes:
            server.register(node.name, node.host, node.port, "gpu")
        server.register("web1", "10.0.0.9", 22)
        yield Registry({"consul": {"url": server.url, "tag": "gpu"}}, ["gpu"])


@contextmanager
def mdns(farm: SshdFarm) -> Iterator[Registry]:
    """They are announced from the far end of a cable to this machine."""
    pytest.importorskip("zeroconf")
    if (reason := netns.available()) is not None:
        pytest.skip(reason)
    cable = Cable()
    with ExitStack() as stack:
        stack.callback(cable.remove)
        cable.lay()
        for node in farm.nodes:
            machine = stack.enter_context(inside(cable, "announce", SERVICE, node.name, node.host, str(node.port)))
            assert machine.stdout is not None
            assert machine.stdout.readline() == "announced\n"
        yield Registry({"mdns": SERVICE}, ["fast", "lab2"])


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.mark.parametrize("registry", [ssh_config, consul, mdns])
def test_machines_of_a_source_are_shown_and_those_with_a_known_key_are_added(
    registry: Callable[[SshdFarm], AbstractContextManager[Registry]], farm: SshdFarm
) -> None:
    one, two = farm.nodes
    with registry(farm) as source:
        lab = Lab(farm, keys=source.keys, command=[], **source.section)
        lab.accept(one)
        with commands(lab.cluster) as ugro:
            shown = ugro("node", "discover")
            assert shown.returncode == 0, shown.stderr
            _, *rows = [line.split("\t") for line in shown.stdout.splitlines()]
            [kind] = source.section
            assert [row[:4] for row in rows] == [[node.name, "new", source.target(node), kind] for node in (one, two)]
            assert " cores, " in rows[0][4]
            assert [rows[0][6], rows[1][4], rows[1][6]] == ["", "", NO_KEY.format("n002")]
            added = ugro("node", "discover", "--add")
            assert "added to the cluster file: n001\n" in added.stderr, added.stderr
            written = yaml.safe_load(lab.cluster.read_text())["nodes"]
            assert {name: entry or {} for name, entry in written.items()} == {"n001": source.entry(one)}
            seen = found(ugro, "n001")["n001"]
            assert (seen["standing"], seen["node"], seen["report"]["status"]) == ("node", "n001", "healthy")
