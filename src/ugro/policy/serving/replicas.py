"""Replicas as they are seen: what a job, its node and the door say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ugro.core.door import Server, ServerState
from ugro.core.job import Job, JobState
from ugro.core.service import EXHAUSTED, ProbeReport, ProbeState, Replica, ReplicaPhase, Service

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
