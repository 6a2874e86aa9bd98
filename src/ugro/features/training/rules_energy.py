"""What a job used, by device, rank and epoch, and which device is not worth its energy. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ugro.features.training.model import (
    CPU,
    DeviceEnergy,
    EnergySample,
    EpochEnergy,
    Finding,
    FindingKind,
    JobEnergy,
    JobProfile,
    RankEnergy,
)
from ugro.features.training.rules_profile import node_of
from ugro.kernel.support.quantities import format_cost, format_energy, in_words

_J_PER_WH = 3600.0
_WHOLE = 0.99  # of the time: nothing is said about the rest
_OUTSIDE_S = 30.0  # that marks may lie before or after the samples of a node: its clock may differ from the first one's
_UNREPORTED_S = 120.0  # a meter writes a line at least every minute
_SET_S = 1.0  # by which a wall clock may drift before it counts as set
_MOST_EPOCHS = 10_000  # a script may log as an epoch what is none
_WORTH_SAYING = 0.15  # by how much more each joule must do without a device before that is said


@dataclass(frozen=True, slots=True)
class NodePart:
    """An attempt's part on one node."""

    node: str
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]  # in the order in which its ranks take them
    samples: Sequence[EnergySample]


@dataclass(frozen=True, slots=True)
class Price:
    per_kwh: float | None = None
    currency: str = ""

    def of(self, joules: float) -> float | None:
        return None if self.per_kwh is None else joules / _J_PER_WH / 1000 * self.per_kwh


@dataclass(frozen=True, slots=True)
class EpochMark:
    """The last record of an epoch."""

    epoch: int
    time_s: float


def job_energy(
    attempt: int, parts: Sequence[NodePart], before_j: float, price: Price, marks: Sequence[EpochMark] = ()
) -> JobEnergy | None:
    """``before_j``: of earlier attempts. None if nothing was measured."""
    devices = tuple(device for part in parts for device in _devices(part))
    joules = before_j + math.fsum(device.joules for device in devices)
    if not devices and not before_j:
        return None
    share = measured_share(parts)
    cost = price.of(joules)
    return JobEnergy(
        joules,
        joules / _J_PER_WH,
        attempt,
        share,
        _words(joules, cost, price, devices, share),
        cost,
        None if cost is None else price.currency,
        devices,
        tuple(rank for part in parts for rank in _ranks(part)),
        tuple(_epochs(parts, marks)),
    )


def measured_share(parts: Sequence[NodePart]) -> float:
    """Of the time in which the GPUs were held; a CPU is a bonus. A device that was never read was not measured."""
    measured_s = held_s = 0.0
    for part in parts:
        last = part.samples[-1] if part.samples else None
        names = [f"gpu{number}" for number in part.gpus] or [CPU]
        longest_s = max((one.samples[-1].passed_s for one in parts if one.samples), default=0.0)
        held_s += len(names) * (last.passed_s if last else longest_s)
        measured_s += math.fsum(last.devices[name].measured_s for name in names if last and name in last.devices)
    return min(1.0, measured_s / held_s) if held_s else 0.0


def _devices(part: NodePart) -> list[DeviceEnergy]:
    if not part.samples:
        return []
    last = part.samples[-1]
    users = _users(part)
    return [
        DeviceEnergy(part.node, name, one.joules, one.measured_s, last.passed_s, one.source, users.get(name, ()))
        for name, one in sorted(last.devices.items(), key=lambda item: (item[0] == CPU, len(item[0]), item[0]))
    ]


def _users(part: NodePart) -> dict[str, tuple[int, ...]]:
    """By device: each rank has one GPU where there are as many; otherwise all ranks use all."""
    found = {f"gpu{number}": part.ranks for number in part.gpus} | {CPU: part.ranks}
    if len(part.gpus) == len(part.ranks):
        found |= {f"gpu{number}": (rank,) for number, rank in zip(part.gpus, part.ranks, strict=True)}
    return found


def _ranks(part: NodePart) -> list[RankEnergy]:
    if not part.samples:
        return []
    sums, users = part.samples[-1].devices, _users(part)
    found = []
    for rank in part.ranks:
        own = {name: one.joules / len(users[name]) for name, one in sums.items() if rank in users.get(name, ())}
        is_shared = any(len(users[name]) > 1 for name in own)
        if own:
            found.append(RankEnergy(rank, part.node, math.fsum(own.values()), is_shared))
    return found


# --- over time --------------------------------------------------------------------------------------------------


def joules_at(samples: Sequence[EnergySample], time_s: float, device: str | None = None) -> float:
    """Since the start, by the node's wall clock; between two samples, on a straight line."""
    at = bisect_left(samples, time_s, key=lambda one: one.time_s)
    if at == len(samples):
        return _of(samples[-1], device)
    after, before = samples[at], samples[at - 1] if at else None
    before_s = after.time_s - after.passed_s if before is None else before.time_s
    before_j = 0.0 if before is None else _of(before, device)
    passed = (time_s - before_s) / (after.time_s - before_s) if after.time_s > before_s else 1.0
    return before_j + max(0.0, passed) * (_of(after, device) - before_j)


def _of(sample: EnergySample, device: str | None) -> float:
    if device is None:
        return sample.joules
    return sample.devices[device].joules if device in sample.devices else 0.0


def _epochs(parts: Sequence[NodePart], marks: Sequence[EpochMark]) -> list[EpochEnergy]:
    """From the end of the epoch before; nothing where the clock of a node does not fit the marks. The last ones."""
    measured = [part.samples for part in parts if part.samples]
    if not marks or not measured or not all(_covers(samples, marks) for samples in measured):
        return []
    earlier, marks = marks[:-_MOST_EPOCHS], marks[-_MOST_EPOCHS:]
    began_s = min(samples[0].time_s - samples[0].passed_s for samples in measured)
    since_s = earlier[-1].time_s if earlier else began_s
    since_j = math.fsum(joules_at(samples, since_s) for samples in measured)
    found = []
    for mark in marks:
        until_j = math.fsum(joules_at(samples, mark.time_s) for samples in measured)
        found.append(EpochEnergy(mark.epoch, max(0.0, mark.time_s - since_s), until_j - since_j))
        since_s, since_j = mark.time_s, until_j
    return found


def _covers(samples: Sequence[EnergySample], marks: Sequence[EpochMark]) -> bool:
    began_s = samples[0].time_s - samples[0].passed_s
    is_inside = marks[0].time_s >= began_s - _OUTSIDE_S and marks[-1].time_s <= samples[-1].time_s + _OUTSIDE_S
    return is_inside and _has_steady_clock(samples)


def _has_steady_clock(samples: Sequence[EnergySample]) -> bool:
    """Whether nobody has set the wall clock meanwhile."""
    offsets = [one.time_s - one.passed_s for one in samples]
    return max(offsets) - min(offsets) <= _SET_S


def epoch_marks(times_s: Sequence[float], epochs: Sequence[float]) -> list[EpochMark]:
    """The last record of each epoch, in the order of time; of records with their times and numbers of epochs."""
    last: dict[int, float] = {}
    for time_s, epoch in zip(times_s, epochs, strict=True):
        if math.isfinite(epoch) and time_s > 0:
            last[int(epoch)] = max(time_s, last.get(int(epoch), 0.0))
    return sorted((EpochMark(epoch, time_s) for epoch, time_s in last.items()), key=lambda mark: mark.time_s)


# --- how well it was used ---------------------------------------------------------------------------------------


def watts(parts: Sequence[NodePart], since_s: float, until_s: float) -> dict[str, list[float]]:
    """By node, for each of its GPUs in order (or its CPU): the mean power; nothing of a node with one that is not read.

    ``since_s`` and ``until_s`` are by the wall clock. What is not reported yet is taken as what came just before.
    """
    length_s = until_s - since_s
    found: dict[str, list[float]] = {}
    for part in parts:
        names = [f"gpu{number}" for number in part.gpus] or [CPU]
        samples = part.samples
        is_read = bool(samples) and all(name in samples[-1].devices for name in names)
        if length_s <= 0 or not is_read or not _has_steady_clock(samples):
            continue
        end_s = min(until_s, samples[-1].time_s)
        if until_s - end_s <= _UNREPORTED_S:
            used = (joules_at(samples, end_s, name) - joules_at(samples, end_s - length_s, name) for name in names)
            found[part.node] = [one / length_s for one in used]
    return found


def with_energy(
    profile: JobProfile,
    powers: Mapping[str, Sequence[float]],
    without_s: Sequence[float | None] = (),
    whole_s: float = 0.0,
) -> JobProfile:
    """``without_s``: by rank, how long a step would take without it; ``whole_s``: by the same model, with all."""
    own = _by_rank(profile, powers)
    has_samples = profile.pipeline is None  # the ranks of a pipeline have layers, and all samples
    ranks = tuple(
        replace(
            rank,
            watts=power,
            samples_per_joule=_per_joule(rank.samples, power, profile) if has_samples else None,
        )
        for rank, power in zip(profile.ranks, own, strict=True)
    )
    found = replace(profile, ranks=ranks)
    known = [power for power in own if power is not None]
    if len(known) < len(ranks):
        return found
    samples = math.fsum(rank.samples for rank in ranks)
    whole_w = math.fsum(known)
    found = replace(found, watts=whole_w, samples_per_joule=_per_joule(samples, whole_w, profile))
    return replace(found, findings=(*found.findings, *_wasteful(found, known, without_s, whole_s)))


def _by_rank(profile: JobProfile, powers: Mapping[str, Sequence[float]]) -> list[float | None]:
    """As ranks of a node take its GPUs, or in equal parts."""
    nodes = [node_of(rank.node) for rank in profile.ranks]
    found: list[float | None] = []
    for at, node in enumerate(nodes):
        of_node = powers.get(node)
        if not of_node:
            found.append(None)
        elif len(of_node) == nodes.count(node):
            found.append(of_node[nodes[:at].count(node)])
        else:
            found.append(math.fsum(of_node) / nodes.count(node))
    return found


def _per_joule(samples: float, power_w: float | None, profile: JobProfile) -> float | None:
    return samples / (power_w * profile.step_s) if power_w and profile.step_s > 0 else None


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a rank adds."""

    rank: int
    faster: float  # the speed that it adds; negative: it makes the training slower
    more: float  # by how much more a joule would do without it
    share: float  # of the energy


def _wasteful(
    profile: JobProfile, powers: Sequence[float], without_s: Sequence[float | None], whole_s: float
) -> list[Finding]:
    """Those that cost energy and time; of the others, the one without which each joule would do the most."""
    whole_w = math.fsum(powers)
    found = [
        _Worth(
            rank,
            other_s / whole_s - 1,
            (whole_s * whole_w) / (other_s * (whole_w - power_w)) - 1,
            power_w / whole_w,
        )
        for rank, (power_w, other_s) in enumerate(zip(powers, without_s, strict=False))
        if other_s and whole_s and 0 < power_w < whole_w
    ]
    found.sort(key=lambda one: -one.more)
    negative = [one for one in found if one.faster < 0]
    positive = [one for one in found if one.faster >= 0 and one.more >= _WORTH_SAYING]
    return [_named(profile, some) for some in (negative, positive[:1]) if some]


def _named(profile: JobProfile, found: Sequence[_Worth]) -> Finding:
    """Of several, all are named; what leaving out more than one would do is not known."""
    one, ranks = found[0], tuple(profile.ranks[each.rank].rank for each in found)
    name = profile.ranks[one.rank].node
    if len(found) > 1:
        names = in_words([profile.ranks[each.rank].node for each in found])
        share = math.fsum(each.share for each in found)
        words = f"each of {names} makes it slower, with {100 * share:.0f} % of the energy together: without {name}, "
        words += f"a joule would do {1 + one.more:.2f} times as much"
        return Finding(FindingKind.ENERGY, words, f"launch it without {name}, and look again", 0.0, ranks)
    what = f"adds {100 * one.faster:.0f} % speed for" if one.faster >= 0 else "makes it slower, with"
    without = f"without it, a joule would do {1 + one.more:.2f} times as much"
    words = f"{name} {what} {100 * one.share:.0f} % of the energy: {without}"
    is_alone = [node_of(other.node) for other in profile.ranks].count(node_of(name)) == 1
    remedy = f"if energy matters more than time, launch it without {node_of(name) if is_alone else name}"
    return Finding(FindingKind.ENERGY, words, remedy, 0.0, ranks)


# --- texts ------------------------------------------------------------------------------------------------------


def _words(joules: float, cost: float | None, price: Price, devices: Sequence[DeviceEnergy], share: float) -> str:
    parts = [format_energy(joules)]
    if cost is not None:
        parts.append(format_cost(cost, price.currency))
    kinds = {"CPU" if device.device == CPU else "GPUs" for device in devices}
    about = [" and ".join(sorted(kinds, reverse=True))] if kinds else []
    if devices and share < _WHOLE:
        about.append(f"measured for {100 * share:.0f} % of the time")
    return ", ".join(parts) + (f" ({'; '.join(about)})" if about else "")
