"""The node program's side of its keepers: hands runs over, and knows from them what became of those.

A keeper takes runs for a while and then has a successor: whatever its runs left behind is gone with it. Here is nothing
that is not in the files, too; a keeper that is lost leaves its runs to those who look there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ugro.remote import durable
from ugro.remote.batch import dir_pool
from ugro.remote.process_id import ProcessName
from ugro.remote.program import Program, Refused
from ugro.remote.runs import daemonize
from ugro.remote.runs.start import Order
from ugro.remote.state.rundir import AgentDir, RunDir

MOST_RUNS = 2000  # of one keeper, in its life
MOST_AT_ONCE = 400
MOST_S = 60.0
_KEEPERS = 2  # that take runs at a time
_SHARE = 16
_MOST_BLANKS = 256
_MOST_TOLD = 4096
_ANSWER_S = 90.0  # as for a supervisor: a program may be on a slow file server
_FLUSH_S = 0.005
_RECEIVE_BYTES = 256 * 1024
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Told(NamedTuple):
    """A run's status in its keeper's words."""

    word: str
    text: bytes
    is_clean: bool = False  # over, and surely nobody has its files open any more


class Start(NamedTuple):
    run: RunDir
    order: Order
    on_answer: Callable[[bytes], None]  # a run's status
    on_refusal: Callable[[str, str], None]
    on_slow: Callable[[], None]  # somebody else has to start it, or may have


class Keeping:
    """Of one agent."""

    def __init__(self, program: Program, agent: AgentDir) -> None:
        self._program = program
        self._agent = agent
        self._taking: List[_Keeper] = []
        self._told: Dict[str, Told] = {}
        self._held: Dict[str, _Keeper] = {}
        self._watchers: List[Callable[[List[str]], None]] = []
        self.blanks = _Blanks(agent)

    @classmethod
    def of(cls, program: Program, agent: AgentDir) -> Keeping:
        found = _all.get(agent.path)
        if found is None:
            found = _all[agent.path] = cls(program, agent)
        return found

    # --- for those who start --------------------------------------------------------------------------------------

    def start(self, starts: List[Start]) -> None:
        for first in range(0, len(starts), _SHARE):
            some = starts[first : first + _SHARE]
            try:
                self._least_busy().take(some)
            except (OSError, Refused):  # as without a keeper: whatever is wrong is said there
                for start in some:
                    start.on_slow()

    def _least_busy(self) -> _Keeper:
        """A second one is made when one has its hands full: while it starts a process, it waits for the kernel."""
        self._retire_worn()
        taking = sorted(self._taking, key=lambda keeper: keeper.waiting)
        if taking and (not taking[0].waiting or len(taking) >= _KEEPERS):
            return taking[0]
        keeper = _Keeper(self._program, self._agent, self)
        self._taking.append(keeper)
        self._program.after(MOST_S, self._retire_worn)
        return keeper

    def _retire_worn(self) -> None:
        for keeper in [keeper for keeper in self._taking if keeper.is_worn]:
            self._taking.remove(keeper)
            keeper.retire()

    # --- for those who watch ------------------------------------------------------------------------------------

    def watch(self, on_change: Callable[[List[str]], None]) -> None:
        self._watchers.append(on_change)

    def unwatch(self, on_change: Callable[[List[str]], None]) -> None:
        self._watchers.remove(on_change)

    def holds(self, name: str) -> bool:
        """Whether we are told what becomes of it, so that there is no need to look."""
        return name in self._held

    def told(self, name: str) -> Optional[Told]:
        return self._told.get(name)

    def forget(self, name: str) -> None:
        """It is to be removed. What its keeper may still say of it comes too late; the files are looked at instead."""
        self._told.pop(name, None)
        keeper = self._held.pop(name, None)
        if keeper is not None:
            keeper.forget(name)
            self.tell([name])

    # --- for keepers --------------------------------------------------------------------------------------------

    def hold(self, name: str, keeper: _Keeper) -> None:
        self._held[name] = keeper

    def let_go(self, name: str, keeper: _Keeper) -> None:
        if self._held.get(name) is keeper:
            del self._held[name]

    def note(self, news: Dict[str, Told]) -> None:
        for name, told in news.items():
            self._told[name] = told
        while len(self._told) > _MOST_TOLD:
            self._told.pop(next(iter(self._told)))
        self.tell(list(news))

    def tell(self, names: List[str]) -> None:
        for on_change in list(self._watchers):
            on_change(names)

    def lose(self, keeper: _Keeper, names: List[str]) -> None:
        """The files have the truth about its runs."""
        if keeper in self._taking:
            self._taking.remove(keeper)
        for name in names:
            self.let_go(name, keeper)
            told = self._told.get(name)
            if told is not None and told.word != "exited":
                del self._told[name]
        self.tell(names)


_all: Dict[str, Keeping] = {}  # by the agent's path


class _Blanks:
    """Folders for runs to come, of runs that were removed. Named after us: who finds them later knows we are gone."""

    def __init__(self, agent: AgentDir) -> None:
        self._folder = os.path.join(agent.blanks_path, str(ProcessName.own()))
        self._free: List[str] = []
        self._count = 0

    def take(self) -> str:
        return self._free.pop() if self._free else ""

    def give_back(self, path: str) -> None:
        if path and os.path.isdir(path):
            self._free.append(path)

    def make_of(self, run: RunDir) -> bool:
        """Of a run that is over and that nobody has open. False: it is to be removed as any other."""
        if len(self._free) >= _MOST_BLANKS:
            return False
        if not self._count:
            with contextlib.suppress(OSError):  # a full disk: then it is removed
                durable.make_folder(self._folder)
        self._count += 1
        path = "%s/%d" % (self._folder, self._count)
        if not dir_pool.take_back(run.path, path):
            return False
        self._free.append(path)
        return True


def _most_at_once() -> int:
    """A keeper has two files open for each run, and some of its own."""
    import resource  # its first user is the first keeper

    return max(1, min(MOST_AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 3 * _SHARE))


class _Keeper:
    """One of them, as seen from here."""

    def __init__(self, program: Program, agent: AgentDir, keeping: Keeping) -> None:
        self._program = program
        self._agent = agent
        self._keeping = keeping
        self._ways = daemonize.ways_here("keeper")
        self._born = time.monotonic()
        self._taken = 0
        self._is_ready = False
        self._is_retired = False
        self._pending: Dict[int, Tuple[Start, str, float]] = {}
        self._live: Dict[str, None] = {}
        self._launch()

    @property
    def is_worn(self) -> bool:
        is_old = time.monotonic() - self._born >= MOST_S
        return is_old or self._is_retired or self._taken >= MOST_RUNS or len(self._live) >= _most_at_once()

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def take(self, starts: List[Start]) -> None:
        deadline = time.monotonic() + _ANSWER_S
        for start in starts:
            self._taken += 1
            self._pending[self._taken] = (start, self._keeping.blanks.take(), deadline)
            self._live[start.run.name] = None
            self._keeping.hold(start.run.name, self)
            self._unsent += self._line(self._taken)
        self._flush()
        self._program.after(_ANSWER_S + 0.1, self._give_up)

    def retire(self) -> None:
        """It takes no more, and ends with its last run."""
        self._is_retired = True
        self._flush()

    def _launch(self) -> None:
        self._link, theirs = socket.socketpair()
        self._said = b""
        self._unsent = b"".join(self._line(number) for number in self._pending)
        try:
            daemonize.launch(daemonize.keeper(self._agent), self._ways.pop(0), theirs.detach())
        except OSError:
            self._link.close()
            raise
        self._link.setblocking(False)
        self._program.watch(self._link.fileno(), self._hear)

    def _line(self, number: int) -> bytes:
        start, path, _ = self._pending[number]
        order = start.order
        wanted = [number, start.run.job, start.run.attempt, order.spec, order.is_of_this_boot, path]
        return _encode(wanted).encode() + b"\n"

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # that it is gone is heard
            try:
                while self._unsent:
                    self._unsent = self._unsent[self._link.send(self._unsent) :]
            except BlockingIOError:
                self._program.after(_FLUSH_S, self._flush)
                return
            if self._is_retired:
                self._link.shutdown(socket.SHUT_WR)

    def _hear(self) -> None:
        try:
            part = self._link.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lose()
            return
        *lines, self._said = (self._said + part).split(b"\n")
        news: Dict[str, Told] = {}
        for line in lines:
            self._take_in(line, news)
        self._keeping.note(news)

    def _take_in(self, line: bytes, news: Dict[str, Told]) -> None:
        head, _, text = line.partition(b" ")
        kind = head[:1]
        if kind == b"X":
            name = head[1:].decode()
            if name in self._live:
                self._let_go(name)
                news[name] = Told("exited", text[1:], text[:1] == b"+")
        elif kind == b"Q":  # it could not be written down how it ended
            self._keeping.forget(head[1:].decode())
        elif kind == b"r":
            self._is_ready = True
        else:
            pending = self._pending.pop(int(head[1:]), None)
            if pending is not None:
                self._answer(kind, text, pending, news)

    def _answer(self, kind: bytes, text: bytes, pending: Tuple[Start, str, float], news: Dict[str, Told]) -> None:
        start, path, _ = pending
        name = start.run.name
        if kind == b"S":
            if name in self._live:
                news[name] = Told("running", text)
            start.on_answer(text)
            return
        self._let_go(name)
        self._keeping.tell([name])  # nobody looked at it as long as we held it
        self._keeping.blanks.give_back(path)
        if kind == b"L":
            start.on_slow()
        else:
            complaint = json.loads(text)
            start.on_refusal(complaint["kind"], complaint["message"])

    def forget(self, name: str) -> None:
        self._live.pop(name, None)

    def _let_go(self, name: str) -> None:
        self.forget(name)
        self._keeping.let_go(name, self)

    def _give_up(self) -> None:
        """It hangs; perhaps it goes on one day. Nobody else is to wait for it."""
        now = time.monotonic()
        for number, (start, _, deadline) in list(self._pending.items()):
            if deadline <= now:
                self._is_retired = True
                del self._pending[number]
                start.on_refusal("busy", "what is to look after %s does not answer" % start.run.name)

    def _lose(self) -> None:
        self._program.unwatch(self._link.fileno())
        self._link.close()
        if not self._is_ready and self._ways:
            with contextlib.suppress(OSError):
                self._launch()
                return
        pending, self._pending = list(self._pending.values()), {}
        self._keeping.lose(self, list(self._live))
        for start, path, _ in pending:
            self._keeping.blanks.give_back(path)
            start.on_slow()
