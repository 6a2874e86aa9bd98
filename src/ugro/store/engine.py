"""One connection in one thread. Changes that arrive together share one durable commit.

A change is acknowledged after its commit is durable. If one fails, only that one is rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ugro.core.errors import Damaged, StoreAway, UgroError
from ugro.store.backend import THOROUGH, Backend, ConnectionLost, Design, Opening
from ugro.store.connection import Connection, Work
from ugro.store.examine import damaged
from ugro.store.migrations_folder import newest_schema
from ugro.store.reserve import Reserve
from ugro.store.sqlite_file import SqliteFile

__all__ = ["THOROUGH", "Database", "Design", "Opening", "Work", "newest_schema"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_AWAY = "the agent waits for it, and jobs on the nodes keep running; see: ugro agent status"


@dataclass(slots=True)
class _Request:
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    then: Callable[[Any], None] | None = None
    counts: bool = True
    result: Any = None
    error: BaseException | None = None

    def resolve(self) -> None:
        if self.then is not None and self.error is None:
            self.then(self.result)
        if self.done.done():  # the caller was cancelled; the change stands
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Database:
    def __init__(self, at: Path | Backend, design: Design | None = None, reserve: Reserve | None = None) -> None:
        """``at``: a file of SQLite, or what is used instead. ``reserve``: space for it when its disk is full."""
        self._backend: Backend = SqliteFile(at, design or Design(), reserve) if isinstance(at, Path) else at
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="database", daemon=True)
        self.damage: Damaged | None = None  # found while it was in use; nothing is read or written from then on
        self.advise: Callable[[], str | None] = lambda: None  # a hint for that error
        self._minor_changes = 0
        self.changes = 0  # rows that were changed and are durable, of changes that count

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def problem(self) -> StoreAway | None:
        """Set while nothing can be read or written: all who ask wait, until it can."""
        what = self._backend.problem
        return StoreAway(f"{self.name} does not answer: {what}", hint=_AWAY) if what is not None else None

    async def open(self, opening: Opening | None = None) -> None:
        """Refuses what cannot be used, before anything is written."""
        await asyncio.to_thread(self._examine, opening or Opening())
        self._thread.start()
        await self.run(self._backend.migrate)

    def refuse(self, what: str) -> None:
        """Stops all use: it is damaged."""
        if self.damage is None:
            self.damage = damaged(self.name, what, self.advise())
            log.error("%s; nothing more is written to it; %s", self.damage, self.damage.hint)

    def give_up(self) -> None:
        """The agent stops: who waits for a lost connection, or would, gets an error."""
        self._backend.give_up()

    async def close(self) -> None:
        self._backend.give_up()
        self._requests.put(None)
        if self._thread.ident is None:  # it was not opened
            await asyncio.to_thread(self._backend.close)
            return
        await asyncio.to_thread(self._thread.join, 10)

    async def run(self, work: Work[T], then: Callable[[T], None] | None = None, *, counts: bool = True) -> T:
        """Runs ``work`` in a transaction and returns when it is durable. A read costs no sync.

        ``work`` may be run again, if it is certain that nothing of it was committed. ``then`` is called with the result
        in the order of the transactions, even if the caller was cancelled. ``counts``: False for what an idle agent
        writes now and then, too.
        """
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future(), then, counts)
        self._requests.put(request)
        try:
            result: T = await request.done
        except self._backend.errors as error:
            raise self._backend.unusable(error) from error
        return result

    async def run_each(self, works: Iterable[Work[T]], then: Callable[[T], None]) -> list[T | Exception]:
        """Many small changes in one commit; each is applied or rolled back alone."""
        each = list(works)

        def notify(outcomes: list[T | Exception]) -> None:
            for outcome in outcomes:
                if not isinstance(outcome, Exception):
                    then(outcome)

        return await self.run(lambda db: [self._done_or_undone(db, work) for work in each], then=notify)

    def _serve(self) -> None:
        while (first := self._next()) is not None:
            batch = [first]
            is_last = False
            while not self._requests.empty() and len(batch) < 1000:
                request = self._requests.get()
                if request is None:
                    is_last = True
                    break
                batch.append(request)
            self._run_together(batch)
            for loop, requests in _by_loop(batch).items():
                loop.call_soon_threadsafe(_resolve, requests)
            if is_last:
                break
        self._backend.close()

    def _next(self) -> _Request | None:
        while True:
            try:
                return self._requests.get(timeout=self._backend.look_every_s)
            except queue.Empty:
                self._look()

    def _look(self) -> None:
        """Nobody asks for anything: a lost connection is noticed and replaced all the same."""
        try:
            self._backend.look()
        except ConnectionLost as lost:
            with contextlib.suppress(UgroError):  # it was given up, which the next request is told
                self._backend.recover(lost)

    def _examine(self, opening: Opening) -> None:
        try:
            found = self._backend.examine(opening)
        except Damaged as error:
            error.hint = "; or ".join(filter(None, (self.advise(), error.hint)))
            raise
        if found is not None:
            opening.on_examined(found)

    def _run_together(self, batch: list[_Request]) -> None:
        if self.damage is not None:
            self._refuse_all(batch)
            return
        failures: tuple[type[Exception], ...] = (*self._backend.errors, OSError, UgroError)
        try:
            self._run_until_known(batch)
        except failures as error:
            # The commit did not happen: nothing of this batch may be acknowledged.
            for request in batch:
                request.error = request.error or error
            self._backend.roll_back()
            if (what := self._backend.damage_in(error)) is not None:
                self.refuse(what)
                self._refuse_all(batch)

    def _run_until_known(self, batch: list[_Request]) -> None:
        """Again only if it is certain that nothing of it was committed."""
        while True:
            try:
                self._run_once(batch)
            except ConnectionLost as lost:
                if not self._backend.recover(lost):
                    continue
            except self._backend.errors as error:
                if not self._backend.makes_room(error):
                    raise
                self._backend.roll_back()
                continue
            return

    def _run_once(self, batch: list[_Request]) -> None:
        connection = self._backend.begin()
        minor = 0
        for request in batch:
            before = connection.total_changes
            outcome = self._done_or_undone(connection, request.work, is_alone=len(batch) == 1)
            request.error = outcome if isinstance(outcome, Exception) else None
            request.result = outcome
            minor += 0 if request.counts else connection.total_changes - before
        changes = connection.total_changes
        self._backend.commit()
        self._minor_changes += minor
        self.changes = changes - self._minor_changes

    def _refuse_all(self, batch: list[_Request]) -> None:
        assert self.damage is not None
        for request in batch:
            request.error = Damaged(self.damage.message, hint=self.damage.hint)

    def _done_or_undone(self, connection: Connection, work: Work[T], *, is_alone: bool = False) -> T | Exception:
        """``is_alone``: nothing else is in the transaction, so it needs no savepoint."""
        if not is_alone:
            connection.execute("SAVEPOINT work")
        outcome: T | Exception
        try:
            outcome = work(connection)
        except Exception as error:  # the caller gets it; the thread must serve the others
            if self._backend.is_fatal(error):
                raise
            outcome = error
            for statement in ("ROLLBACK", "BEGIN") if is_alone else ("ROLLBACK TO work",):
                connection.execute(statement)
        if not is_alone:
            connection.execute("RELEASE work")
        return outcome


def _by_loop(batch: list[_Request]) -> dict[asyncio.AbstractEventLoop, list[_Request]]:
    loops: dict[asyncio.AbstractEventLoop, list[_Request]] = {}
    for request in batch:
        loops.setdefault(request.loop, []).append(request)
    return loops


def _resolve(requests: list[_Request]) -> None:
    for request in requests:
        request.resolve()


