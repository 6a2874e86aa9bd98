"""One run on this node from its first rank to its exit record: what became of its ranks, why it ends, what is recorded.

It waits for nothing and listens to nobody: its supervisor says which rank ended and what was ordered, and steps it
until it is over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import time
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ugro.node import durable
from ugro.node import machine as disk
from ugro.node.clock import boot_id, clock_s
from ugro.node.files import workdir as sdk
from ugro.node.machine import machine_id
from ugro.node.process import cgroup
from ugro.node.process.cgroup import AFFINITY, CPU, MEMORY, Group, Home, enforcement
from ugro.node.process.terminate import Ending, Family, Processes
from ugro.node.program import Refused
from ugro.node.runs import logs as capped_log
from ugro.node.runs import notices
from ugro.node.runs import ranks as elastic
from ugro.node.runs.ranks import Members, NotStarted, OomCounter, Rank
from ugro.node.runs.rundir import CRASH_VARIABLE, RunDir, point
from ugro.node.runs.runspec import RunSpec, with_path

# --- limits -----------------------------------------------------------------------------------------------------------
# What holds a run to the cores and the memory that it asked for: control groups where this node lets us make some.
#
# Otherwise its ranks are bound to as many cores, which no other run of ours has if there are enough, and its memory is
# bookkeeping only. A limit of a process's address space is no replacement: CUDA reserves far more than it uses, and
# every process of a run would have the whole of it.


_REMOVE_S = 0.2  # a process that has ended leaves its group soon after
_entered: List[Dict[str, Home]] = []  # where a process of ours could enter a group: not tried for every run


def chosen(allowed: List[int], free: List[int], count: int) -> List[int]:
    """Of the cores that we may use, those that no other run has; others only where there are not enough."""
    taken = [core for core in allowed if core not in free]
    return sorted((free + taken)[:count])


class RunLimits:
    """Of one run. ``begin`` before its first rank starts, ``end`` after its last process."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._run = run
        self._cpus = spec.cpus
        self._memory_bytes = spec.memory_bytes
        self._group: Optional[Group] = None
        self._cores: List[int] = []
        self._locks: List[int] = []
        self.held: Dict[str, str] = {}  # how, by what was asked for

    def begin(self) -> Optional[Callable[[], None]]:
        """What a rank's process does before it becomes the program; None: nothing."""
        if self._cpus is None and self._memory_bytes is None:
            return None
        if not self.held:
            homes = cgroup.detect()
            self._begin_group({name: homes[name] for name in self._controllers() if name in homes})
            held = enforcement(self._group.homes if self._group else {}, (), can_bind=True)
            if self._cpus is not None and held["cpus"] == AFFINITY:
                self._take_cores(self._cpus)
            self.held = {key: held[key] for key, asked in self._asked().items() if asked}
        return self._enter

    @property
    def groups(self) -> List[str]:
        """The folders of its control groups: whatever its ranks start stays in them."""
        return self._group.folders if self._group is not None else []

    def reached_bytes(self) -> Optional[int]:
        """The memory limit, if the kernel has killed a process of the run because of it."""
        return self._memory_bytes if self._group is not None and self._group.oom_kills() else None

    def end(self) -> None:
        group, self._group = self._group, None
        locks, self._locks = self._locks, []
        if group is not None:
            group.remove(_REMOVE_S)  # else it is tidied up later
        for lock in locks:
            os.close(lock)

    def _asked(self) -> Dict[str, bool]:
        return {"cpus": self._cpus is not None, "memory": self._memory_bytes is not None}

    def _controllers(self) -> List[str]:
        asked = self._asked()
        return [name for name, key in ((CPU, "cpus"), (MEMORY, "memory")) if asked[key]]

    def _begin_group(self, homes: Dict[str, Home]) -> None:
        """A node that refuses in the end what it seemed to offer has no limits; the run starts."""
        if not homes:
            return
        cgroup.tidy(homes)
        name = "%s-%08x" % (self._run.name, zlib.crc32(os.fsencode(self._run.path)))
        with contextlib.suppress(OSError):
            group = cgroup.create(name, homes)
            try:
                group.limit(
                    self._cpus if CPU in homes else None,
                    self._memory_bytes if MEMORY in homes else None,
                )
                if homes not in _entered:
                    _try(group)
                    _entered.append(homes)
            except OSError:
                group.remove()
                raise
            self._group = group

    def _take_cores(self, count: int) -> None:
        """Their locks are held as long as the run lives: others choose others."""
        allowed = sorted(os.sched_getaffinity(0))
        folder = os.path.join(self._run.agent.root, ".ugro", "cores@" + machine_id())
        free: List[int] = []
        with contextlib.suppress(OSError):
            durable.make_folder(folder)
            for core in allowed[:]:
                if len(free) < min(count, len(allowed)):
                    free += [core] if self._lock("%s/%d" % (folder, core)) else []
        self._cores = chosen(allowed, free, count)

    def _lock(self, path: str) -> bool:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if durable.lock_within(fd, fcntl.LOCK_EX, 0):
            self._locks.append(fd)
            return True
        os.close(fd)
        return False

    def _enter(self) -> None:
        if self._group is not None:
            self._group.enter()
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def _try(group: Group) -> None:
    """Whether a process can enter it is not seen from its files alone."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            group.enter()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError("the control group cannot be entered")


# --- run state --------------------------------------------------------------------------------------------------------


LEFTOVER_GRACE_S = 5.0
TAIL_LINES = 50
TAIL_BYTES = 16 * 1024


class Verdict(NamedTuple):
    """Why a run ends; the first one holds."""

    outcome: str
    reason: Optional[str]
    grace_s: Optional[float]  # None: as the run's spec says
    signal: Optional[int] = None  # that its ranks get first; None: as the run's spec says


class RunLife:
    def __init__(self, run: RunDir, spec: RunSpec, family: Family, oom: OomCounter) -> None:
        self.run = run
        self.spec = spec
        self.ranks: List[Rank] = []
        self.verdict: Optional[Verdict] = None
        self.ending: Optional[Ending] = None
        self._family = family
        self._oom = oom
        self.limits = RunLimits(run, spec)
        self._environment: Optional[int] = None  # a lock on the Python environment of its ranks
        self._failure: Optional[Dict[str, Any]] = None
        self.store: Optional[Rank] = None  # no rank: ranks meet in its store
        self.members: Optional[Members] = None
        self.notices: List[str] = []
        self._meeting = notices.MeetingPlace.of(spec)
        self._logged: List[str] = []
        self.changes = 0  # of what is reported while it runs
        self._started_at = time.time()
        self._started_s = clock_s()

    # --- starting -----------------------------------------------------------------------------------------------

    def start(self, start_ranks: Callable[[], None]) -> None:
        """``start_ranks`` fills ``ranks``. What keeps one from starting is how the run ends."""
        try:
            self._hold_environment()
            start_ranks()
        except NotStarted as problem:
            self._note_not_started(problem.kind, problem.rank, problem.code, problem.is_disk_full)
            self.decide("start-failed", str(problem), 0.0)
        except OSError as error:
            self._note_not_started("node", None, None, disk.is_full(error))
            self.decide("start-failed", str(error), 0.0)

    def _hold_environment(self) -> None:
        """It is not removed as long as this run lives."""
        if self.spec.environment is None:
            return
        from ugro.features.environments.node import place as usage  # most runs need none of it

        try:
            self._environment = usage.hold(self.run.agent.root, self.spec.environment)
        except Refused as refusal:
            number = errno.EBUSY if refusal.kind == "busy" else errno.ENOENT
            raise NotStarted(self.spec.ranks[0].number, number, str(refusal), is_of_node=True) from refusal

    def let_go(self) -> None:
        self.limits.end()
        if self._environment is not None:
            os.close(self._environment)
            self._environment = None

    def environment(self, of_rank: Dict[bytes, bytes]) -> Dict[bytes, bytes]:
        ours = {key.encode(): os.fsencode(value) for key, value in self.run.variables().items()}
        if self.spec.folders:
            from ugro.node.files import folders as place  # most runs need none of it

            ours.update(place.variables(self.run.agent.root, self.spec.folders))
        env = with_path({**_login(), **self.spec.env, **of_rank, **ours}, self.spec.path)
        return env if self.spec.sdk is None else sdk.findable(env, self.run)

    def state(self, spec_hash: Optional[str], started_ticks: Optional[int], cgroup: Optional[str]) -> Dict[str, Any]:
        """``started_ticks`` is when our own process began, and ``cgroup`` its own control group."""
        return {
            "run": self.run.name,
            "pid": os.getpid(),
            "start_ticks": started_ticks,
            "boot_id": boot_id(),
            "hash": spec_hash,
            "cgroup": cgroup,
            "started_at": self._started_at,
            "clock_s": round(self._started_s, 3),
            "ranks": [{"rank": rank.number, "pid": rank.pid, "start_ticks": rank.start_ticks} for rank in self.ranks],
            **({"limits": self.limits.held, "groups": self.limits.groups} if self.limits.held else {}),
            **(self._elastic_state() if self.spec.is_elastic else {}),
            **({"notices": self.notices, "changes": self.changes} if self.notices else {}),
        }

    def _elastic_state(self) -> Dict[str, Any]:
        members = {} if self.members is None else {"members": self.members._asdict()}
        return {"changes": self.changes, "lost": elastic.lost(self.ranks), **members}

    def look_at_members(self) -> bool:
        """Whether its ranks say that others train now."""
        found = elastic.read_members(self.run) if self.spec.is_elastic else None
        if found is None or found == self.members:
            return False
        self.members = found
        return True

    def look_at_notices(self) -> bool:
        """Whether there is something new to be said of it."""
        found = notices.read(self.run)
        if self._meeting is not None:
            self._meeting.look(self.ranks)
            is_over = self.verdict is not None and self.verdict.outcome == "succeeded"
            apart = self._meeting.notice(is_over=is_over) if is_over or self.verdict is None else None
            if apart is not None:
                found.append(apart)
                self._log(apart)
        is_new, self.notices = found != self.notices, found
        return is_new

    def _log(self, text: str) -> None:
        """In the first rank's log, once."""
        if text not in self._logged:
            self._logged.append(text)
            with contextlib.suppress(OSError):  # a full disk
                os.write(self.ranks[0].log.fileno(), b"ugro: %s\n" % text.encode())

    # --- watching -----------------------------------------------------------------------------------------------

    def note_end(self, rank: Rank, wait_status: int) -> None:
        if self.verdict is None and os.WIFSIGNALED(wait_status) and self._has_ended_by_itself(rank):
            rank.note("ended by signal %d while it exited: its script had ended" % os.WTERMSIG(wait_status))
            wait_status = 0
        rank.end(wait_status)
        if rank.has_failed and self.ending is None:
            rank.reached_bytes = self.limits.reached_bytes()
        # Nobody but the kernel has a reason to, as long as we have not begun to end the run.
        is_short = self._oom.recent() > 0 or rank.reached_bytes is not None
        rank.is_oom = rank.signal == signal.SIGKILL and self.ending is None and is_short
        rank.was_lost = self.spec.is_elastic and rank.has_failed and self.verdict is None
        if rank.has_failed and self._failure is None and self.ending is None:
            tail = capped_log.last_lines(self.run.log(rank.number), TAIL_LINES, TAIL_BYTES)
            # Then the log does not say why it ended: the line could not be written.
            is_full = disk.has_nothing_left(self.run.path)
            more = {"after_s": self._age_s(), "oom_kills": self._oom.recent(), "is_disk_full": is_full}
            self._failure = {**rank.record(), **more, "tail": tail}

    def _has_ended_by_itself(self, rank: Rank) -> bool:
        """Whether this very process has noted that its script ran to its end, and has written its results."""
        started = self.run.note("ended.%d" % rank.pid, 32)
        return started is not None and started == b"%d" % rank.start_ticks

    def decide(
        self, outcome: str, reason: Optional[str], grace_s: Optional[float], first_signal: Optional[int] = None
    ) -> None:
        if self.verdict is None:
            self.verdict = Verdict(outcome, reason, grace_s, first_signal)

    def obey(self, order: Dict[str, Any]) -> None:
        """A second one can only hasten the end."""
        self.decide("stopped", order["reason"], order["grace_s"], order.get("signal"))
        if self.ending is not None:
            self.ending.hasten(order["grace_s"])

    def judge(self) -> None:
        if self.verdict is not None or self._goes_on():
            return
        if self._failure is not None and not self._has_all_done():
            how = "signal" if self._failure["signal"] else "code"
            reason = "rank %d ended with %s %d" % (self._failure["rank"], how, self._failure[how])
            self.decide("oom" if self._failure["is_oom"] else "failed", reason, None)
        elif not any(rank.is_running for rank in self.ranks):
            self.decide("succeeded", None, min(self.spec.grace_s, LEFTOVER_GRACE_S))

    def _goes_on(self) -> bool:
        """One of a training that goes on without ranks that are lost ends with the others, when it is asked to."""
        return self.spec.is_elastic and bool(self.ranks) and not self._has_all_done()

    def _has_all_done(self) -> bool:
        return all(rank.wait_status == 0 for rank in self.ranks)

    def trim_logs(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # tried again at the next tick
                rank.log.trim(rank.is_running)

    # --- ending -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """True when all is over, and only the exit record is missing."""
        self.judge()
        if self.verdict is None:
            return False
        if self.ending is None:
            point("supervisor.ending")
            if self._family.is_empty():
                return True
            grace_s = self.spec.grace_s if self.verdict.grace_s is None else self.verdict.grace_s
            first_signal = self.verdict.signal or self.spec.stop_signal
            self.ending = Ending(self._family, self._leaders, grace_s, first_signal)
        return self.ending.step()

    def record(self) -> Dict[str, Any]:
        assert self.verdict is not None
        found = self.ending.found if self.ending else set()
        leftovers = found - {rank.pid for rank in self.ranks} - {self.store.pid if self.store is not None else 0}
        self.look_at_members()
        self.look_at_notices()
        members = {} if self.members is None else {"members": self.members._asdict()}
        return {
            **members,
            **({"notices": self.notices} if self.notices else {}),
            "run": self.run.name,
            "outcome": self.verdict.outcome,
            "reason": self.verdict.reason,
            "failure": self._failure,
            "ranks": [rank.record() for rank in self.ranks],
            "leftovers": len(leftovers),
            "unkillable": self.ending.left if self.ending else [],
            "boot_id": boot_id(),
            "started_at": self._started_at,
            "ended_at": time.time(),
            "duration_s": self._age_s(),
        }

    def _leaders(self) -> Processes:
        return {rank.pid: rank.start_ticks for rank in self.ranks if rank.is_running}

    def _note_not_started(self, kind: str, rank: Optional[int], code: Optional[int], is_disk_full: bool) -> None:
        """As if it had run and ended like that; ``kind`` says whose fault it is."""
        how = {"rank": rank, "code": code, "signal": None, "is_oom": False, "ended_at": time.time(), "kind": kind}
        self._failure = {**how, "after_s": self._age_s(), "oom_kills": 0, "is_disk_full": is_disk_full, "tail": []}

    def _age_s(self) -> float:
        return round(clock_s() - self._started_s, 3)


@functools.lru_cache(maxsize=None)
def _login() -> Dict[bytes, bytes]:
    return {key: value for key, value in os.environb.items() if key != CRASH_VARIABLE.encode()}
