"""The supervisor: a process that looks after one run on this node and writes down how it was.

It outlives the link, the node program and the agent. It takes the run's lock for its whole life, and the claim before
it starts anything. Others only read its files, and put orders into its control pipe. For many small runs at once there
is the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import List, Optional

from ugro.remote import wakeup
from ugro.remote.clock import boot_id, clock_s
from ugro.remote.files.capped_log import CappedLog
from ugro.remote.process import process_tree, terminate
from ugro.remote.process.oom import OomCounter
from ugro.remote.process.terminate import Family, OwnFamily
from ugro.remote.program import Refused
from ugro.remote.runs.ranks import NotStarted, Rank
from ugro.remote.runs.run_state import RunLife, started_ticks
from ugro.remote.state.rundir import AgentDir, RunDir, point
from ugro.remote.state.runspec import RunSpec

TICK_S = 0.2
_LOCK_S = 2.0
_LOCK_TRY_S = 0.05
# How long a last word that cannot be written (a full disk, and no space kept) is tried again.
LAST_WORD_S = 120.0


def main(argv: List[str]) -> None:
    root, agent, node_key, job, attempt, ready = argv
    os.set_inheritable(int(ready), False)  # it came to us by an exec; it must not go to the ranks by another
    Supervisor(AgentDir(root, agent, node_key).run(job, int(attempt)), int(ready)).run()


class Supervisor:
    def __init__(self, run: RunDir, ready: int) -> None:
        self._run = run
        self._ready: Optional[int] = ready
        self._life: Optional[RunLife] = None
        self._has_term = False
        self._orders = b""

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
            self._supervise(RunLife(self._run, spec, self._family(), OomCounter()))
        else:
            os.close(lock)  # before the pipe to whoever started us: it must not see us alive

    def _lock(self) -> Optional[int]:
        """Those who only look hold it for a moment, a supervisor for good: and that one has the claim before long."""
        deadline = time.monotonic() + _LOCK_S
        lock = None
        while lock is None and not self._run.is_claimed() and time.monotonic() < deadline:
            lock = self._run.take_lock(timeout_s=_LOCK_TRY_S)
        return lock

    def _listen(self) -> None:
        self._has_all_below = process_tree.become_subreaper()
        self._wake = wakeup.listen(self._note_term)
        self._control = wakeup.open_control(self._run.file("control"))

    def _note_term(self) -> None:
        self._has_term = True

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
        if not envelope.get("is_of_this_boot"):
            self._run.make_claim_last()
        return spec

    def _family(self) -> Family:
        return OwnFamily(self._run.mark) if self._has_all_below else _UncertainFamily(self._run.mark)

    def _supervise(self, life: RunLife) -> None:
        self._life = life
        life.start(lambda: self._start_ranks(life))
        point("supervisor.stated")
        self._say_ready()
        while not self._step(life):
            self._wait(life)
        point("supervisor.ended")
        self._write_exit(life)

    def _start_ranks(self, life: RunLife) -> None:
        for rank_spec in life.spec.ranks:
            try:
                log = CappedLog(self._run.log(rank_spec.number), life.spec.log_cap_bytes)
            except OSError as error:
                raise NotStarted(rank_spec.number, error.errno or 0, "its log") from error
            life.ranks.append(Rank(rank_spec, log))
        cwd = life.spec.cwd or os.fsencode(self._run.file("work"))
        for rank in life.ranks:
            rank.start(life.environment(rank.spec.env), cwd)
            if rank is life.ranks[0]:
                point("supervisor.first")
        point("supervisor.all")
        self._run.write_state(life.state(self._spec_hash, started_ticks(), terminate.own_cgroup()))

    def _tell(self, kind: str, text: str) -> None:
        """To whoever started us, who may be gone."""
        with contextlib.suppress(OSError):
            os.write(self._ready or -1, json.dumps({"kind": kind, "message": text}).encode())

    def _say_ready(self) -> None:
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None

    # --- watching -----------------------------------------------------------------------------------------------

    def _step(self, life: RunLife) -> bool:
        """True when all is over."""
        life.sample_memory()
        self._collect(life)
        # Before an order to stop is read: a rank that had failed by then is the reason for the end, not the order.
        life.judge()
        if self._has_term:
            life.decide("interrupted", "SIGTERM came", None)
        if life.verdict is None and life.spec.lease_s is not None and self._silent_s() > life.spec.lease_s:
            life.decide("lease-expired", "the agent was silent for %.1f s" % self._silent_s(), None)
        self._obey(life)
        life.trim_logs()
        return life.step()

    def _wait(self, life: RunLife) -> None:
        pause_s = min(life.ending.pause_s, TICK_S) if life.ending else TICK_S
        ready, _, _ = select.select([self._wake, self._control], [], [], pause_s)
        if self._wake in ready:
            wakeup.drain(self._wake)

    def _collect(self, life: RunLife) -> None:
        ended = process_tree.reap()
        for rank in life.ranks:
            if rank.pid in ended and rank.is_running:
                life.note_end(rank, ended[rank.pid])

    def _silent_s(self) -> float:
        return clock_s() - max(self._as_of_s, self._run.agent.heard_s())

    def _obey(self, life: RunLife) -> None:
        with contextlib.suppress(BlockingIOError):
            self._orders += os.read(self._control, 65536)
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not from us
                life.obey(json.loads(line))

    def _write_exit(self, life: RunLife) -> None:
        deadline = time.monotonic() + LAST_WORD_S
        while True:
            try:
                self._run.write_exit(life.record())
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)
            else:
                break
        with contextlib.suppress(OSError):  # it can be read, which is all we can do on such a disk
            self._run.make_exit_last()


class _UncertainFamily(OwnFamily):
    """On a kernel that lets us adopt no orphans, nothing but looks can tell that nobody is left."""

    def is_empty(self) -> bool:
        return not self.find()
