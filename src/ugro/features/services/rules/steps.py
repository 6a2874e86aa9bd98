"""What is to be done next for a service: jobs to submit and to cancel, servers to add to the door and to take out.

Pure: the row and what is seen in, steps out. A replica that goes is first drained at the door, then its job ends, then
its server is removed, and last its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ugro.features.services.model import (
    EXHAUSTED,
    ProbeReport,
    ProbeState,
    Replica,
    ReplicaPhase,
    Server,
    ServerState,
    Service,
    ServiceState,
)
from ugro.kernel.jobs.model import Ending, Job, JobState

# --- replicas ---------------------------------------------------------------------------------------------------------
# Replicas as they are seen: what a job, its node and the door say together.


_OURS = "ugro: "  # how lines of the log begin that are not the program's own
AWAY_S = 15.0  # a node that is unreachable for longer gets a substitute

_BY_JOB = {
    JobState.QUEUED: ReplicaPhase.WAITING,
    JobState.RECOVERING: ReplicaPhase.RESTARTING,
    JobState.STARTING: ReplicaPhase.STARTING,
    JobState.UNREACHABLE: ReplicaPhase.UNREACHABLE,
    JobState.STOPPING: ReplicaPhase.STOPPING,
}
_BY_PROBE = {
    ProbeState.STARTING: ReplicaPhase.STARTING,
    ProbeState.READY: ReplicaPhase.READY,
    ProbeState.UNREADY: ReplicaPhase.UNREADY,
    ProbeState.RESTARTING: ReplicaPhase.RESTARTING,
    ProbeState.STOPPING: ReplicaPhase.STOPPING,
    ProbeState.FAILED: ReplicaPhase.STOPPING,
}


@dataclass(frozen=True, slots=True)
class Seen:
    replica: Replica
    job: Job | None = None
    probe: ProbeReport | None = None
    server: Server | None = None  # in the door
    is_on_drained: bool = False  # its node is drained
    away_s: float = 0.0  # since when its node is unreachable
    waits_s: float = 0.0  # since when it waits for devices
    unready_s: float = 0.0  # since when it runs and is not ready
    leaving_s: float = 0.0  # since when it is to go
    last_lines: tuple[str, ...] = ()  # of the log of one that failed

    @property
    def number(self) -> int:
        return self.replica.number

    @property
    def phase(self) -> ReplicaPhase:
        return phase_of(self)

    @property
    def is_ready(self) -> bool:
        return self.phase is ReplicaPhase.READY

    @property
    def is_serving(self) -> bool:
        """It is ready, and the door gives it requests."""
        return self.is_ready and self.server is not None and self.server.state is ServerState.READY

    @property
    def is_over(self) -> bool:
        """It has ended, and not because its program ended too often."""
        return self.phase is ReplicaPhase.ENDED

    @property
    def is_away(self) -> bool:
        return self.phase is ReplicaPhase.UNREACHABLE and self.away_s > AWAY_S


@dataclass(frozen=True, slots=True)
class DoorSeen:
    job: Job | None = None
    servers: Mapping[str, Server] | None = None  # None: it cannot be asked now
    last_lines: tuple[str, ...] = ()  # of the log of one that failed
    is_lost: bool = False  # its node was lost: nothing of it runs there any more
    is_shut_out: bool = False  # it runs in another account than the one in which its folder is

    @property
    def is_running(self) -> bool:
        return self.job is not None and self.job.state in (JobState.RUNNING, JobState.UNREACHABLE)

    @property
    def has_failed(self) -> bool:
        """For a reason that lasts, such as a port that is taken."""
        return self.job is not None and self.job.state is JobState.FAILED and self.job.exit_code == EXHAUSTED


@dataclass(frozen=True, slots=True)
class View:
    """All that decisions about a service look at."""

    service: Service
    seen: tuple[Seen, ...] = ()
    door: DoorSeen = field(default_factory=DoorSeen)
    may_replace: bool = True  # False: replicas have just ended, and the next one waits a little
    freed_s: float = math.inf  # since when a replica last gave its devices back: another one may be about to get them

    @property
    def live(self) -> list[Seen]:
        """Those that are to stay, or to be replaced first."""
        return [one for one in self.seen if one.replica.dropped is None and not one.is_over]


def server_name(number: int) -> str:
    return f"r{number}"


def phase_of(seen: Seen) -> ReplicaPhase:
    job = seen.job
    if job is None:
        return ReplicaPhase.WAITING if seen.replica.dropped is None else ReplicaPhase.ENDED
    if job.is_final:
        is_exhausted = job.state is JobState.FAILED and job.exit_code == EXHAUSTED and seen.replica.dropped is None
        return ReplicaPhase.FAILED if is_exhausted else ReplicaPhase.ENDED
    if seen.replica.dropped is not None:
        is_asked = job.ending is not None or job.state is JobState.STOPPING
        return ReplicaPhase.STOPPING if is_asked else ReplicaPhase.DRAINING
    if job.state is JobState.RUNNING:
        return ReplicaPhase.STARTING if seen.probe is None else _by_probe(seen.probe, seen.server)
    return _BY_JOB[job.state]


def _by_probe(probe: ProbeReport, server: Server | None) -> ReplicaPhase:
    is_cut_off = server is not None and server.state is ServerState.DOWN and server.port == probe.port
    return ReplicaPhase.UNREADY if is_cut_off and probe.state is ProbeState.READY else _BY_PROBE[probe.state]


def reason_of(seen: Seen) -> str:
    if seen.replica.dropped is not None:
        return seen.replica.dropped
    if seen.job is None:
        return "not submitted yet"
    if seen.job.state is JobState.RUNNING:
        if seen.probe is not None and seen.probe.state is ProbeState.READY and not seen.is_ready:
            return f"ready on its node, but the door does not reach it at {seen.probe.host}:{seen.probe.port}"
        if seen.probe is not None:
            return seen.probe.reason
        nodes = seen.job.placement.node_names if seen.job.placement else ()
        return f"waiting for the first word from {', '.join(nodes)}"
    return last_said(seen.last_lines) or seen.job.reason


def last_said(lines: Sequence[str]) -> str:
    """What its program wrote last, and why that was not started again."""
    ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    theirs = [line.strip() for line in lines if line.strip() and not line.startswith(_OURS)]
    errors = [line for line in theirs if line.lower().startswith("error")]
    return "; ".join([*ours[-1:], *(f"it wrote: {line}" for line in (errors or theirs)[-1:])])


# --- steps ------------------------------------------------------------------------------------------------------------


_PLACE_S = 1.0  # in which a replica usually gets its place


@dataclass(frozen=True, slots=True)
class Submit:
    replica: Replica
    avoid: tuple[str, ...] = ()  # nodes to use only if no others are free


@dataclass(frozen=True, slots=True)
class SubmitDoor:
    pass


@dataclass(frozen=True, slots=True)
class RenewDoor:
    """Its job has ended: the next one gets another number."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    job: int


@dataclass(frozen=True, slots=True)
class AddServer:
    number: int
    host: str
    port: int
    is_canary: bool


class Turn(StrEnum):
    """What becomes of a server in the door."""

    DRAIN = "drain"
    READY = "ready"  # it was drained and is wanted again
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class TurnServer:
    turn: Turn
    name: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of this replica is left."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing of the service runs any more."""


Step = Submit | SubmitDoor | RenewDoor | Cancel | AddServer | TurnServer | Forget | Close


def next_steps(view: View) -> list[Step]:
    if view.service.state is ServiceState.ENDED:
        return []
    is_stopping = view.service.state is ServiceState.STOPPING
    steps = [step for one in view.seen for step in (_leaving if one.replica.dropped else _staying)(view, one)]
    if view.service.spec.spreads:
        steps = _one_by_one(view, steps)
    return [*steps, *_strangers(view), *(_end_of_door(view) if is_stopping else _door(view))]


def _one_by_one(view: View, steps: list[Step]) -> list[Step]:
    """A replica is submitted when those before it have a place, or wait for one: it prefers other nodes."""
    submits = [step for step in steps if isinstance(step, Submit)]
    if not submits:
        return steps
    others: list[Step] = [step for step in steps if not isinstance(step, Submit)]
    if any(one.job is not None and one.phase is ReplicaPhase.WAITING and one.waits_s < _PLACE_S for one in view.live):
        return others
    held = [one.job.held for one in view.live if one.job is not None and one.job.held is not None]
    used = tuple(dict.fromkeys(node for placement in held for node in placement.node_names))
    return [*others, replace(submits[0], avoid=used)]


# --- replicas ------------------------------------------------------------------------------------------------------


def _staying(view: View, seen: Seen) -> Iterator[Step]:
    server, probe = seen.server, seen.probe
    if seen.job is None:
        yield Submit(seen.replica)
    elif seen.job.is_final:
        yield from _take_out(server)
    elif seen.phase is ReplicaPhase.READY and probe is not None and view.door.servers is not None:
        rollout = view.service.rollout
        is_canary = rollout is not None and rollout.is_held and seen.replica.revision == rollout.revision
        if server is None:
            yield AddServer(seen.number, probe.host, probe.port, is_canary)
        elif (server.address, server.port, server.canary) != (probe.host, probe.port, is_canary):
            yield from _take_out(server)  # it has another port now, or was promoted; then it is added again
        elif server.state is ServerState.DRAIN:
            yield TurnServer(Turn.READY, server.name)


def _leaving(view: View, seen: Seen) -> Iterator[Step]:
    job, server = seen.job, seen.server
    if job is None or job.is_final:
        if server is not None:
            yield from _take_out(server)
        elif view.door.servers is not None or not view.door.is_running or view.service.state is ServiceState.STOPPING:
            yield Forget(seen.number)  # of a door that is about to end, nobody asks what it has
        return
    if server is not None and server.state is not ServerState.DRAIN:
        yield TurnServer(Turn.DRAIN, server.name)
    if _is_drained(view, seen) and _goes_on(job):
        yield Cancel(job.id)


def _is_drained(view: View, seen: Seen) -> bool:
    """Nothing of it runs any more, or it has had its time."""
    if seen.leaving_s > view.service.spec.drain_s or seen.phase is ReplicaPhase.UNREACHABLE:
        return True
    if seen.job is not None and seen.job.state is not JobState.RUNNING:
        return True
    if view.door.servers is None:
        return not view.door.is_running
    return seen.server is None or (seen.server.state is ServerState.DRAIN and not seen.server.sessions)


def _take_out(server: Server | None) -> Iterator[Step]:
    if server is None:
        return
    if server.state is not ServerState.DRAIN:
        yield TurnServer(Turn.DRAIN, server.name)
    if not server.sessions:
        yield TurnServer(Turn.REMOVE, server.name)


def _strangers(view: View) -> Iterator[Step]:
    """Servers in the door of which no row is left."""
    known = {server_name(one.number) for one in view.seen}
    for name, server in (view.door.servers or {}).items():
        if name not in known:
            yield from _take_out(server)


def _goes_on(job: Job) -> bool:
    return not job.is_final and job.ending is not Ending.CANCELLED


# --- the door ------------------------------------------------------------------------------------------------------


def _door(view: View) -> Iterator[Step]:
    job = view.door.job
    if job is None:
        yield SubmitDoor()
    elif job.is_final:
        yield RenewDoor(job.reason)
    elif view.door.is_shut_out and _goes_on(job):
        yield Cancel(job.id)  # the next one makes a folder where it runs


def _end_of_door(view: View) -> Iterator[Step]:
    """The door goes last: requests that run are answered."""
    if view.seen:
        return
    job = view.door.job
    if job is not None and not job.is_final:
        if _goes_on(job):
            yield Cancel(job.id)
    else:
        yield Close()
