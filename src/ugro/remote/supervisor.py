"""The supervisor: starts the ranks of a run on this node, watches them, ends all of them, writes down how it was.

A process of its own that outlives the link, the node program and the agent. It takes the run's lock for its whole life,
and the claim before it starts anything. Others only read its files, and put orders into its control pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.remote import ending, flood, tree
from ugro.remote.ending import Ending, Processes
from ugro.remote.flood import CappedLog
from ugro.remote.oom import OomCounter
from ugro.remote.program import Refused
from ugro.remote.ranks import NotStarted, Rank
from ugro.remote.rundir import CRASH_VARIABLE, AgentDir, RunDir, boot_id, clock_s, point
from ugro.remote.runspec import RunSpec

TICK_S = 0.2
LEFTOVER_GRACE_S = 5.0
TAIL_LINES = 50
TAIL_BYTES = 16 * 1024
_LOCK_S = 2.0
_LOCK_TRY_S = 0.05
# How long a last word that cannot be written (a full disk, and no space kept) is tried again.
_LAST_WORD_S = 120.0


def main(argv: List[str]) -> None:
    root, agent, job, attempt, ready = argv
    os.set_inheritable(int(ready), False)  # it came to us by an exec; it must not go to the ranks by another
    Supervisor(AgentDir(root, agent).run(job, int(attempt)), int(ready)).run()


class Verdict(NamedTuple):
    """Why a run ends; the first one holds."""

    outcome: str
    reason: Optional[str]
    grace_s: Optional[float]  # None: as the run's spec says
    signal: Optional[int] = None  # that its ranks get first; None: as the run's spec says


class Supervisor:
    def __init__(self, run: RunDir, ready: int) -> None:
        self._run = run
        self._ready: Optional[int] = ready
        self._ranks: List[Rank] = []
        self._failure: Optional[Dict[str, Any]] = None
        self._verdict: Optional[Verdict] = None
        self._ending: Optional[Ending] = None
        self._started_at = time.time()
        self._started_s = clock_s()

    def run(self) -> None:
        point("supervisor.begun")
        lock = self._lock()
        if lock is None:
            return  # another supervisor is at it; whoever started us looks at the files
        point("supervisor.locked")
        self._listen()
        spec = None
        try:
            spec = self._claim()
        except Refused as refusal:
            self._tell(refusal.kind, str(refusal))
        except OSError as error:
            self._tell("os", "the run cannot be set up: %s" % error)
        if spec is not None:
            self._supervise(spec)
        else:
            os.close(lock)  # before the pipe to whoever started us: it must not see us alive

    def _lock(self) -> Optional[int]:
        """Those who only look hold it for a moment, a supervisor for good: and that one has the claim before long."""
        deadline = time.monotonic() + _LOCK_S
        lock = None
        while lock is None and not self._run.is_claimed() and time.monotonic() < deadline:
            lock = self._run.take_lock(timeout_s=_LOCK_TRY_S)
        return lock

    def _claim(self) -> Optional[RunSpec]:
        """What to do, if it is ours to do. Nothing was started before, by anybody, if so."""
        envelope = self._run.envelope()
        if envelope is None or self._run.is_claimed():
            return None
        spec = RunSpec(envelope["spec"])
        as_of = envelope["as_of"]
        self._spec_hash = envelope.get("hash")
        self._as_of_s = float(as_of["clock_s"]) if as_of["boot_id"] == boot_id() else 0.0
        if spec.lease_s is not None and self._silent_s() > spec.lease_s:
            raise Refused("lease-expired", "this start was sent %.1f s ago, longer than its lease" % self._silent_s())
        self._run.reserve_exit()
        point("supervisor.reserved")
        with self._run.fence.held():
            point("supervisor.fenced")
            if not self._run.fence.allows(self._run.attempt):
                raise Refused("fenced", "a newer attempt came before attempt %d had started" % self._run.attempt)
            if not self._run.claim():
                return None
            point("supervisor.claimed")
            # So that the claim can be let go of later without another word to the disk.
            self._run.fence.close(self._run.attempt, is_lasting=False)
        point("supervisor.closed")
        self._run.make_claim_last()
        return spec

    def _supervise(self, spec: RunSpec) -> None:
        self._spec = spec
        self._oom = OomCounter()
        try:
            self._start_ranks()
            self._run.write_state(self._state())
        except NotStarted as problem:
            self._note_not_started(problem.kind, problem.rank, problem.code)
            self._decide("start-failed", str(problem), 0.0)
        except OSError as error:
            self._note_not_started("node", None, None)
            self._decide("start-failed", str(error), 0.0)
        point("supervisor.stated")
        self._say_ready()
        while not self._step():
            self._wait()
        point("supervisor.ended")
        self._write_exit()

    # --- starting -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._has_all_below = tree.become_subreaper()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # Handled and not ignored: what is ignored here would be ignored by the ranks, too.
        for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, lambda number, stack: None)
        signal.signal(signal.SIGTERM, lambda number, stack: self._decide("interrupted", "SIGTERM came", None))
        control = self._run.file("control")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(control, 0o600)
        # For writing, too: it then never comes to an end while nobody else has it open.
        self._control = os.open(control, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._orders = b""

    def _start_ranks(self) -> None:
        for rank_spec in self._spec.ranks:
            try:
                log = CappedLog(self._run.log(rank_spec.number), self._spec.log_cap_bytes)
            except OSError as error:
                raise NotStarted(rank_spec.number, error.errno or 0, "its log") from error
            self._ranks.append(Rank(rank_spec, log))
        cwd = self._spec.cwd or os.fsencode(self._run.file("work"))
        for rank in self._ranks:
            rank.start(self._environment(rank.spec.env), cwd)
            if rank is self._ranks[0]:
                point("supervisor.first")
        point("supervisor.all")

    def _environment(self, of_rank: Dict[bytes, bytes]) -> Dict[bytes, bytes]:
        login = {key: value for key, value in os.environb.items() if key != CRASH_VARIABLE.encode()}
        ours = {key.encode(): os.fsencode(value) for key, value in self._run.variables().items()}
        return {**login, **self._spec.env, **of_rank, **ours}

    def _state(self) -> Dict[str, Any]:
        return {
            "pid": os.getpid(),
            "start_ticks": ending.start_time(os.getpid()),
            "boot_id": boot_id(),
            "hash": self._spec_hash,
            "cgroup": ending.own_cgroup(),
            "started_at": self._started_at,
            "clock_s": round(self._started_s, 3),
            "ranks": [{"rank": rank.number, "pid": rank.pid, "start_ticks": rank.start_ticks} for rank in self._ranks],
        }

    def _tell(self, kind: str, text: str) -> None:
        """To whoever started us, who may be gone."""
        with contextlib.suppress(OSError):
            os.write(self._ready or -1, json.dumps({"kind": kind, "message": text}).encode())

    def _say_ready(self) -> None:
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None

    # --- watching -----------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """True when all is over."""
        self._oom.sample()
        self._collect()
        # Before an order to stop is read: a rank that had failed by then is the reason for the end, not the order.
        if self._verdict is None:
            self._judge()
        self._obey()
        self._trim_logs()
        if self._verdict is None:
            return False
        if self._ending is None:
            point("supervisor.ending")
            # Exact, and no look at /proc: every process of the run is below us, so below one of our children.
            if self._has_all_below and not ending.has_children():
                return True
            grace_s = self._spec.grace_s if self._verdict.grace_s is None else self._verdict.grace_s
            first_signal = self._verdict.signal or self._spec.stop_signal
            self._ending = Ending(self._alive, self._leaders, grace_s, first_signal)
        return self._ending.step()

    def _wait(self) -> None:
        pause_s = min(self._ending.pause_s, TICK_S) if self._ending else TICK_S
        ready, _, _ = select.select([self._wake, self._control], [], [], pause_s)
        if self._wake in ready:
            os.read(self._wake, 4096)

    def _collect(self) -> None:
        ended = tree.reap()
        for rank in self._ranks:
            if rank.pid in ended and rank.is_running:
                rank.end(ended[rank.pid])
                # Nobody but the kernel has a reason to, as long as we have not begun to end the run.
                rank.is_oom = rank.signal == signal.SIGKILL and self._ending is None and self._oom.recent() > 0
                if rank.has_failed and self._failure is None and self._ending is None:
                    self._note_failure(rank)

    def _note_failure(self, rank: Rank) -> None:
        tail = flood.last_lines(self._run.log(rank.number), TAIL_LINES, TAIL_BYTES)
        after_s = round(clock_s() - self._started_s, 3)
        self._failure = {**rank.record(), "after_s": after_s, "oom_kills": self._oom.recent(), "tail": tail}

    def _note_not_started(self, kind: str, rank: Optional[int], code: Optional[int]) -> None:
        """As if it had run and ended like that; ``kind`` says whose fault it is."""
        how = {"rank": rank, "code": code, "signal": None, "is_oom": False, "ended_at": time.time(), "kind": kind}
        self._failure = {**how, "after_s": round(clock_s() - self._started_s, 3), "oom_kills": 0, "tail": []}

    def _judge(self) -> None:
        if self._failure is not None:
            how = "signal" if self._failure["signal"] else "code"
            reason = "rank %d ended with %s %d" % (self._failure["rank"], how, self._failure[how])
            self._decide("oom" if self._failure["is_oom"] else "failed", reason, None)
        elif not any(rank.is_running for rank in self._ranks):
            self._decide("succeeded", None, min(self._spec.grace_s, LEFTOVER_GRACE_S))
        elif self._spec.lease_s is not None and self._silent_s() > self._spec.lease_s:
            self._decide("lease-expired", "the agent was silent for %.1f s" % self._silent_s(), None)

    def _silent_s(self) -> float:
        return clock_s() - max(self._as_of_s, self._run.agent.heard_s())

    def _decide(
        self, outcome: str, reason: Optional[str], grace_s: Optional[float], first_signal: Optional[int] = None
    ) -> None:
        if self._verdict is None:
            self._verdict = Verdict(outcome, reason, grace_s, first_signal)

    def _obey(self) -> None:
        """An order is a line; a second one can only hasten the end."""
        with contextlib.suppress(BlockingIOError):
            self._orders += os.read(self._control, 65536)
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not from us
                order = json.loads(line)
                self._decide("stopped", order["reason"], order["grace_s"], order.get("signal"))
                if self._ending is not None:
                    self._ending.hasten(order["grace_s"])

    def _trim_logs(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # tried again at the next tick
                rank.log.trim(rank.is_running)

    # --- ending -------------------------------------------------------------------------------------------------

    def _leaders(self) -> Processes:
        return {rank.pid: rank.start_ticks for rank in self._ranks if rank.is_running}

    def _alive(self) -> Processes:
        return {**ending.below([os.getpid()]), **ending.marked(self._run.mark)}

    def _write_exit(self) -> None:
        deadline = time.monotonic() + _LAST_WORD_S
        while True:
            try:
                self._run.write_exit(self._record())
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)
            else:
                break
        with contextlib.suppress(OSError):  # it can be read, which is all we can do on such a disk
            self._run.make_exit_last()

    def _record(self) -> Dict[str, Any]:
        assert self._verdict is not None
        found = self._ending.found if self._ending else set()
        leftovers = found - {rank.pid for rank in self._ranks}
        return {
            "outcome": self._verdict.outcome,
            "reason": self._verdict.reason,
            "failure": self._failure,
            "ranks": [rank.record() for rank in self._ranks],
            "leftovers": len(leftovers),
            "unkillable": self._ending.left if self._ending else [],
            "boot_id": boot_id(),
            "started_at": self._started_at,
            "ended_at": time.time(),
            "duration_s": round(clock_s() - self._started_s, 3),
        }
