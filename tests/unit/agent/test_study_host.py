"""What the workers of a study send is not trusted: whatever it is, the others are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from ugro.agent.sweep.study_host import StudyHost
from ugro.nodes.calls import Duplex
from ugro.nodes.tunnels import SocketTarget
from ugro.policy.sweep.journal import Worker


class Connection:
    """Of a worker that says one thing."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self.answered: asyncio.Queue[bytes] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        yield 1, self._said + b"\n"
        await asyncio.Event().wait()

    async def send(self, content: bytes) -> None:
        self.answered.put_nowait(content)

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    "strange",
    [b'{"request": 1e999, "client": "c", "op": "read"}', b"[" * 100_000, b"[]", b"\xff", b'{"request": 1}'],
)
def test_a_worker_that_sends_what_is_no_request_is_dialled_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strange: bytes
) -> None:
    monkeypatch.setattr("ugro.agent.sweep.study_host._AGAIN_S", 0.001)
    good = Connection(json.dumps({"request": 1, "client": "c", "op": "read", "start": 0}).encode())
    coming = [Connection(strange), good]

    async def dial(node: str, target: SocketTarget) -> Duplex:
        return cast(Duplex, coming.pop(0))

    async def work() -> None:
        host = StudyHost(tmp_path / "journal.log", dial, lambda: None)
        async with asyncio.TaskGroup() as group:
            host.keep({Worker(1, 1): "n1"}, group)
            answer = json.loads(await asyncio.wait_for(good.answered.get(), 10))
            host.keep({}, group)
        assert answer == {"request": 1, "lines": [], "count": 0}

    asyncio.run(work())
