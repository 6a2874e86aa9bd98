"""What is to be done next for a service: jobs to submit and to cancel, servers to add to the door and to take out.

Pure: the row and what is seen in, steps out. A replica that goes is first drained at the door, then its job ends, then
its server is removed, and last its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ugro.core.door import Server, ServerState
from ugro.core.job import Ending, Job, JobState
from ugro.core.service import Replica, ReplicaPhase, ServiceState
from ugro.policy.serving.replicas import Seen, View, server_name

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
