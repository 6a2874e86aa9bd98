"""Metrics of services for Prometheus, from the same reports as ``ugro serve status`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ugro.core.service import ReplicaPhase, ReplicaReport, ServiceReport, Traffic
from ugro.telemetry.prometheus import Family, Labels

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
