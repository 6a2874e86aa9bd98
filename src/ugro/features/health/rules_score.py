"""The health score: how many of 100 points a node has left, and the reasons for those it lost.

It judges one probe of a node that answered. Whether a node is reachable is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ugro.kernel.links.model import Facts, Gpu, LinkQuality, Reason, Status
from ugro.kernel.links.rules import LITTLE_SPACE_BYTES, NO_SPACE_BYTES
from ugro.kernel.support.quantities import format_size

PART_POINTS = {"gpu": 40.0, "system": 30.0, "network": 20.0, "processes": 10.0}
HEALTHY_SCORE = 80
DEGRADED_SCORE = 60
NEARLY_FULL, FULL = 0.90, 0.95  # of memory and disks: above the first points are lost, above the second more


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reasons' points add up to ``100 - score``, worst first; a reason has 0 if its part had no points left."""

    score: int
    status: Status
    reasons: tuple[Reason, ...] = ()


def assess(
    facts: Facts, link: LinkQuality, *, ranks_expected: int = 0, strange_runs: str | None = None
) -> Verdict:
    """``ranks_expected``: how many rank processes jobs should have on this node now.

    ``strange_runs``: what it reports that is not believed.
    """
    seen = _Seen(facts, link, ranks_expected, strange_runs)
    claims = [claim for rule in _RULES if (claim := rule.claim(seen))]
    # The worst takes its points first; the sort is stable, so equal ones stay in the order of the rules.
    claims.sort(key=_points, reverse=True)
    left = dict(PART_POINTS)
    reasons = [_take(claim, left) for claim in claims]
    reasons.sort(key=_points, reverse=True)
    score = round(sum(left.values()))
    return Verdict(score, status_of(score), tuple(reasons))


def status_of(score: int) -> Status:
    if score >= HEALTHY_SCORE:
        return Status.HEALTHY
    return Status.DEGRADED if score >= DEGRADED_SCORE else Status.UNHEALTHY


@dataclass(frozen=True, slots=True)
class _Seen:
    facts: Facts
    link: LinkQuality
    ranks_expected: int
    strange_runs: str | None


_Reading = tuple[float, str]


@dataclass(frozen=True, slots=True)
class _Rule:
    part: str
    # (above this value, this share of the part's points is lost), worst first.
    steps: tuple[tuple[float, float], ...]
    readings: Callable[[_Seen], Iterator[_Reading]]

    def claim(self, seen: _Seen) -> Reason | None:
        """Only the worst reading counts, however many GPUs or disks are above the limit."""
        lowest = self.steps[-1][0]
        over = [reading for reading in self.readings(seen) if reading[0] > lowest]
        if not over:
            return None
        value, text = max(over, key=_value)
        more = f", and {len(over) - 1} more" if len(over) > 1 else ""
        share = next(share for limit, share in self.steps if value > limit)
        return Reason(self.part, text + more, share * PART_POINTS[self.part])


def _points(reason: Reason) -> float:
    return reason.points


def _value(reading: _Reading) -> float:
    return reading[0]


def _take(claim: Reason, left: dict[str, float]) -> Reason:
    points = min(claim.points, left[claim.part])
    left[claim.part] -= points
    return Reason(claim.part, claim.text, points)


def _unreadable_gpus(seen: _Seen) -> Iterator[_Reading]:
    return ((1, f"{_label(gpu)} cannot be read: {gpu.error}") for gpu in seen.facts.gpus if gpu.error)


def _gpu_detection(seen: _Seen) -> Iterator[_Reading]:
    if seen.facts.gpu_error:
        yield 1, f"GPUs cannot be read: {seen.facts.gpu_error}"


def _gpu_temperatures(seen: _Seen) -> Iterator[_Reading]:
    for gpu in seen.facts.gpus:
        if gpu.temperature_c is not None:
            yield gpu.temperature_c, f"{_label(gpu)} is at {_figure(gpu.temperature_c)} °C"


def _gpu_memory(seen: _Seen) -> Iterator[_Reading]:
    for gpu in seen.facts.gpus:
        ratio = gpu.memory_ratio
        if ratio is not None:
            yield ratio, f"{_label(gpu)} has {_percent(ratio)} of its memory used"


def _memory(seen: _Seen) -> Iterator[_Reading]:
    ratio = seen.facts.memory_used_ratio
    yield ratio, f"memory is {_percent(ratio)} used"


def _disks(seen: _Seen) -> Iterator[_Reading]:
    for disk in seen.facts.disks:
        yield disk.used_ratio, f"disk {disk.mount} is {_percent(disk.used_ratio)} full"


def _room_left(seen: _Seen) -> Iterator[_Reading]:
    """However large the disk is: jobs need room for their code and logs."""
    disk = seen.facts.root_disk
    if disk is not None:
        yield -disk.free_bytes, f"disk {disk.mount} has {format_size(disk.free_bytes)} left"


def _latency(seen: _Seen) -> Iterator[_Reading]:
    if seen.link.rtt_s is not None:
        yield seen.link.rtt_s, f"network latency is {_figure(seen.link.rtt_s * 1000)} ms"


def _loss(seen: _Seen) -> Iterator[_Reading]:
    yield seen.link.loss_ratio, f"{_percent(seen.link.loss_ratio)} of keepalives went unanswered"


def _missing_ranks(seen: _Seen) -> Iterator[_Reading]:
    if seen.ranks_expected and not seen.facts.rank_processes:
        yield 1, f"no rank process is running, {seen.ranks_expected} expected"


def _strange_runs(seen: _Seen) -> Iterator[_Reading]:
    if seen.strange_runs:
        yield 1, seen.strange_runs


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} {gpu.name}"


def _percent(ratio: float) -> str:
    return f"{_figure(ratio * 100)} %"


def _figure(value: float) -> str:
    # One decimal where it matters: 90.4 % is over a limit of 90, and "90 %" would look like a mistake.
    return f"{value:.1f}".removesuffix(".0")


_ALWAYS = 0
_RULES = (
    _Rule("gpu", ((_ALWAYS, 1.0),), _unreadable_gpus),
    _Rule("gpu", ((_ALWAYS, 0.5),), _gpu_detection),
    _Rule("gpu", ((85, 1.0), (80, 0.4)), _gpu_temperatures),
    _Rule("gpu", ((FULL, 0.4), (NEARLY_FULL, 0.2)), _gpu_memory),
    _Rule("system", ((FULL, 1.0), (NEARLY_FULL, 0.4)), _memory),
    _Rule("system", ((FULL, 1.0), (NEARLY_FULL, 0.4)), _disks),
    _Rule("system", ((-NO_SPACE_BYTES, 1.0), (-LITTLE_SPACE_BYTES, 0.4)), _room_left),
    _Rule("system", ((_ALWAYS, 0.4),), _strange_runs),
    _Rule("network", ((0.100, 1.0), (0.050, 0.5)), _latency),
    _Rule("network", ((0.20, 1.0), (0.05, 0.5)), _loss),
    _Rule("processes", ((_ALWAYS, 1.0),), _missing_ranks),
)
