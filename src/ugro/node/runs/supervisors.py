"""The node program's side of its supervisors: sends them runs, and hears from them what became of those.

Everything known here is in the files, too: the runs of a supervisor that is lost are looked up there.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

from ugro.node import foreign
from ugro.node import machine as disk
from ugro.node.program import Program, Refused
from ugro.node.runs import daemonize
from ugro.node.runs.dir_pool import DirPool
from ugro.node.runs.rundir import AgentDir, RunDir

# A shared supervisor takes runs for a while, and then has a successor: what its runs left behind ends with it.
MOST_RUNS = 2000  # of one supervisor, in its life
MOST_AT_ONCE = 400
MOST_S = 60.0
_SHARED = 2  # that take runs at a time
_PART = 16
_MOST_REPORTS = 4096
_ANSWER_S = 90.0  # a program may be on a slow file server
_LOOK_S = 0.02
_FLUSH_S = 0.005
_RECEIVE_BYTES = 256 * 1024
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Report(NamedTuple):
    """A run's status in its supervisor's words."""

    word: str
    text: bytes
    is_clean: bool = False  # over, and surely no process has its files open any more
    changes: int = 0  # how often it has changed while it runs


class Start(NamedTuple):
    """A run to be started, and who hears how that went."""

    run: RunDir
    spec: Dict[str, Any]
    as_of: Optional[Dict[str, Any]]
    is_of_this_boot: bool
    on_answer: Callable[[bytes], None]  # a run's status
    on_refusal: Callable[[str, str], None]
    ticket: Optional[str] = None


class Supervisors:
    """Of one agent."""

    def __init__(self, program: Program, agent: AgentDir) -> None:
        self._program = program
        self._agent = agent
        self._shared: List[_Supervisor] = []  # that take runs
        self._reports: Dict[str, Report] = {}
        self._held: Dict[str, _Supervisor] = {}
        self._watchers: List[Callable[[List[str]], None]] = []
        self.pool = DirPool(agent)

    @classmethod
    def of(cls, program: Program, agent: AgentDir) -> Supervisors:
        found = _all.get(agent.path)
        if found is None:
            found = _all[agent.path] = cls(program, agent)
        return found

    # --- starting -----------------------------------------------------------------------------------------------

    def start(self, starts: List[Start]) -> None:
        """A run shares a supervisor where its spec allows that; every other one has its own.

        A process for each of a thousand small runs would cost more than the runs. But a supervisor that is killed
        takes all its runs with it, and only with one run it knows of every process whose that is.
        """
        shared = [start for start in starts if _may_share(start.spec)]
        for first in range(0, len(shared), _PART):
            part = shared[first : first + _PART]
            try:
                self._least_busy().take(part)
            except (OSError, Refused) as error:
                for start in part:
                    _refuse(start, error)
        for start in starts:
            if not _may_share(start.spec):
                self.start_alone(start)

    def start_alone(self, start: Start) -> None:
        """Soon: a thousand starts that come at once must not keep other calls from being heard."""
        self._program.after(0.0, lambda: self._start_alone(start))

    def _start_alone(self, start: Start) -> None:
        try:
            supervisor = _Supervisor(self._program, self._agent, self, start.run)
        except (OSError, Refused) as error:
            _refuse(start, error)
        else:
            supervisor.take([start])
            supervisor.retire()

    def _least_busy(self) -> _Supervisor:
        """A second one is made when one has its hands full: while it starts a process, it waits for the kernel."""
        self._retire_worn()
        taking = sorted(self._shared, key=lambda supervisor: supervisor.waiting)
        if taking and (not taking[0].waiting or len(taking) >= _SHARED):
            return taking[0]
        supervisor = _Supervisor(self._program, self._agent, self)
        self._shared.append(supervisor)
        self._program.after(MOST_S, self._retire_worn)
        return supervisor

    def _retire_worn(self) -> None:
        for supervisor in [supervisor for supervisor in self._shared if supervisor.is_worn]:
            self._shared.remove(supervisor)
            supervisor.retire()

    def answer_from_files(self, start: Start, until: float) -> None:
        """Once it is more than starting: another node program's supervisor may be at it, or ours is gone."""
        try:
            status = start.run.status()
        except OSError as error:
            start.on_refusal(*disk.refusal(error, start.run.agent.root))
            return
        if status["status"] == "starting" and time.monotonic() < until:
            self._program.after(_LOOK_S, lambda: self.answer_from_files(start, until))
        elif status["status"] != "dead" or status["is_claimed"]:
            start.on_answer(_encode(_without_tail(status)).encode())
        else:
            start.on_refusal("not-started", "the supervisor of %s ended before it had begun" % start.run.name)

    # --- for those who watch ------------------------------------------------------------------------------------

    def watch(self, on_change: Callable[[List[str]], None]) -> None:
        self._watchers.append(on_change)

    def unwatch(self, on_change: Callable[[List[str]], None]) -> None:
        self._watchers.remove(on_change)

    def holds(self, name: str) -> bool:
        """Whether its supervisor reports to us, so that there is no need to look."""
        return name in self._held

    def report(self, name: str) -> Optional[Report]:
        return self._reports.get(name)

    def forget(self, name: str) -> None:
        """It is to be removed: what its supervisor may still say comes too late, and the files are looked at."""
        self._reports.pop(name, None)
        supervisor = self._held.pop(name, None)
        if supervisor is not None:
            supervisor.forget(name)
            self.tell([name])

    # --- for supervisors ----------------------------------------------------------------------------------------

    def hold(self, name: str, supervisor: _Supervisor) -> None:
        self._held[name] = supervisor

    def let_go(self, name: str, supervisor: _Supervisor) -> None:
        if self._held.get(name) is supervisor:
            del self._held[name]

    def note(self, reports: Dict[str, Report]) -> None:
        self._reports.update(reports)
        while len(self._reports) > _MOST_REPORTS:
            self._reports.pop(next(iter(self._reports)))
        self.tell(list(reports))

    def tell(self, names: List[str]) -> None:
        for on_change in list(self._watchers):
            on_change(names)

    def lose(self, supervisor: _Supervisor, names: List[str]) -> None:
        """The files have the truth about its runs."""
        if supervisor in self._shared:
            self._shared.remove(supervisor)
        for name in names:
            self.let_go(name, supervisor)
            report = self._reports.get(name)
            if report is not None and report.word != "exited":
                del self._reports[name]
        self.tell(names)


_all: Dict[str, Supervisors] = {}  # by the agent's path


def _may_share(spec: Dict[str, Any]) -> bool:
    """At the end of a lease all is killed that a supervisor has."""
    return spec.get("shared") is True and spec.get("lease_s") is None


def _without_tail(status: Dict[str, Any]) -> Dict[str, Any]:
    """An answer to a start needs no log lines."""
    record = status["exit"]
    if record is None or record.get("failure") is None:
        return status
    failure = {key: value for key, value in record["failure"].items() if key != "tail"}
    return {**status, "exit": {**record, "failure": failure}}


def _refuse(start: Start, error: Union[OSError, Refused]) -> None:
    if isinstance(error, Refused):
        start.on_refusal(error.kind, str(error))
    else:
        start.on_refusal(*disk.refusal(error, start.run.agent.root))


def _most_at_once() -> int:
    """A supervisor has two files open for each run, and some of its own."""
    import resource  # its first user is the first shared supervisor

    return max(1, min(MOST_AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 3 * _PART))


class _Pending(NamedTuple):
    start: Start
    folder: str  # from the pool
    until: float


class _Supervisor:
    """One of them, as seen from here. ``run``: the one that it is for; None for a shared one."""

    def __init__(
        self, program: Program, agent: AgentDir, supervisors: Supervisors, run: Optional[RunDir] = None
    ) -> None:
        self._program = program
        self._agent = agent
        self._supervisors = supervisors
        self._is_shared = run is None
        self._name = run.name if run is not None else "shared"
        self._ways = daemonize.ways_here(self._name)
        self._born = time.monotonic()
        self._taken = 0
        self._is_ready = False
        self._is_retired = False
        self._pending: Dict[int, _Pending] = {}
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
        until = time.monotonic() + _ANSWER_S
        for start in starts:
            self._taken += 1
            folder = self._supervisors.pool.take() if self._is_shared else ""
            self._pending[self._taken] = _Pending(start, folder, until)
            self._live[start.run.name] = None
            self._supervisors.hold(start.run.name, self)
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
        what = daemonize.supervisor(self._agent, self._name, self._is_shared)
        try:
            daemonize.launch(what, self._ways.pop(0), theirs.detach())
        except OSError:
            self._link.close()
            raise
        self._link.setblocking(False)
        self._program.watch(self._link.fileno(), self._hear)

    def _line(self, number: int) -> bytes:
        start, folder, _ = self._pending[number]
        run = start.run
        wanted = [number, run.job, run.attempt, start.spec, start.as_of, start.is_of_this_boot, folder, start.ticket]
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
        reports: Dict[str, Report] = {}
        for line in lines:
            self._take_in(line, reports)
        self._supervisors.note(reports)

    def _take_in(self, line: bytes, reports: Dict[str, Report]) -> None:
        head, _, text = line.partition(b" ")
        kind = head[:1]
        if kind in (b"X", b"U"):
            self._note(head[1:].decode(), kind, text, reports)
        elif kind == b"Q":  # its exit record could not be written
            self._supervisors.forget(head[1:].decode())
        elif kind == b"r":
            self._is_ready = True
        elif kind == b"E":  # it cannot be started
            refused, self._pending = list(self._pending.values()), {}
            for one in refused:
                self._answer(kind, text, one, reports)
        else:
            pending = self._pending.pop(int(head[1:]), None)
            if pending is not None:
                self._answer(kind, text, pending, reports)

    def _note(self, name: str, kind: bytes, text: bytes, reports: Dict[str, Report]) -> None:
        if name not in self._live:
            return
        if kind == b"X":
            self._let_go(name)
            reports[name] = Report("exited", text[1:], text[:1] == b"+")
        else:  # it runs on, with other ranks
            changes, _, text = text.partition(b" ")
            reports[name] = Report("running", text, changes=int(changes))

    def _answer(self, kind: bytes, text: bytes, pending: _Pending, reports: Dict[str, Report]) -> None:
        start = pending.start
        name = start.run.name
        if kind == b"S":
            if name in self._live:
                reports[name] = Report("running", text)
            start.on_answer(text)
            return
        self._let_go(name)
        self._supervisors.tell([name])  # nobody looked at it as long as we held it
        self._supervisors.pool.give_back(pending.folder)
        if kind == b"L":
            self._supervisors.start_alone(start)
        elif kind == b"K":
            self._supervisors.answer_from_files(start, pending.until)
        else:
            complaint = foreign.parsed(text)
            start.on_refusal(complaint["kind"], complaint["message"])

    def forget(self, name: str) -> None:
        self._live.pop(name, None)

    def _let_go(self, name: str) -> None:
        self.forget(name)
        self._supervisors.let_go(name, self)

    def _give_up(self) -> None:
        """It hangs; perhaps it goes on one day. Nobody else is to wait for it."""
        now = time.monotonic()
        for number, (start, _, until) in list(self._pending.items()):
            if until <= now:
                self._is_retired = True
                del self._pending[number]
                start.on_refusal("busy", "the supervisor of %s does not answer" % start.run.name)

    def _lose(self) -> None:
        self._program.unwatch(self._link.fileno())
        self._link.close()
        if not self._is_ready and self._ways:
            with contextlib.suppress(OSError):
                self._launch()
                self._flush()
                return
        pending, self._pending = list(self._pending.values()), {}
        self._supervisors.lose(self, list(self._live))
        for start, folder, until in pending:
            self._supervisors.pool.give_back(folder)
            if self._is_shared:
                self._supervisors.start_alone(start)
            else:
                self._supervisors.answer_from_files(start, until)
