"""What is remembered of nodes, for environments."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ugro.features.environments.model import EnvHost
from ugro.features.environments.service.making import Hosts
from ugro.kernel.support.errors import EnvFailed

OLD, NEW = ("3.9.2", "/usr/bin/python3"), ("3.12.1", "/opt/bin/python3")


class Asked:
    """The part of ``PythonEnvs`` that asks a node."""

    def __init__(self, *pythons: tuple[str, str]) -> None:
        self.node = SimpleNamespace(link=object())
        self.pythons = pythons
        self.count = 0

    async def about(self, urls: tuple[str, ...], *, with_pythons: bool) -> EnvHost:
        self.count += 1
        return EnvHost("x86_64", "glibc", (2, 36), self.pythons, tuple(True for _ in urls))


def test_after_no_version_was_common_nodes_are_asked_again() -> None:
    """Somebody installs one, as the error advises, while the link stays open."""
    nodes = {"a": Asked(OLD), "b": Asked(NEW)}
    hosts = Hosts(nodes.__getitem__)  # type: ignore[arg-type]

    async def ask() -> str:
        return hosts.common_python({name: await hosts.of(name) for name in nodes})

    async def work() -> None:
        with pytest.raises(EnvFailed, match="no version of Python in common"):
            await ask()
        nodes["a"].pythons = (OLD, NEW)
        assert await ask() == "3.12"
        assert await ask() == "3.12"
        assert [one.count for one in nodes.values()] == [2, 2], "and then remembered"

    asyncio.run(work())
