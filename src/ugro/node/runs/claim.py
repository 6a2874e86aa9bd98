"""How a supervisor takes a run: under the run's fence its GPUs, its folder, its lock and its claim, in this order.

A supervisor of many runs waits for nothing: where it would have to, ``TakesTime`` says so, nothing has changed, and
the run gets a supervisor of its own. That one waits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.node.clock import boot_id, clock_s, moment
from ugro.node.files import contents
from ugro.node.files import workdir as sdk
from ugro.node.files.packs import LOCK_S
from ugro.node.hardware.gpu_claims import SharedClaims
from ugro.node.hardware.gpu_locks import GpuLocks
from ugro.node.program import Refused
from ugro.node.runs import dir_pool, stop
from ugro.node.runs.fence import HeldFence
from ugro.node.runs.reaper import Lease
from ugro.node.runs.rundir import EXIT_BYTES, LEAST_EXIT_BYTES, RunDir, new_envelope, point, take_lock
from ugro.node.runs.runspec import RunSpec

_FENCE_S = 10.0
_LOCK_S = 2.0
_OLDER_GRACE_S = 30.0
_SPARE = 2
_MOST_FILES = 100  # of code; more would keep the other runs of a shared supervisor waiting
_encode = json.JSONEncoder().encode


class TakesTime(Exception):
    """It has to be waited for."""


class Known(Exception):
    """A supervisor has claimed it before; its files say how it is."""


class Wanted(NamedTuple):
    """A start, as a node program sends it."""

    number: int
    job: str
    attempt: int
    spec: Dict[str, Any]
    as_of: Optional[Dict[str, Any]]  # the instant that its lease counts from
    is_of_this_boot: bool  # the start is void after a restart of the machine
    folder: str  # from the pool; empty: none is free
    ticket: Optional[str] = None  # kept with the run, for the agent


class Claimed(NamedTuple):
    run: RunDir
    spec: RunSpec
    spec_hash: str
    as_of_s: float
    lock: int
    gpus: GpuLocks

    def let_go(self, *, is_over: bool) -> None:
        """``is_over``: no process of it is left."""
        self.gpus.release(is_over=is_over)
        os.close(self.lock)

    @property
    def lease(self) -> Optional[Lease]:
        if self.spec.lease_s is None:
            return None
        return Lease(self.run.name, self.spec.lease_s, self.spec.grace_s, self.as_of_s)

    def is_lease_over(self) -> bool:
        return self.spec.lease_s is not None and self.silent_s() > self.spec.lease_s

    def silent_s(self) -> float:
        """How long the agent has not been heard."""
        return clock_s() - max(self.as_of_s, self.run.agent.heard_s())


class Claims:
    """What the claims of one supervisor have in common: its folder, its name, and whether it may wait."""

    def __init__(self, folder: str, name: str, shared: SharedClaims, *, is_patient: bool) -> None:
        """``shared``: the reaper has it, too."""
        self._shared = shared
        self._folder = folder
        self._name = name
        self._is_patient = is_patient
        self._count = 0
        self._spare: List[str] = []
        self._boot = os.path.join(folder, "boot")
        with open(self._boot, "w", encoding="ascii") as file:
            file.write(boot_id())

    def claim(self, run: RunDir, wanted: Wanted) -> Claimed:
        """When this returns, the run is ours to start, and its lock is held."""
        spec, as_of = RunSpec(wanted.spec), wanted.as_of or moment()
        more = {"run": run.name, "supervisor": self._name}
        if wanted.ticket is not None:
            more["ticket"] = wanted.ticket
        envelope = new_envelope(wanted.spec, as_of, wanted.is_of_this_boot, **more)
        as_of_s = float(as_of["clock_s"]) if as_of["boot_id"] == boot_id() else 0.0
        point("supervisor.admitted")
        try:
            if self._is_patient:
                self._end_older(run, envelope["hash"])
            path = wanted.folder if os.path.isdir(wanted.folder) else self._free_folder()
            with self._unless_moved(path, wanted):
                self._fill(path, run, spec)
                locks = GpuLocks(self._shared)
                point("supervisor.made")
                return self._take(Claimed(run, spec, envelope["hash"], as_of_s, -1, locks), envelope, path)
        except Refused as refusal:
            if refusal.kind != "busy" or self._is_patient:
                raise
            raise TakesTime from refusal

    def prepare(self) -> None:
        """When there is nothing else to do: a start that comes alone has less to wait for."""
        if len(self._spare) < _SPARE:
            with contextlib.suppress(OSError):  # the start that needs one says so
                self._spare.append(self._new_folder())

    def clear(self) -> None:
        """At the supervisor's end; what cannot be deleted goes with what other dead processes left."""
        for path in self._spare:
            dir_pool.delete(path)
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                os.unlink(os.path.join(self._folder, name))
            os.rmdir(self._folder)

    # --- before the fence is held for the claim -----------------------------------------------------------------

    def _end_older(self, run: RunDir, spec_hash: str) -> None:
        """From here on no older attempt can begin on this node; those that have begun are ended."""
        with run.fence.held(_FENCE_S) as fence:
            seen = fence.seen
            _enter(run, fence, spec_hash)
        for older in _older(run) if seen else ():
            stop.stop(older, "attempt %d takes its place" % run.attempt, min(_OLDER_GRACE_S, _grace_of(older)))
        point("supervisor.alone")

    def _free_folder(self) -> str:
        return self._spare.pop() if self._spare else self._new_folder()

    def _new_folder(self) -> str:
        self._count += 1
        path = "%s/run-%d" % (self._folder, self._count)
        dir_pool.make(path)
        return path

    @contextlib.contextmanager
    def _unless_moved(self, path: str, wanted: Wanted) -> Any:
        """A folder that did not become the run's is kept for another; one of the pool is the node program's."""
        try:
            yield
        finally:
            if os.path.isdir(path):
                contents.empty(path + "/work")
                sdk.drop(path)
                if path != wanted.folder:
                    self._spare.append(path)

    def _fill(self, path: str, run: RunDir, spec: RunSpec) -> None:
        self._expect_folders(run, spec)
        if spec.sdk is not None:
            sdk.put(run, spec.sdk, path, LOCK_S if self._is_patient else 0)
        if spec.code is None:
            return
        if self._is_patient:
            contents.check_out(run, spec.code, path + "/work")
        elif not contents.fill(run, spec.code, path + "/work", _MOST_FILES):
            raise TakesTime

    def _expect_folders(self, run: RunDir, spec: RunSpec) -> None:
        if not spec.folders:
            return
        from ugro.node.files import folders as place  # most runs need none of it

        if not self._is_patient:
            raise TakesTime
        place.expect(run.agent.root, spec.folders)

    # --- under the fence ----------------------------------------------------------------------------------------

    def _take(self, wanted: Claimed, envelope: Dict[str, Any], path: str) -> Claimed:
        run = wanted.run
        with run.fence.held(_FENCE_S if self._is_patient else 0) as fence:
            seen = fence.seen
            _enter(run, fence, wanted.spec_hash)
            if seen and not self._is_patient and _older(run):
                raise TakesTime
            if wanted.is_lease_over():
                text = "this start was sent %.1f s ago, longer than its lease"
                raise Refused("lease-expired", text % wanted.silent_s())
            point("supervisor.fenced")
            self._take_gpus(wanted)
            try:
                return self._locked_and_claimed(wanted, envelope, path, fence)
            except (OSError, Refused, Known, TakesTime):
                wanted.gpus.release(is_over=True)  # nothing of it was started
                raise

    def _take_gpus(self, wanted: Claimed) -> None:
        """Before the claim, which is for good: a run whose GPU somebody else has may come again."""
        if not wanted.spec.gpus:
            return
        if not self._is_patient:
            raise TakesTime
        run = wanted.run
        record = {"agent": run.agent.name, "node": run.agent.node, "job": run.job, "attempt": run.attempt}
        record.update(user=wanted.spec.user, run=run.path, mark=os.fsdecode(run.mark))
        share = wanted.spec.share
        if share is not None:  # groups of other agents are others
            share = share._replace(group="%s %s" % (run.agent.name, share.group))
        wanted.gpus.take(wanted.spec.gpus, run.agent.root, record, share)

    def _locked_and_claimed(self, wanted: Claimed, envelope: Dict[str, Any], path: str, fence: HeldFence) -> Claimed:
        run = wanted.run
        claimed = wanted._replace(lock=self._locked_in(wanted, envelope, path))
        try:
            self._make_claim(run)
            point("supervisor.claimed")
            # So that the claim can be given up later without another sync.
            fence.close(run.attempt, is_durable=False)
            point("supervisor.closed")
            if not envelope["is_of_this_boot"]:
                run.make_claim_last()
        except (OSError, Known):
            os.close(claimed.lock)
            raise
        return claimed

    def _locked_in(self, wanted: Claimed, envelope: Dict[str, Any], path: str) -> int:
        """The lock of the run's folder, which is there from now on, with all that a supervisor needs."""
        dir_pool.write(path + "/spec.json", _encode(envelope).encode())
        dir_pool.reserve_exit(path, LEAST_EXIT_BYTES if wanted.spec.is_shared else EXIT_BYTES)
        if all(rank.number != 0 for rank in wanted.spec.ranks):
            dir_pool.remove_log(path)
        lock = self._lock(path + "/lock")
        point("supervisor.locked")
        try:
            os.rename(path, wanted.run.path)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return self._locked_there(wanted, envelope)
        point("supervisor.moved")
        return lock

    def _locked_there(self, wanted: Claimed, envelope: Dict[str, Any]) -> int:
        """In the folder that a supervisor left which was killed before its claim."""
        if not self._is_patient:
            raise TakesTime
        run = wanted.run
        lock = self._lock(run.file("lock"))
        try:
            run.make(envelope)
            run.reserve_exit()
            self._expect_folders(run, wanted.spec)
            if wanted.spec.code is not None:
                contents.check_out(run, wanted.spec.code)
            if wanted.spec.sdk is not None:
                sdk.put(run, wanted.spec.sdk, run.path)
        except (OSError, Refused):
            os.close(lock)
            raise
        return lock

    def _lock(self, path: str) -> int:
        lock = take_lock(path, _LOCK_S if self._is_patient else 0)
        if lock is None:
            raise Refused("busy", "%s is held by another process" % path)
        return lock

    def _make_claim(self, run: RunDir) -> None:
        """A link instead of a new file; as with one, there is one who gets it."""
        try:
            os.link(self._boot, run.file("claim"))
        except FileExistsError as error:
            raise Known from error
        except OSError:  # no links here, or too many of them
            if not run.claim():
                raise Known from None


def _enter(run: RunDir, fence: HeldFence, spec_hash: str) -> None:
    if run.attempt == fence.seen and run.is_claimed():
        run.expect_spec(spec_hash)
        raise Known
    fence.enter(run.attempt)


def _older(run: RunDir) -> List[RunDir]:
    return [
        older
        for older in run.agent.runs()
        if older.job == run.job and older.attempt < run.attempt and older.exit() is None
    ]


def _grace_of(run: RunDir) -> float:
    envelope = run.envelope()
    return RunSpec(envelope["spec"]).grace_s if envelope else 0.0
