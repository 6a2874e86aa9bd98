"""A small cluster of this machine's own, its commands, and the end of a test: all jobs final, then the judge."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import yaml

from tests.rig import agent as rig
from tests.rig.agent import AgentProcess
from tests.rig.judge import Book, Final, Ledger, Task, Verdict, judge, orphans
from tests.rig.waiting import end_all_with_variable, wait_until
from ugro import Client
from ugro.client.http import AgentGone
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.support.errors import StoreAway, UgroError, Unreachable

T = TypeVar("T")
_PATIENCE_S = 40.0
_QUIET_S = 15.0
_AGAIN_S = 0.02


class Place:
    """``close`` ends whatever is left, so that a test that failed disturbs no other."""

    def __init__(self, nodes: int = 3) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="p"))  # short: a socket lives in it
        self.home = self.folder / "u"
        self.home.mkdir()
        self.roots = [self.folder / f"n{number}" for number in range(1, nodes + 1)]
        self.cluster = self.folder / "cluster.yaml"
        described = {root.name: {"transport": "local", "remote_root": str(root)} for root in self.roots}
        self.cluster.write_text(yaml.safe_dump({"nodes": described}))
        self.ledger = Ledger(self.folder)
        self.book = Book()
        self._homes = [self.home]
        self._agents: list[AgentProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents:
            agent.kill()
        for home in self._homes:
            rig.end_agent(home)
        self.ledger.end_all()
        end_all_with_variable("TEST_LEDGER", [str(self.ledger.path)])
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- agents -------------------------------------------------------------------------------------------------

    def agent(
        self, crash: str = "", home: Path | None = None, env: Mapping[str, str] | None = None
    ) -> AgentProcess:
        """One that was told where to die or stand still; the next that a command starts knows nothing of it."""
        more = {"UGRO_AGENT_CRASH_POINT": crash} if crash else {}
        self._agents.append(AgentProcess(home or self.home, self.cluster, {**(env or {}), **more}))
        return self._agents[-1]

    def copy_of_state(self) -> Path:
        """As from a backup: the same agent, as far as its state knows."""
        copy = self.other_home()
        for name in ("state.db", "state.db-wal"):
            with suppress(FileNotFoundError):
                shutil.copy(self.home / name, copy / name)
        return copy

    def other_home(self) -> Path:
        """An empty state directory, as on another machine."""
        other = self.folder / f"u{len(self._homes) + 1}"
        other.mkdir()
        self._homes.append(other)
        return other

    def sql(self, statement: str) -> list[Any]:
        """Behind the agent's back."""
        with closing(sqlite3.connect(self.home / "state.db")) as db, db:
            return db.execute(statement).fetchall()

    # --- commands -----------------------------------------------------------------------------------------------

    def submit(self, task: Task, **fields: object) -> int:
        """Until it is acknowledged: an agent may end before it answers, and the same key makes the same job."""
        self.book.asked(task)
        wanted = {**self.ledger.fields(task), **fields}
        job = self.ask(lambda client: client.jobs.submit(fields=wanted, env={}, key=task.token))
        self.book.acknowledged(task, job.id)
        return job.id

    def submit_together(self, tasks: Sequence[Task]) -> None:
        """In one request, and so in one transaction; as with ``submit``, until it is acknowledged."""
        for task in tasks:
            self.book.asked(task)
        wanted = [self.ledger.fields(task) for task in tasks]
        keys = [task.token for task in tasks]
        for task, job in zip(tasks, self.ask(lambda client: client.jobs.submit_many(wanted, keys=keys)), strict=True):
            self.book.acknowledged(task, job.id)

    def cancel(self, token: str) -> None:
        self.ask(lambda client: client.ask(CancelJob(str(self.book.jobs[token]))))
        self.book.was_cancelled(token)

    def job(self, token: str, home: Path | None = None) -> Job:
        return self.ask(lambda client: client.jobs.get(self.book.jobs[token]), home)

    def read_logs(self, token: str, home: Path | None = None) -> None:
        """As a user does: only then what small commands wrote is in files, at which the judge looks."""
        self.ask(lambda client: list(client.jobs.logs(self.book.jobs[token])), home)

    def ask(self, question: Callable[[Client], T], home: Path | None = None) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with Client(home=home or self.home, cluster=self.cluster) as client:
                    return question(client)
            except (AgentGone, Unreachable, StoreAway) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(self.seen(f"nobody answers: {error}")) from error
                time.sleep(_AGAIN_S)

    # --- the end ------------------------------------------------------------------------------------------------

    def wait_begun(self, token: str) -> None:
        def has_begun() -> bool:
            return any((entry.token, entry.event) == (token, "begin") for entry in self.ledger.entries())

        self.wait(has_begun, f"{token} to begin")

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = _PATIENCE_S) -> T:
        """Commands are given meanwhile, as a user would: the first one starts an agent where there is none."""

        def look() -> T:
            with suppress(UgroError):
                self.ask(lambda client: client.agent())
            return condition()

        try:
            return wait_until(look, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(self.seen(str(error))) from error

    def finals(self, home: Path | None = None, timeout_s: float = _PATIENCE_S) -> dict[str, Final]:
        """When all are final; fails with what was last seen."""
        ended: dict[str, Final] = {}
        deadline = time.monotonic() + timeout_s
        while len(ended) < len(self.book.jobs):
            waits = []
            for token in self.book.jobs.keys() - ended.keys():
                job = self.job(token, home)
                if job.is_final:
                    self.read_logs(token, home)
                    ended[token] = Final(str(job.state), job.attempt, job.exit_code)
                else:
                    waits.append(f"{token}: {job.state} in attempt {job.attempt}: {job.reason}")
            assert not waits or time.monotonic() < deadline, self.seen("not final: " + "; ".join(waits), home)
            time.sleep(_AGAIN_S if waits else 0)
        return ended

    def judge(self, finals: dict[str, Final], home: Path | None = None) -> Verdict:
        verdict = judge(self.book, self.ledger, finals, home or self.home)
        with suppress(AssertionError):
            wait_until(lambda: not orphans(self.ledger, self.roots), _QUIET_S)
        verdict.orphans += orphans(self.ledger, self.roots)
        assert verdict.complaints == [], self.seen("\n".join(verdict.complaints), home)
        return verdict

    def seen(self, complaint: str, home: Path | None = None) -> str:
        parts: Iterable[str] = (
            complaint,
            "--- runs",
            *rig.run_folders(self.folder),
            "--- ledger",
            *self.ledger.path.read_text().splitlines()[-40:],
            "--- events",
            *rig.events(home or self.home),
            "--- agent.log",
            rig.log_tail(home or self.home),
        )
        return "\n".join(parts)
