"""The agent's side of ``runs.watch``, for tests: what it is told, and what it then believes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.rig.nodeprogram import LocalNode
from ugro.kernel.links.calls import Stream
from ugro.kernel.links.link import Link
from ugro.node import wire


class Watcher:
    """The agent's side: what it believes of each run, and every document it got."""

    def __init__(self, node: LocalNode, link: Link) -> None:
        self.node = node
        self.link = link
        self.documents: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.stream: Stream = link.stream("runs.watch", node.params())
        self._reading: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        """Reads from the first time on that it is waited for."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    assert not self._reading.done(), self._reading.exception()
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"last told: {self.documents[-3:]}, believed: {self.runs}") from None

    async def is_quiet_for(self, seconds: float) -> None:
        count = len(self.documents)
        with pytest.raises(AssertionError):
            await self.until(lambda: len(self.documents) > count, seconds)

    async def _read(self) -> None:
        async for kind, payload in self.stream:
            self._take(kind, payload)

    def _take(self, kind: int, payload: bytes) -> None:
        assert kind == wire.OUT
        document = json.loads(payload)
        self.documents.append(document)
        self.sizes.append(len(payload))
        for run in document["runs"]:
            self.runs[f"{run['job']}.{run['attempt']}"] = run
        for name in document.get("gone", ()):
            del self.runs[name]

    def status(self, name: str) -> str | None:
        return str(self.runs[name]["status"]) if name in self.runs else None


async def comes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        for pause_s in itertools.repeat(0.01):
            if condition():
                return
            await asyncio.sleep(pause_s)
