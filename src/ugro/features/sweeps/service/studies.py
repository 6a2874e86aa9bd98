"""The studies whose journals are open, and how one is shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ugro.features.sweeps.model import Importance, Sweep, SweepReport, SweepState, Trial, TrialState
from ugro.features.sweeps.rules.decision import Decision, StudyView, best_trial, decide_workers, is_closed, is_full
from ugro.features.sweeps.rules.journal import MOST_OPERATION, Journal, Operation, Study, Worker, of_lost, shown
from ugro.features.sweeps.rules.spec import Goal, Metric
from ugro.features.sweeps.service.runner import NOT_STARTED, Parts, Runner
from ugro.features.sweeps.study_worker import SOCKET
from ugro.kernel.jobs.model import HOLDING_STATES
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.tunnels import SocketTarget
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import NotAllowed, UgroError
from ugro.node import foreign

# --- journal file -----------------------------------------------------------------------------------------------------
# The journal of a study on disk: lines that are only ever added, each on disk before its writer is answered.


_MOST_BYTES = 128 << 20  # all of it is in memory, too
_MOST_READ = 1 << 20  # in one answer


class JournalFile:
    """Blocks; used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal()
        self._lines: list[str] = []
        self._bytes = 0
        self._read()

    @property
    def count(self) -> int:
        return len(self._lines)

    def lines(self, start: int) -> list[str]:
        """From that number on; not all of them if they are many."""
        found: list[str] = []
        size = 0
        for line in self._lines[max(0, start) :]:
            size += len(line)
            if found and size > _MOST_READ:
                break
            found.append(line)
        return found

    def append(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """All of them are on disk when this returns. Raises ValueError if one is invalid: then none is added."""
        lines = [json.dumps(one, separators=(",", ":")) for one in operations]
        content = "".join(f"{line}\n" for line in lines).encode()
        if self._bytes + len(content) > _MOST_BYTES or any(len(line) > MOST_OPERATION for line in lines):
            raise ValueError(f"too large for a study: {len(content)} bytes")
        try:
            for one in operations:
                self.journal.apply(one)
            self._write(content)
        except (OSError, ValueError) as error:
            self._truncate()
            self._read()
            if isinstance(error, ValueError):
                raise
            raise UgroError(f"{self.path}: {(error.strerror or str(error)).lower()}") from error
        self._bytes += len(content)
        self._lines += lines

    def _write(self, content: bytes) -> None:
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, self._bytes)  # what an agent that was killed, or a full disk, left of a line
            os.lseek(file, 0, os.SEEK_END)
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        finally:
            os.close(file)

    def _truncate(self) -> None:
        """None of several lines counts if the disk was full after the first. The next writer tries it again."""
        with contextlib.suppress(OSError):
            os.truncate(self.path, self._bytes)

    def _read(self) -> None:
        """The rest of a line that an agent was killed in was answered to nobody: it does not count."""
        self.journal, self._lines = Journal(), []
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self._bytes = len(whole)
        for line in whole.decode().splitlines():
            try:
                self.journal.apply(json.loads(line))
            except ValueError as error:
                raise UgroError(f"{self.path}: line {len(self._lines) + 1}: {error}") from error
            self._lines.append(line)


# --- study host -------------------------------------------------------------------------------------------------------
# Keeps the journal of a study, and answers its workers as long as they run.
#
# Nodes are only ever dialled: the agent connects to the socket of each worker. A worker that was cut off asks again,
# and what it had asked before is not done twice.


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


# --- studies ----------------------------------------------------------------------------------------------------------


METHOD = "study"
_MOST_OPEN = 32


class Studies:
    def __init__(self, folder: Path, dial: Dial) -> None:
        self._folder = folder
        self._dial = dial
        self._hosts: dict[int, StudyHost] = {}

    async def host(self, sweep: int, on_change: Callable[[], None]) -> StudyHost:
        """The same object as long as it is used."""
        if sweep not in self._hosts:
            # Never one that is used: a second one for the same journal would know only what was there when it read it.
            for number in [number for number, host in self._hosts.items() if not host.is_used][_MOST_OPEN:]:
                del self._hosts[number]
            host = await asyncio.to_thread(StudyHost, self._folder / str(sweep) / "journal.log", self._dial, on_change)
            self._hosts.setdefault(sweep, host)
        return self._hosts[sweep]


def study_report(sweep: Sweep, workers: Sequence[Trial], host: StudyHost | None, elapsed_s: float) -> SweepReport:
    """``host``: None if its journal cannot be read."""
    study = host.study if host else None
    trials = shown(study) if study else []
    goal: Goal = "maximize" if study and study.is_maximized else "minimize"
    best = best_trial(Metric("value", goal), [trial for trial in trials if trial.state is TrialState.COMPLETE])
    most = host.most if host and sweep.budget.trials is None else sweep.budget.trials
    ended = study.ended if study else 0
    left_s = None
    if sweep.state is SweepState.RUNNING and most is not None and ended and elapsed_s > 0:
        left_s = max(0, most - ended) * elapsed_s / ended
    return SweepReport(
        sweep.id,
        sweep.name,
        sweep.user,
        sweep.state,
        sweep.reason,
        sweep.created_at,
        METHOD,
        "value",
        goal,
        tuple(dict.fromkeys(name for trial in trials for name, _ in trial.settings)),
        sweep.budget,
        most,
        tuple(trials),
        best.number if best else None,
        left_s,
        workers=tuple(workers),
    )


def study_importances(path: Path) -> tuple[Importance, ...]:
    """By Optuna, from the journal itself. Raises NotAllowed."""
    from ugro.features.sweeps.service.sampler import load_optuna, require

    require("tpe")
    if not path.exists():
        raise NotAllowed("importances need some complete trials; there are none yet", hint="let more trials end")
    optuna = load_optuna()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    names = [one.study_name for one in storage.get_all_studies()]
    try:
        study = optuna.load_study(study_name=names[0], storage=storage)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError, IndexError) as error:
        raise NotAllowed(f"importances need some complete trials: {error}", hint="let more trials end") from error
    return tuple(Importance(name, float(share)) for name, share in found.items())


# --- study runner -----------------------------------------------------------------------------------------------------
# One study that is not over: its workers are jobs, recorded and started like trials; its trials are in its journal.


class StudyRunner(Runner):
    def __init__(
        self, parts: Parts, sweep: Sweep, trials: list[Trial], on_change: Callable[[], None], host: StudyHost
    ) -> None:
        super().__init__(parts, sweep, trials, on_change)
        self._host = host
        host.is_used = True
        self.group: asyncio.TaskGroup | None = None  # of its connections

    async def step(self) -> None:
        self._host.limit = self.sweep.budget.trials
        self._host.is_closed = is_closed(self._study_view()) or self.sweep.state is not SweepState.RUNNING
        await super().step()
        jobs = [job for job in self._found.values() if job.state in HOLDING_STATES and job.held is not None]
        workers = {Worker(job.id, job.attempt): job.held.nodes[0] for job in jobs if job.held is not None}
        assert self.group is not None
        self._host.keep(workers, self.group)
        await self._host.end_lost(set(workers), self._base.retry.max_retries)
        if is_full(self._study_view()):
            for trial in self.open:
                if (job := self._found.get(trial.number)) is not None and job.state in NOT_STARTED:
                    await self._end(trial, TrialState.STOPPED, "the study has all its trials")

    def leave(self) -> None:
        assert self.group is not None
        self._host.keep({}, self.group)
        self._host.is_used = False

    def decision(self) -> Decision:
        return decide_workers(self._study_view())

    def _study_view(self) -> StudyView:
        view, study = self.view(), self._host.study
        counted, ended = (study.counted, study.ended) if study else (0, 0)
        return StudyView(
            view.trials, self.sweep.budget, self._host.most, counted, ended, view.waiting, view.elapsed_s
        )
