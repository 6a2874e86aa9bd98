"""What the workers of a study send is not trusted: whatever it is, the others are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from ugro.features.sweeps.rules.journal import Worker
from ugro.features.sweeps.service.studies import Studies, StudyHost, study_importances
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.tunnels import SocketTarget
from ugro.kernel.support.errors import NotAllowed

LIMIT_S = 60


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
    monkeypatch.setattr("ugro.features.sweeps.service.studies._AGAIN_S", 0.001)
    good = Connection(json.dumps({"request": 1, "client": "c", "op": "read", "start": 0}).encode())
    coming = [Connection(strange), good]

    async def dial(node: str, target: SocketTarget) -> Duplex:
        return cast(Duplex, coming.pop(0))

    async def work() -> None:
        host = StudyHost(tmp_path / "journal.log", dial, lambda: None)
        async with asyncio.TaskGroup() as group:
            host.keep({Worker(1, 1): "n1"}, group)
            answer = json.loads(await asyncio.wait_for(good.answered.get(), LIMIT_S))
            host.keep({}, group)
        assert answer == {"request": 1, "lines": [], "count": 0}

    asyncio.run(work())


async def _nobody(node: str, target: SocketTarget) -> Duplex:
    raise AssertionError("nobody is dialled")


def test_a_journal_that_is_used_has_one_host_however_many_are_looked_at(tmp_path: Path) -> None:
    """A second one would cut off what the first has written since."""

    async def work() -> None:
        studies = Studies(tmp_path, _nobody)
        for number in range(1, 41):
            await studies.host(number, lambda: None)
        used = await studies.host(40, lambda: None)
        used.is_used = True
        for number in range(41, 80):
            await studies.host(number, lambda: None)
        assert await studies.host(40, lambda: None) is used

    asyncio.run(work())


def test_importances_of_a_study_without_a_trial_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotAllowed, match="there are none yet"):
        study_importances(tmp_path / "1" / "journal.log")
