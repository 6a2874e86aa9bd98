"""A service as users see it, from its row, its jobs, what its nodes say and the figures of its door."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ugro.features.services.model import (
    DoorPlace,
    DoorReport,
    DoorStats,
    Figures,
    Latency,
    Phase,
    ReplicaPhase,
    ReplicaReport,
    ServerStats,
    Service,
    ServiceReport,
    ServiceSpec,
    ServiceState,
    Traffic,
)
from ugro.features.services.rules.steps import DoorSeen, Seen, View, last_said, reason_of, server_name
from ugro.kernel.access.model import is_loopback
from ugro.kernel.jobs.model import Job, JobState, places
from ugro.kernel.support.quantities import count_of
from ugro.kernel.telemetry.prometheus_text import Family, Labels

# --- service figures --------------------------------------------------------------------------------------------------
# Metrics of services for Prometheus, from the same reports as ``ugro serve status`` shows.


_QUANTILES = (("0.5", "p50_s"), ("0.9", "p90_s"), ("0.99", "p99_s"))
_ANSWER = "Seconds until a request was answered, of the last minute"


def of_services(found: Sequence[ServiceReport]) -> Iterator[Family]:
    """Of those that were not stopped: one whose replicas have all failed is what people want to see."""
    live = [one for one in found if one.ended_at is None]
    yield from _replica_counts(live)
    yield from _traffic(live)
    yield from _of_replicas([(one, replica) for one in live for replica in one.replicas])


def _replica_counts(live: Sequence[ServiceReport]) -> Iterator[Family]:
    counts = Family("ugro_service_replicas", "gauge", "Replicas of a service, by state.")
    wanted = Family("ugro_service_replicas_wanted", "gauge", "Replicas that a service should have.")
    for one in live:
        states = Counter(replica.state for replica in one.replicas)
        for state in ReplicaPhase:
            counts.add(states[state], service=one.name, state=state)
        wanted.add(one.wanted, service=one.name)
    yield from (counts, wanted)


def _traffic(live: Sequence[ServiceReport]) -> Iterator[Family]:
    requests = Family("ugro_service_requests_total", "counter", "Requests to a service since its door started.")
    errors = Family("ugro_service_errors_total", "counter", "Requests that failed: 500 and above, or no answer.")
    latency = Family("ugro_service_latency_seconds", "gauge", f"{_ANSWER}, by quantile.")
    active = Family("ugro_service_active", "gauge", "Requests that are being answered.")
    queue = Family("ugro_service_queue", "gauge", "Requests that wait for a replica, also for one to start.")
    for one in live:
        labels = {"service": one.name}
        requests.add(one.traffic.requests, **labels)
        errors.add(one.traffic.errors, **labels)
        _add_quantiles(latency, one.traffic, labels)
        active.add(one.traffic.active, **labels)
        queue.add(max(one.traffic.queued, one.held), **labels)  # those that are held are among them
    yield from (requests, errors, latency, active, queue)


def _of_replicas(found: Sequence[tuple[ServiceReport, ReplicaReport]]) -> Iterator[Family]:
    requests = Family("ugro_service_replica_requests_total", "counter", "Requests that a replica got.")
    errors = Family("ugro_service_replica_errors_total", "counter", "Requests that failed at a replica.")
    retries = Family("ugro_service_replica_retries_total", "counter", "Requests that went on to another replica.")
    latency = Family("ugro_service_replica_latency_seconds", "gauge", f"{_ANSWER} by a replica, by quantile.")
    weight = Family("ugro_service_replica_weight", "gauge", "The share of requests that a replica gets, 1 to 256.")
    restarts = Family("ugro_service_replica_restarts_total", "counter", "How often a replica was started again.")
    tokens = Family("ugro_service_replica_tokens_total", "counter", "Tokens that a replica's engine has counted.")
    batches = Family("ugro_service_replica_batch_size", "gauge", "Requests that a replica computes together.")
    for service, one in found:
        labels = {"service": service.name, "replica": one.number, "node": one.node or ""}
        tokens.add(one.figures.prompt_tokens, **labels, kind="prompt")
        tokens.add(one.figures.generated_tokens, **labels, kind="generated")
        batches.add(one.figures.batch_size, **labels)
        requests.add(one.traffic.requests, **labels)
        errors.add(one.traffic.errors, **labels)
        retries.add(one.traffic.retries, **labels)
        _add_quantiles(latency, one.traffic, labels)
        weight.add(one.weight, **labels)
        restarts.add(one.restarts, **labels)
    yield from (requests, errors, retries, latency, weight, restarts, tokens, batches)


def _add_quantiles(family: Family, traffic: Traffic, labels: Labels) -> None:
    for quantile, name in _QUANTILES:
        family.add(getattr(traffic, name), **labels, quantile=quantile)


# --- door move --------------------------------------------------------------------------------------------------------
# Where the door of a service goes: first, and again when its node was lost. Pure.
#
# A door that moves answers at another machine. Its old one is dead by then, or its lease has run out on its node, so no
# two doors answer at one address.


WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node, as far as it matters for a door."""

    name: str
    is_here: bool = False  # the agent's own machine
    is_master: bool = False
    is_reachable: bool = True


def in_order(known: Iterable[Candidate], replicas: Collection[str]) -> list[str]:
    """This machine, if it is a node; else the master, else the first of the replicas' nodes."""
    ranked = sorted(known, key=lambda one: (not one.is_here, not one.is_master, one.name not in replicas))
    return [one.name for one in ranked]


def next_nodes(
    known: Iterable[Candidate], replicas: Collection[str], place: DoorPlace, *, has_failed: bool
) -> list[str]:
    """Those to try. Its own node first, if that is back; last, if the door could not be started there."""
    names = in_order((one for one in known if one.is_reachable), replicas)
    own = [name for name in names if name == place.node]
    others = [name for name in names if name != place.node]
    return [*others, *own] if has_failed else [*own, *others]


def bind_at(spec: ServiceSpec, before: DoorPlace, after: DoorPlace) -> str:
    """An address of the lost node is not one of the next."""
    is_everywhere = spec.bind in WILDCARDS or is_loopback(spec.bind)
    return spec.bind if before.node == after.node or is_everywhere else after.address


def moved(service: Service, place: DoorPlace) -> Service:
    """With a door of the next number at this place."""
    before = service.door
    origin = before.moved_from if place.node == before.node else before.node
    door = replace(place, number=before.number + 1, moved_from="" if origin == place.node else origin)
    return replace(service, door=door, spec=replace(service.spec, bind=bind_at(service.spec, before, door)))


# --- report -----------------------------------------------------------------------------------------------------------


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
        traffic=_report_traffic(stats),
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


def _report_traffic(stats: DoorStats | None) -> Traffic:
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
