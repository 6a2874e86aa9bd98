"""Keeps the journal of a study, and answers its workers as long as they run.

Nodes are only ever dialled: the agent connects to the socket of each worker. A worker that was cut off asks again, and
what it had asked before is not done twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ugro.agent.sweep.journal_file import JournalFile
from ugro.core.errors import UgroError
from ugro.core.support import clock
from ugro.nodes.calls import Duplex
from ugro.nodes.tunnels import SocketTarget
from ugro.policy.sweep.journal import MOST_OPERATION, Operation, Study, Worker, of_lost
from ugro.remote import foreign
from ugro.train.study_worker import SOCKET

log = logging.getLogger(__name__)

Dial = Callable[[str, SocketTarget], Awaitable[Duplex]]
_AGAIN_S = 0.5  # a worker that has just begun does not listen yet
_MOST_LINE = 2 * MOST_OPERATION


class StudyHost:
    def __init__(self, path: Path, dial: Dial, on_change: Callable[[], None]) -> None:
        self._dial = dial
        self._on_change = on_change
        self._file = JournalFile(path)
        self._lock = asyncio.Lock()  # of the file
        self._talks: dict[Worker, asyncio.Task[None]] = {}
        self.limit: int | None = None  # of trials, as a person says
        self.is_closed = False  # no more trials are begun
        self.is_used = False  # by the runner of its sweep, which alone writes

    @property
    def study(self) -> Study | None:
        """The first that the script made."""
        return self._file.journal.first

    @property
    def most(self) -> int | None:
        return self._file.journal.limit if self.limit is None else self.limit

    @property
    def path(self) -> Path:
        return self._file.path

    def keep(self, workers: Mapping[Worker, str], group: asyncio.TaskGroup) -> None:
        """Connects to these, which run on those nodes, and to no others."""
        for worker, talk in list(self._talks.items()):
            if worker not in workers or talk.done():
                self._talks.pop(worker).cancel()
        for worker in workers.keys() - self._talks.keys():
            name = f"study: worker {worker.job}"
            self._talks[worker] = group.create_task(self._talk(worker, workers[worker]), name=name)

    async def end_lost(self, alive: set[Worker], max_retries: int) -> None:
        """Ends the trials of workers that have ended, and queues their points again."""
        now = clock.now().at
        async with self._lock:
            lost = [trial for trial in self._file.journal.running() if trial.worker not in alive]
            operations = [one for trial in lost for one in of_lost(trial, now, max_retries)]
            if operations:
                await asyncio.to_thread(self._file.append, operations)
                self._on_change()

    async def _talk(self, worker: Worker, node: str) -> None:
        while True:
            try:
                duplex = await self._dial(node, SocketTarget(worker.job, worker.attempt, SOCKET))
                try:
                    await self._answer_all(duplex, worker)
                finally:
                    duplex.cancel()
            except UgroError as error:
                log.debug("worker %d of a study is not reached: %s", worker.job, error)
            await asyncio.sleep(_AGAIN_S)

    async def _answer_all(self, duplex: Duplex, worker: Worker) -> None:
        pending = bytearray()
        async for _, piece in duplex:
            pending += piece
            while (at := pending.find(b"\n")) >= 0:
                line = bytes(pending[:at])
                del pending[: at + 1]
                answer = await self._answer(line, worker)
                await duplex.send(json.dumps(answer).encode() + b"\n")
            if not piece or len(pending) > _MOST_LINE:
                return

    async def _answer(self, line: bytes, worker: Worker) -> dict[str, Any]:
        try:
            request = foreign.parsed(line, 2 * _MOST_LINE)
            number, client = int(request["request"]), f"{worker.job}/{worker.attempt}/{request['client']:.64}"
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UgroError(f"invalid request from worker {worker.job}: {error!r:.100}") from error
        try:
            async with self._lock:
                return {"request": number, **await self._done(request, number, client, worker)}
        except (ValueError, TypeError, KeyError, OverflowError, UgroError) as error:
            return {"request": number, "error": str(error)[:500]}

    async def _done(self, request: dict[str, Any], number: int, client: str, worker: Worker) -> dict[str, Any]:
        if request["op"] == "read":
            return {"lines": self._file.lines(int(request["start"])), "count": self._file.count}
        operation = dict(request["log"])
        if number <= self._file.journal.newest.get(client, 0):
            return {}  # it was done before the connection was cut
        limit = request.get("limit")
        if _begins_trial(operation) and self._is_full(int(operation["study_id"]), limit):
            return {"is_full": True}
        marks = {"job": worker.job, "attempt": worker.attempt, "client": client, "request": number}
        operation["ugro"] = marks if limit is None else {**marks, "limit": int(limit)}
        await asyncio.to_thread(self._file.append, [operation])
        self._on_change()
        return {}

    def _is_full(self, study: int, limit_of_script: int | None) -> bool:
        found = self._file.journal.studies.get(study)
        most = limit_of_script if self.limit is None else self.limit
        return self.is_closed or (found is not None and most is not None and found.counted >= most)


def _begins_trial(operation: Mapping[str, Any]) -> bool:
    """What a script adds or enqueues by itself has a state."""
    return operation.get("op_code") == Operation.CREATE_TRIAL and "state" not in operation
