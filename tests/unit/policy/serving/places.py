"""Services, replicas and jobs as unit tests need them."""

from __future__ import annotations

from ugro.features.services.model import (
    DoorPlace,
    ProbeReport,
    ProbeState,
    Replica,
    Revision,
    Rollout,
    Server,
    ServerState,
    Service,
    ServiceSpec,
)
from ugro.features.services.rules.steps import Seen, server_name
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share


def service(
    wanted: int = 2, *, replicas: tuple[Replica, ...] = (), rollout: Rollout | None = None, surge: int = 1
) -> Service:
    base = ServiceSpec("chat")
    spec = ServiceSpec("chat", update=type(base.update)(surge=surge))
    revisions = tuple(Revision(number, JobSpec("chat", ("serve",)), "a test") for number in (1, 2))
    number = max((one.number for one in replicas), default=0) + 1
    return Service(
        id=1,
        key="k",
        user="ann",
        spec=spec,
        door=DoorPlace("n1", "python3", "127.0.0.1"),
        wanted=wanted,
        revision=1,
        revisions=revisions,
        secret="s",
        replicas=replicas,
        next_number=number,
        rollout=rollout,
    )


def job(number: int, state: JobState = JobState.RUNNING, *, node: str = "n1", exit_code: int | None = None) -> Job:
    placement = None if state is JobState.QUEUED else Placement((Share(node),))
    spec = JobSpec(f"chat-{number}", ("serve",))
    return Job(100 + number, spec, "ann", state, "a reason", "", placement=placement, exit_code=exit_code)


def ready(number: int, *, revision: int = 1, dropped: str | None = None, sessions: int = 0) -> Seen:
    """It runs, is ready, and is in the door."""
    server = Server(server_name(number), "127.0.0.1", 9000 + number, 100, ServerState.READY, sessions, 0)
    probe = ProbeReport(ProbeState.READY, "", "127.0.0.1", 9000 + number)
    return Seen(Replica(number, revision, dropped), job(number), probe, server)


def starting(number: int, *, revision: int = 1, restarts: int = 0) -> Seen:
    probe = ProbeReport(ProbeState.STARTING, "loading", "127.0.0.1", 9000 + number, restarts)
    return Seen(Replica(number, revision), job(number), probe)


def waiting(number: int, *, revision: int = 1, waits_s: float = 0.0) -> Seen:
    return Seen(Replica(number, revision), job(number, JobState.QUEUED), waits_s=waits_s)
