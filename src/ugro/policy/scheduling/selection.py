"""The best node for the next command: the one with the lowest cost, and why. It reserves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ugro.core.node import Facts, NodeReport, Status


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    status: Status
    cores: int | None = None
    facts: Facts | None = None
    drained: str | None = None  # the reason given, if it takes no new jobs
    speed: float = 1.0  # relative to the other nodes, where it was measured
    owner: str | None = None  # that somebody uses it, and it takes no new jobs

    @classmethod
    def of(cls, report: NodeReport) -> Candidate:
        cores = report.machine.cores if report.machine else None
        owner = report.owner.words if report.owner else None
        return cls(report.name, report.status, cores, report.facts, report.drained, owner=owner)


@dataclass(frozen=True, slots=True)
class Exclusion:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    cost: float
    reason: str
    excluded: tuple[Exclusion, ...] = ()


def best_node(candidates: Sequence[Candidate], *, cpu_weight: float, gpu_weight: float) -> Choice | None:
    """The cheapest node that can take work. Of those that cost about the same, the fastest; then the first by name.

    If there is none, ``exclusions`` says why.
    """
    offers = [
        _offer(candidate, facts, cpu_weight, gpu_weight)
        for candidate in candidates
        if isinstance(facts := _facts_or_objection(candidate), Facts)
    ]
    if not offers:
        return None
    offers.sort(key=lambda offer: (round(offer.cost, 1), -offer.speed, offer.cost, offer.name))
    return Choice(offers[0].name, offers[0].cost, _reason(offers), exclusions(candidates))


def exclusions(candidates: Sequence[Candidate]) -> tuple[Exclusion, ...]:
    return tuple(
        Exclusion(candidate.name, objection)
        for candidate in candidates
        if isinstance(objection := _facts_or_objection(candidate), str)
    )


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    cost: float
    load_per_core: float
    gpu_memory_ratio: float | None
    speed: float


def _facts_or_objection(candidate: Candidate) -> Facts | str:
    if not candidate.status.is_up or candidate.status is Status.UNHEALTHY:
        return f"is {candidate.status}"
    if candidate.drained is not None:
        return f"is drained: {candidate.drained}" if candidate.drained else "is drained"
    if candidate.owner is not None:
        return candidate.owner
    return "has not been probed yet" if candidate.facts is None else candidate.facts


def _offer(candidate: Candidate, facts: Facts, cpu_weight: float, gpu_weight: float) -> _Offer:
    # A node that did not report its cores counts as the smallest possible.
    load_per_core = facts.load[0] / (candidate.cores or 1)
    ratios = [gpu.memory_ratio for gpu in facts.gpus if not gpu.error]
    known = [ratio for ratio in ratios if ratio is not None]
    gpu_memory_ratio = fmean(known) if known else None
    cost = cpu_weight * load_per_core + gpu_weight * (gpu_memory_ratio or 0.0)
    return _Offer(candidate.name, cost, load_per_core, gpu_memory_ratio, candidate.speed)


def _reason(offers: Sequence[_Offer]) -> str:
    best = offers[0]
    gpu = "" if best.gpu_memory_ratio is None else f", {best.gpu_memory_ratio * 100:.0f} % of GPU memory used"
    why = f"{best.name} costs {best.cost:.2f} (load {best.load_per_core:.2f} per core{gpu})"
    if len(offers) == 1:
        return f"{why}; no other node can take work"
    next_best = offers[1]
    if best.speed > next_best.speed and round(next_best.cost, 1) == round(best.cost, 1):
        return f"{why}, about the same as {next_best.name}, and was measured to be faster"
    if next_best.cost == best.cost:
        return f"{why}, the same as {next_best.name}; the first by name is taken"
    return f"{why}; the next is {next_best.name} at {next_best.cost:.2f}"
