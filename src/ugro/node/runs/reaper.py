"""The reaper: the second process of a supervisor, in a session of its own so that nothing stops both by accident.

It is the supervisor's parent and a child subreaper: when the supervisor is killed, it adopts all that is left, whatever
that did to get away, ends it, and notes in the runs that nothing is left. It keeps the leases of runs while the
supervisor is stopped or hangs, and makes exit records durable, off the supervisor's path. It holds no lock; but the
claims on GPUs that other accounts see it keeps until nothing is left that could use them.

One that is killed has a successor, which can only be the supervisor's child: that keeps leases, and ends what it can
find of a killed supervisor, which proves nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import time
from typing import Dict, List, NamedTuple, NoReturn, Optional, Set, Tuple

from ugro.node.clock import clock_s
from ugro.node.hardware.gpu_claims import SharedClaims
from ugro.node.process import process_tree, terminate
from ugro.node.process.execute import close_all_but, is_readable
from ugro.node.process.terminate import Ending, Family, Processes, ProcessName
from ugro.node.runs.rundir import AgentDir, RunDir

# --- lease ------------------------------------------------------------------------------------------------------------
# The lease of a run as its reaper keeps it: what to do at a moment, when the supervisor may be stopped or hang.
#
# Decisions only; times are those of ``clock_s``. A supervisor sees by itself that a lease is over and ends the run with
# grace. One that does not hears of it and is continued, and at the end of the grace all below it is killed.


LOOK_S = 0.2  # between two looks, of supervisor and reaper
PATIENCE_S = 0.5  # for a supervisor that sees it by itself
KILL_AFTER_S = 2.0  # beyond the grace: by then a supervisor that works has ended the run

WAIT, TELL, KILL = "wait", "tell", "kill"


def killed_after_s(lease_s: float, grace_s: float) -> float:
    """From the last renewal to the kill, at the latest; an agent that counts a run as dead must wait for longer."""
    return lease_s + grace_s + KILL_AFTER_S + LOOK_S


def grace_left_s(lease_s: float, grace_s: float, silent_s: float) -> float:
    """A supervisor that comes late (it was stopped, or the machine slept) gives no more time than one in time."""
    return min(grace_s, max(0.0, lease_s + grace_s - silent_s))


class Lease(NamedTuple):
    run: str
    lease_s: float
    grace_s: float
    as_of_s: float  # when the agent decided the start


class KeptLease:
    def __init__(self, lease: Lease) -> None:
        self.run = lease.run
        self._lease = lease
        self._heard_s = lease.as_of_s
        self._is_over = False

    def silent_s(self, now_s: float) -> float:
        return now_s - self._heard_s

    def look(self, now_s: float, heard_s: float) -> str:
        """``heard_s``: when the agent was last heard. What was once over stays over, whatever is heard then."""
        if not self._is_over:
            self._heard_s = max(self._heard_s, heard_s)
            self._is_over = self.silent_s(now_s) > self._lease.lease_s
        if not self._is_over:
            return WAIT
        silent_s = self.silent_s(now_s)
        if silent_s > self._lease.lease_s + self._lease.grace_s + KILL_AFTER_S:
            return KILL
        return TELL if silent_s > self._lease.lease_s + PATIENCE_S else WAIT


# --- reaper -----------------------------------------------------------------------------------------------------------


FILE = "reaper"  # in a supervisor's folder: whose process it is
# An agent that has heard of an exit has the run removed soon; then nothing has to be durable.
_SYNC_S = 0.3
_LIMIT_S = 30.0
_PAUSE_S = 0.01
_NAMES_AT_ONCE = 32
_MOST_BYTES = 65536
_LOOK_BELOW_S = 1.0


class Reaper:
    """The supervisor's side."""

    def __init__(self, agent: AgentDir, link: socket.socket, pid: int, shared: SharedClaims) -> None:
        self._agent = agent
        self.shared = shared
        self._due: List[RunDir] = []
        self._leases: Dict[str, Lease] = {}
        self._unsent: List[bytes] = []
        self._begin(link, pid)

    def _begin(self, link: socket.socket, pid: int) -> None:
        link.setblocking(False)
        self._link = link
        self.pid = pid
        self.is_gone = False

    def fileno(self) -> int:
        return self._link.fileno()

    def add(self, run: RunDir) -> None:
        """Its exit record is to be made durable; the reaper hears of it with the next ``flush``."""
        self._leases.pop(run.name, None)
        self._due.append(run)

    def flush(self) -> None:
        """Several at once: the reaper is woken less often."""
        while self._unsent and self._send(self._unsent[0]):
            del self._unsent[0]
        while self._due:
            some, self._due = self._due[:_NAMES_AT_ONCE], self._due[_NAMES_AT_ONCE:]
            if not self._send(b"".join(b"X %s\n" % run.name.encode() for run in some)):
                for run in some:
                    with contextlib.suppress(OSError):
                        run.make_exit_last()

    def keep(self, lease: Lease) -> None:
        """Before the first rank of its run starts."""
        self._leases[lease.run] = lease
        self._unsent.append(_line_of(lease, self._agent.heard_s()))
        self.flush()

    def drop(self, run: RunDir) -> None:
        """It is over, without an exit record."""
        if self._leases.pop(run.name, None) is not None:
            self._unsent.append(b"D %s\n" % run.name.encode())

    def expired(self) -> List[Tuple[str, float]]:
        """Runs whose lease the reaper found over, and for how long the agent had been silent then."""
        try:
            part = self._link.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        self.is_gone = not part
        lines = [line.split() for line in part.decode().splitlines()]
        return [(name, float(silent_s)) for name, silent_s in lines]

    def replace(self) -> None:
        """It was killed. Raises an OSError when there cannot be another, and then nothing has changed."""
        heard_s = self._agent.heard_s()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watch = _Watch(self._agent, ProcessName.own(), theirs, self.shared, is_parent=False)
        watch.look_below()
        pid = os.fork()
        if pid == 0:
            _serve(watch)
        theirs.close()
        self._link.close()
        self._begin(ours, pid)
        self._unsent = [_line_of(lease, heard_s) for lease in self._leases.values()]
        self.flush()

    def _send(self, message: bytes) -> bool:
        """False when it is slow, or gone; a message goes whole or not at all."""
        try:
            self._link.send(message)
        except OSError:
            return False
        return True


def fork(agent: AgentDir) -> Reaper:
    """Returns in the supervisor; this process becomes its reaper."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared = SharedClaims()
    process_tree.become_subreaper()
    reaper, supervisor = os.getpid(), os.fork()
    if supervisor != 0:
        name = ProcessName.own()._replace(pid=supervisor, started=terminate.start_time(supervisor) or 0)
        _serve(_Watch(agent, name, theirs, shared, is_parent=True))
    theirs.close()
    return Reaper(agent, ours, reaper, shared)


def name_in(folder: str) -> Optional[ProcessName]:
    """The reaper of the supervisor whose folder that is; None: it has not written it yet."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, FILE), encoding="ascii") as file:
        return ProcessName.parse(file.read())
    return None


def _line_of(lease: Lease, heard_s: float) -> bytes:
    """As of now: what was once over stays over, so that the reaper must not begin with an old moment."""
    return ("L %s %r %r %r\n" % lease._replace(as_of_s=max(lease.as_of_s, heard_s))).encode()


def _serve(watch: _Watch) -> NoReturn:
    try:
        with contextlib.suppress(PermissionError):  # it has one already
            os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the supervisor acts on those
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_but(sorted((watch.link.fileno(), watch.shared.fileno())))
        watch.run()
    finally:
        os._exit(0)


class _Watch:
    """The reaper itself. ``is_parent``: what the supervisor leaves becomes its own."""

    def __init__(
        self, agent: AgentDir, supervisor: ProcessName, link: socket.socket, shared: SharedClaims, *, is_parent: bool
    ) -> None:
        link.setblocking(False)  # a supervisor that is stopped reads nothing
        self.link = link
        self.shared = shared
        self._agent = agent
        self._supervisor = supervisor
        self._is_parent = is_parent
        self._due: Dict[str, float] = {}
        self._leases: Dict[str, KeptLease] = {}
        self._told: Set[str] = set()
        self._heard_s = 0.0
        self._is_listening = False
        self._below: Processes = {}
        self._look_below_at = 0.0

    def run(self) -> None:
        while self._hear():
            self._sync_due()
            self._keep_leases()
            self.look_below()
        if not self._is_parent:
            self._end_found()
        else:
            was_killed = os.waitpid(self._supervisor.pid, 0)[1] != 0
            if is_ended := _end_all():
                self.shared.empty()  # what follows may take its time
            if is_ended and was_killed:
                self._note_ended()
        for name in self._due:
            _sync(self._agent, name)
        while self.shared.has_any() and not _end_all():
            pass  # its GPUs are not free: one that cannot be killed now hangs in the kernel, perhaps in a driver

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """False when the supervisor is gone."""
        if not is_readable(self.link.fileno(), self._pause_s()):
            return True
        try:
            part = self.link.recv(_MOST_BYTES)
        except (BlockingIOError, ConnectionResetError):  # it was killed before it read all: what it sent comes first
            return True
        for line in part.decode().splitlines():
            kind, name, *numbers = line.split()
            self._leases.pop(name, None)
            if kind == "X":
                self._due[name] = time.monotonic() + _SYNC_S
            elif kind == "L":
                self._begin_lease(Lease(name, *map(float, numbers)))
        return bool(part)

    def _pause_s(self) -> Optional[float]:
        now = time.monotonic()
        pauses = [max(0.0, at - now) for at in self._due.values()]
        if self._leases:
            pauses.append(LOOK_S)
        if not self._is_parent:
            pauses.append(_LOOK_BELOW_S)
        return min(pauses) if pauses else None

    def _sync_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            _sync(self._agent, name)

    # --- leases ---------------------------------------------------------------------------------------------------

    def _begin_lease(self, lease: Lease) -> None:
        self._leases[lease.run] = KeptLease(lease)
        if not self._is_listening:
            with contextlib.suppress(RuntimeError):  # too many of this user: then we read it ourselves
                _thread.start_new_thread(self._listen, ())
                self._is_listening = True

    def _listen(self) -> NoReturn:
        """Apart from the rest: a file server that is gone along with the agent must not keep a lease alive."""
        while True:
            self._read_lease()
            time.sleep(LOOK_S / 2)

    def _read_lease(self) -> None:
        self._heard_s = self._agent.heard_s()

    def _keep_leases(self) -> None:
        if self._leases and not self._is_listening:
            self._read_lease()
        for lease in self._leases.values():
            now_s = clock_s()
            step = lease.look(now_s, self._heard_s)
            if step == WAIT:
                continue
            self._tell(lease, now_s)
            if step == KILL:
                self._kill_below()
            self._signal_supervisor(signal.SIGCONT)

    def _tell(self, lease: KeptLease, now_s: float) -> None:
        if lease.run not in self._told:
            self._told.add(lease.run)
            with contextlib.suppress(OSError):
                self.link.send(b"%s %.1f\n" % (lease.run.encode(), lease.silent_s(now_s)))

    def _kill_below(self) -> None:
        """All that its supervisor has: a run with a lease does not share one."""
        for _ in range(terminate.QUICK_ROUNDS):
            found = self._all_below()
            if not found:
                return
            for pid, started in found.items():
                terminate.send(pid, started, signal.SIGKILL)

    def _signal_supervisor(self, signum: int) -> None:
        for pid, started in self._supervisor.processes().items():
            terminate.send(pid, started, signum)

    # --- what a killed supervisor leaves --------------------------------------------------------------------------

    def look_below(self) -> None:
        if not self._is_parent and time.monotonic() >= self._look_below_at:
            self._look_below_at = time.monotonic() + _LOOK_BELOW_S
            found = self._all_below()
            if self._supervisor.is_alive():  # else they have another parent by now
                self._below = found

    def _all_below(self) -> Processes:
        found = terminate.below([self._supervisor.pid]) if self._supervisor.is_alive() else {}
        found.pop(os.getpid(), None)
        return found

    def _end_found(self) -> None:
        runs = self._runs_left()

        def find() -> Processes:
            found = terminate.alive(self._below)
            for run in runs:
                found.update(terminate.marked(run.mark))
            return found

        ending = Ending(Family(find), dict, 0.0)
        while not ending.step():
            time.sleep(ending.pause_s)

    def _note_ended(self) -> None:
        for run in self._runs_left():
            with contextlib.suppress(OSError):  # then nobody knows, and the run says so
                run.note_all_ended(str(self._supervisor))

    def _runs_left(self) -> List[RunDir]:
        """Of the supervisor that was killed."""
        name = str(self._supervisor)
        with contextlib.suppress(OSError):
            return [run for run in self._agent.runs() if run.exit() is None and run.supervisor() == name]
        return []


def _sync(agent: AgentDir, name: str) -> None:
    run = agent.named(name)
    if run is not None:
        with contextlib.suppress(OSError):  # removed; or it can be read, which is all we can do on such a disk
            run.make_exit_last()


def _end_all() -> bool:
    """Whether nothing is left of all that was adopted."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        process_tree.reap()
        if not terminate.has_children():
            return True
        for pid in {*terminate.children(), *process_tree.descendants(os.getpid())}:
            terminate.kill_child(pid)
        time.sleep(_PAUSE_S)
    return False
