"""A service as users see it, from its row, its jobs, what its nodes say and the figures of its door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ugro.core.door import DoorStats, Latency, ServerStats
from ugro.core.job import Job, JobState, places
from ugro.core.service import (
    DoorReport,
    Figures,
    Phase,
    ReplicaPhase,
    ReplicaReport,
    Service,
    ServiceReport,
    ServiceState,
    Traffic,
)
from ugro.policy.serving.door_move import WILDCARDS
from ugro.policy.serving.replicas import DoorSeen, Seen, View, last_said, reason_of, server_name
from ugro.policy.wording import count_of


def report_of(view: View, stats: DoorStats | None = None, notes: Sequence[str] = ()) -> ServiceReport:
    service = view.service
    spec, current = service.spec, service.current
    replicas = tuple(_replica(view, one, stats) for one in view.seen)
    ready = sum(one.state is ReplicaPhase.READY for one in replicas)
    state = phase_of(view)
    return ServiceReport(
        id=service.id,
        name=service.name,
        user=service.user,
        state=state,
        reason=_reason(view, state),
        url=url_of(service),
        wanted=service.wanted,
        ready=ready,
        revision=service.revision,
        source=current.source,
        engine=current.engine,
        door=_door(service, view.door),
        replicas=replicas,
        traffic=_traffic(stats),
        held=stats.held if stats else 0,
        update=_update(view),
        note=service.note,
        is_canary=service.rollout is not None and service.rollout.is_held,
        least=spec.scale.least if spec.scale else None,
        most=spec.scale.most if spec.scale else None,
        needs_keys=spec.needs_keys,
        keys=len(service.keys),
        has_tls=spec.tls is not None,
        is_open=spec.is_open,
        made_at=service.made_at,
        ended_at=service.ended_at,
        model=service.name,
        notes=(*notes, *([current.note] if current.note else []), *_moved(service)),
    )


def url_of(service: Service) -> str:
    spec = service.spec
    host = service.door.address if spec.bind in WILDCARDS else spec.bind
    return f"{'https' if spec.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{spec.port}"


def _moved(service: Service) -> list[str]:
    door = service.door
    return [moved_text(service)] if door.moved_from and service.state is not ServiceState.ENDED else []


def moved_text(service: Service) -> str:
    door = service.door
    where = f"it answers at {url_of(service)} there"
    return f"the door moved from {door.moved_from}, which was lost, to {door.node}: {where}"


def phase_of(view: View) -> Phase:
    service = view.service
    if service.state is ServiceState.ENDED:
        return Phase.FAILED if service.failure else Phase.STOPPED
    return Phase.STOPPING if service.state is ServiceState.STOPPING else _serving(view)


def _serving(view: View) -> Phase:
    service, ready = view.service, sum(one.is_ready for one in view.seen)
    if service.rollout is not None:
        return Phase.UPDATING if ready or not service.was_ready else Phase.DOWN
    if not service.wanted and not view.live:
        return Phase.IDLE
    if ready:
        return Phase.READY if ready >= service.wanted else Phase.DEGRADED
    failed = [one for one in view.live if one.phase is ReplicaPhase.FAILED]
    if view.door.has_failed or (failed and len(failed) == len(view.live)):
        return Phase.FAILED
    return Phase.DOWN if service.was_ready else Phase.STARTING


def _reason(view: View, state: Phase) -> str:
    if view.service.failure:
        return view.service.failure
    if state in (Phase.READY, Phase.IDLE, Phase.STOPPED):
        return _door_problem(view.door) or (_why_idle(view.service) if state is Phase.IDLE else "")
    late = [one for one in view.live if not one.is_ready]
    ready, wanted = sum(one.is_ready for one in view.seen), view.service.wanted
    has_failed = any(one.phase is ReplicaPhase.FAILED for one in late) and not view.door.has_failed
    if (problem := _door_problem(view.door)) and not view.service.was_ready and not has_failed:
        return problem
    if not late:
        return ""
    first = min(late, key=lambda one: (one.phase is not ReplicaPhase.FAILED, one.number))
    why = reason_of(first)
    text = f"replica {first.number} is {first.phase}" + (f": {why}" if why else "")
    return f"{ready} of {count_of(wanted, 'replica')} ready; {text}"


def _why_idle(service: Service) -> str:
    if service.spec.scale is not None:
        return "the next request starts a replica"
    return f"it was scaled to 0; requests wait until somebody does: ugro serve scale {service.name} 1"


def _door_problem(door: DoorSeen) -> str:
    if door.job is None:
        return "the door is not submitted yet"
    if door.job.state is JobState.RUNNING:
        return "" if door.servers is not None else "the door does not answer its control socket"
    return f"the door is {door.job.state}: {last_said(door.last_lines) or door.job.reason}"


def _update(view: View) -> str:
    rollout = view.service.rollout
    if rollout is None:
        return ""
    new = [one for one in view.live if one.replica.revision == rollout.revision]
    ready = sum(one.is_ready for one in new)
    if rollout.is_held:
        share = f"{100 * (rollout.canary or 0):g}%"
        shown = f"revision {rollout.revision} gets {share} of the requests, {ready} of {len(new)} ready"
        return f"{shown}; it waits for a decision"
    return f"to revision {rollout.revision}: {ready} of {count_of(view.service.wanted, 'replica')} ready"


def _door(service: Service, door: DoorSeen) -> DoorReport:
    job = door.job
    state = job.state if job else None
    place, number = service.door, job.id if job else None
    return DoorReport(place.node, number, state, _door_problem(door), door.servers is not None, place.is_here)


def _replica(view: View, seen: Seen, stats: DoorStats | None) -> ReplicaReport:
    job, probe = seen.job, seen.probe
    rollout = view.service.rollout
    figures = stats.servers.get(server_name(seen.number)) if stats else None
    return ReplicaReport(
        number=seen.number,
        state=seen.phase,
        reason=reason_of(seen),
        revision=seen.replica.revision,
        job=job.id if job else None,
        job_state=job.state if job else None,
        node=_node(job),
        devices=places(job.placement) if job else "",
        address=f"{probe.host}:{probe.port}" if probe and probe.port else "",
        weight=seen.server.weight if seen.server else None,
        restarts=(probe.restarts if probe else 0) + (max(0, job.attempt - 1) if job else 0),
        is_new=rollout is not None and seen.replica.revision == rollout.revision,
        traffic=_server_traffic(figures, stats),
        figures=probe.figures if probe else Figures(),
    )


def _node(job: Job | None) -> str | None:
    return job.placement.node_names[0] if job is not None and job.placement is not None else None


def _traffic(stats: DoorStats | None) -> Traffic:
    if stats is None:
        return Traffic()
    found = Traffic(stats.requests, stats.errors, max(0, stats.sessions - stats.queued), stats.queued)
    return _timed(found, stats.latency, stats)


def _server_traffic(figures: ServerStats | None, stats: DoorStats | None) -> Traffic:
    if figures is None or stats is None:
        return Traffic()
    found = Traffic(figures.requests, figures.errors, figures.sessions, figures.queued, retries=figures.retries)
    return _timed(found, figures.latency, stats)


def _timed(found: Traffic, latency: Latency, stats: DoorStats) -> Traffic:
    if not latency.count:
        return found
    rate = latency.count / (stats.window_s * max(stats.sampled_share, 1e-6))
    return replace(found, rate=rate, p50_s=latency.p50_s, p90_s=latency.p90_s, p99_s=latency.p99_s)
