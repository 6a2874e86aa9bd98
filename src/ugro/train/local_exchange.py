"""The values of a model that training changes, and what they were when all ranks agreed on them last.

A rank's values are the common ones, its own changes that are on their way to the others, and its changes since then.
When the changes of all ranks have arrived, the common values move by their average, and this rank's values by the
difference between that and its own part of it: what it has computed meanwhile stays.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ugro.train import group as frozen
from ugro.train.failures import statistics
from ugro.train.group import Group
from ugro.train.rules.shares import in_proportion
from ugro.train.rules.sync import RoundPlan, Verdict
from ugro.train.samples import Order, Progress
from ugro.train.telemetry import Clock

# Half precision has eleven significant bits: a change that loses more than this is too small beside the largest one.
_MOST_ERROR = 1e-3
_HEADROOM = 2.0**12  # what the largest change is scaled to, far below the largest number of half precision


@dataclass(frozen=True, slots=True)
class Change:
    tensors: list[Any]  # one for each value, in at least single precision
    largest: float
    exact: tuple[int, ...]  # those that half precision would spoil
    is_finite: bool = True


class Values:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = self._trained()
        self._buffers: list[tuple[Any, str]] = []  # their modules and names: a module may put another tensor there
        self.common: list[Any] = []

    @property
    def names(self) -> list[str]:
        """Of those that are trained; they come first among the tensors."""
        return [name for name, _ in self._parameters]

    @property
    def tensors(self) -> list[Any]:
        found = [one.data for _, one in self._parameters]
        return found + [getattr(module, name) for module, name in self._buffers]

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]

    def has(self, parameters: Sequence[Any]) -> bool:
        """Whether all of these count among what the ranks agree on."""
        known = {id(one) for _, one in self._parameters}
        return all(id(one) in known for one in parameters)

    def thawed(self) -> list[Any]:
        """What is trained now, and was not when the ranks agreed last."""
        return [one for _, one in self._trained() if not self.has([one])]

    def agree(self) -> None:
        """All ranks have the same values now. What is trained may have changed since the last time: layers thaw."""
        self._parameters = self._trained()
        self._buffers = statistics(self._model)
        now = self.tensors
        if [(one.shape, one.dtype) for one in self.common] != [(one.shape, one.dtype) for one in now]:
            self.common = [one.detach().clone() for one in now]
            return
        for mine, ours in zip(self.common, now, strict=True):
            mine.copy_(ours)

    def change(self) -> Change:
        """Since the ranks agreed; nothing of it may be on its way."""
        tensors = [_wide(now) - _wide(before) for now, before in zip(self.tensors, self.common, strict=True)]
        peaks = [float(one.abs().max()) if one.numel() else 0.0 for one in tensors]
        largest = max((peak for peak in peaks if peak < float("inf")), default=0.0)
        exact = [number for number, one in enumerate(tensors) if not _is_half_enough(one, largest)]
        return Change(tensors, largest, tuple(exact), all(peak < float("inf") for peak in peaks))

    def wide_common(self) -> list[Any]:
        """In the shapes and types of a change."""
        return [_wide(one) for one in self.common]

    def return_to_common(self) -> None:
        for now, common in zip(self.tensors, self.common, strict=True):
            now.copy_(common)

    def move(self, update: Sequence[Any], sent: Sequence[Any] | None, *, is_agreement: bool) -> None:
        """``sent``: what of this rank's own changes is in the update; None: nothing."""
        for number, (now, common, by) in enumerate(zip(self.tensors, self.common, update, strict=True)):
            common.copy_(_wide(common) + by)
            if is_agreement:  # to the last bit
                now.copy_(common)
            else:
                now.copy_(_wide(now) + (by if sent is None else by - sent[number]))


def _wide(values: Any) -> Any:
    import torch

    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def scale_of(largest: float) -> float:
    """A power of two, which changes no digit."""
    return _HEADROOM / 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


def _is_half_enough(change: Any, largest: float) -> bool:
    """A model in double precision is there for its precision."""
    import torch

    if change.dtype is not torch.float32:
        return False
    norm = float(change.norm())
    if norm == 0:
        return True
    scale = scale_of(largest)
    error = float(((change * scale).half().float() / scale - change).norm())
    return error <= _MOST_ERROR * norm  # also False for NaN


def spread(model: Any, group: Group) -> None:
    """Gives all ranks the first rank's values; frozen ones only if they differ."""
    from torch import distributed

    names = [name for name, one in model.named_parameters() if not one.requires_grad]
    is_same = len(set(group.texts(frozen.digest(model, names)))) == 1
    tensors = [one.data for one in model.parameters() if one.requires_grad or not is_same] + list(model.buffers())
    for one in tensors:
        distributed.broadcast(one, 0)


# --- exchange ---------------------------------------------------------------------------------------------------------
# Adds up the weighted changes of all ranks, in the background: half precision where that is enough.


@dataclass(frozen=True, slots=True)
class Format:
    """How the changes travel, the same on all ranks."""

    largest: float  # on any rank
    exact: frozenset[int]  # tensors that travel in full precision


@dataclass(slots=True)
class Flight:
    """An exchange that is under way."""

    like: Sequence[Any]  # tensors of the shapes and types of the sum
    format: Format
    sent: Sequence[Any] | None  # this rank's own changes, unweighted; None: it has sent nothing
    clock: Clock  # on a GPU, waiting for an exchange stops the device and not the host
    bytes: int = 0
    seconds: float = 0.0  # it took
    exposed_s: float = 0.0  # of these, the device waited
    _begun: Any = None
    _parts: list[tuple[list[int], Any, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(work.is_completed() for _, _, work in self._parts)

    def __post_init__(self) -> None:
        self._begun = self.clock.now()

    def add(self, numbers: list[int], flat: Any, work: Any) -> None:
        self._parts.append((numbers, flat, work))
        self.bytes += flat.numel() * flat.element_size()

    def wait(self) -> list[Any]:
        """The sum over all ranks."""
        import torch

        found: list[Any] = [None] * len(self.like)
        scale = scale_of(self.format.largest)
        waiting = self.clock.now()
        for _, _, work in self._parts:
            work.wait()
        arrived = self.clock.now()
        for numbers, flat, _ in self._parts:
            pieces = flat.split([self.like[number].numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                value = piece.view_as(self.like[number])
                found[number] = value.float().div_(scale) if flat.dtype is torch.float16 else value
        self.exposed_s = self.clock.between(waiting, arrived)
        self.seconds = self.clock.between(self._begun, arrived)
        return found


def begin(flight: Flight, weight: float, group: Any) -> None:
    """Without changes of this rank, or with a weight of zero, it has nothing to add."""
    import torch
    from torch import distributed

    like, change, format_ = flight.like, flight.sent, flight.format
    is_empty = change is None or weight == 0
    for numbers, kind in _kinds(like, format_.exact):
        factor = weight * (scale_of(format_.largest) if kind is torch.float16 else 1.0)
        if is_empty:
            count = sum(like[number].numel() for number in numbers)
            flat = torch.zeros(count, dtype=kind, device=like[numbers[0]].device)
        else:
            assert change is not None
            flat = torch.cat([(change[number] * factor).reshape(-1).to(kind) for number in numbers])
        flight.add(numbers, flat, distributed.all_reduce(flat, group=group, async_op=True))


def _kinds(like: Sequence[Any], exact: frozenset[int]) -> Iterable[tuple[list[int], Any]]:
    """Tensors that travel together, with their type on the way."""
    import torch

    found: dict[Any, list[int]] = {}
    for number, one in enumerate(like):
        found.setdefault(one.dtype if number in exact else torch.float16, []).append(number)
    return [(numbers, kind) for kind, numbers in found.items()]


# --- report -----------------------------------------------------------------------------------------------------------
# What a rank says at the end of its round. All ranks read the same reports and draw the same conclusions.


@dataclass(frozen=True, slots=True)
class Report:
    used: int = 0  # samples of its share that it has computed, from the first on
    mass: float = 0.0  # the same, or the sum of their weights
    steps: int = 0
    loss: float = math.nan  # the mean over these samples
    own_s: float = 0.0  # the round without waiting for others
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    exposed_s: float = 0.0  # before this round: waiting for the exchange of models
    exchange_s: float = 0.0  # the same exchange, from its beginning to its end
    largest: float = 0.0  # change of a value in this round
    exact: tuple[int, ...] = ()  # tensors whose changes lose too much in half precision
    part: float = 1.0  # of an equal share, the most that this rank is to take
    trace_steps: int = 0
    stops: bool = False
    saves: bool = False  # the script has asked for a checkpoint
    leaves: bool = False  # the script has left its loop
    is_finite: bool = True  # its change
    stops_for: str = ""  # what was not finite on this rank, if the run is to end for it

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Report:
        values = json.loads(text)
        return cls(**{**values, "exact": tuple(values["exact"])})


# --- meeting ----------------------------------------------------------------------------------------------------------
# How ranks meet at the end of a round, by the store that every process group has.
#
# Together: all ranks report, in one exchange that fails at once if a rank is dead. Ranks that are done long before the
# others ask them to end their round at the next step; what those leave is shared out again.
#
# Loosely (``max_staleness`` > 0): ranks leave reports in the store. Those that are done wait some time for the others
# and then decide who takes part. A rank that was left out sees the decision between two of its steps.


_LOOK_S = 0.2
_SHORT_S, _LONG_S = 0.001, 0.02  # between two looks of a rank that waits
_KEPT = 4  # meetings whose keys are kept: a late rank may still read them
_PREFIX = "ugro_local"
_MADE = itertools.count()  # a process may train twice, and all ranks do so in the same order

Reports = list[Report | None]  # by rank; None: it was not there


class Meeting:
    def __init__(self, group: Group, max_staleness: int) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self._group = group
        self._store: Any = PrefixStore(f"{_PREFIX}/{next(_MADE)}", _get_default_store())
        self._kept = _KEPT + max_staleness
        self._next_look = 0.0

    # --- between steps ------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether to look at the store: not in every short step."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        return True

    def is_cut(self, number: int) -> bool:
        """Whether this rank is to end its round now."""
        return self._has(f"cut/{number}") or self._has("stop")

    def cut(self, number: int) -> None:
        self._store.set(f"cut/{number}", "1")

    def stop(self) -> None:
        self._store.set("stop", "1")

    def is_decided(self, number: int) -> bool:
        return self._has(f"decision/{number}")

    # --- together -----------------------------------------------------------------------------------------------

    def together(self, number: int, report: Report, patience_s: float) -> Reports:
        self._store.add(f"done/{number}", 1)
        deadline, pause_s = time.monotonic() + patience_s, _SHORT_S
        while self._store.add(f"done/{number}", 0) < self._group.ranks:
            if time.monotonic() > deadline:
                self.cut(number)
                break
            time.sleep(pause_s)
            pause_s = min(_LONG_S, 1.5 * pause_s)
        found: Reports = [Report.of(text) for text in self._group.texts(report.text())]
        self._tidy(number)
        return found

    # --- loosely ------------------------------------------------------------------------------------------------

    def loosely(self, number: int, report: Report, patience_s: float) -> Reports:
        """The reports that the decision is about; without this rank's if that came too late."""
        self._store.set(self._report(number, self._group.rank), report.text())
        deadline, pause_s = time.monotonic() + patience_s, _SHORT_S
        while not self.is_decided(number):
            there = [rank for rank in range(self._group.ranks) if self._has(self._report(number, rank))]
            if len(there) == self._group.ranks or time.monotonic() > deadline:
                # The first decision counts.
                self._store.compare_set(f"decision/{number}", "", json.dumps(there))
                break
            time.sleep(pause_s)
            pause_s = min(_LONG_S, 1.5 * pause_s)
        return self.decided(number)

    def decided(self, number: int) -> Reports:
        found: Reports = [None] * self._group.ranks
        for rank in json.loads(self._store.get(f"decision/{number}")):
            found[rank] = Report.of(self._store.get(self._report(number, rank)).decode())
        self._tidy(number)
        return found

    def close(self) -> None:
        self._store = None

    def _tidy(self, number: int) -> None:
        old = number - self._kept
        if old < 0 or self._group.rank != 0:
            return
        reports = [self._report(old, rank) for rank in range(self._group.ranks)]
        for key in (f"cut/{old}", f"done/{old}", f"decision/{old}", *reports):
            self._store.delete_key(key)

    def _report(self, number: int, rank: int) -> str:
        return f"report/{number}/{rank}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


# --- record -----------------------------------------------------------------------------------------------------------
# The records of a round: what each rank did in it, and a profile in the words of a synchronous step.
#
# A round has many global batches. Its profile is that of one of them on average, so that speeds, shares and losses can
# be compared with those of other trainings.


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    number: int
    reports: Reports
    plan: RoundPlan
    verdict: Verdict
    rejected: int  # samples so far
    flight: Flight | None

    @property
    def filled(self) -> list[Report]:
        return [Report() if report is None else report for report in self.reports]


class Recorder:
    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put

    def record(self, numbers: RoundNumbers, progress: Progress, order: Order | None) -> None:
        self._put(_round(numbers, progress))
        if order is not None and any(report.used for report in numbers.filled):
            self._put(_profile(numbers.filled, progress, order.global_batch))


def _round(numbers: RoundNumbers, progress: Progress) -> dict[str, Any]:
    reports, flight = numbers.filled, numbers.flight
    return {
        "kind": "round",
        "round": numbers.number,
        "step": progress.step,
        "epoch": progress.epoch,
        "steps": [report.steps for report in reports],
        "samples": [report.used for report in reports],
        "own_s": [round(report.own_s, 6) for report in reports],
        "planned_s": numbers.plan.seconds,
        "reason": numbers.plan.reason,
        "exchange_bytes": 0 if flight is None else flight.bytes,
        "full_precision": 0 if flight is None else len(flight.format.exact),
        # Of the exchange before this round: its whole duration, and the part that a rank waited for.
        "exchange_s": round(max(report.exchange_s for report in reports), 6),
        "exposed_s": [round(report.exposed_s, 6) for report in reports],
        "absent": [rank for rank, report in enumerate(numbers.reports) if report is None],
        "late": list(numbers.verdict.late),
        "rejected": list(numbers.verdict.rejected),
        "rejected_samples": numbers.rejected,
    }


def _profile(reports: list[Report], progress: Progress, global_batch: int) -> dict[str, Any]:
    samples = sum(report.used for report in reports)
    batches = samples / global_batch
    slowest_s = max(report.own_s for report in reports)
    communication_s = max(report.exposed_s for report in reports)
    own = [report.own_s for report in reports]

    def each(name: str) -> list[float]:
        return [round(getattr(report, name) / batches, 6) for report in reports]

    return {
        "kind": "profile",
        "step": max(0, progress.step - 1),
        "epoch": progress.epoch,
        "samples": global_batch,
        "loss": _mean_loss(reports, samples),
        "step_s": round((slowest_s + communication_s) / batches, 6),
        "imbalance": round(slowest_s * len(own) / max(1e-12, sum(own)), 6),
        "shares": list(in_proportion(global_batch, [float(report.used) for report in reports])),
        "own_s": each("own_s"),
        "data_s": each("data_s"),
        "forward_s": each("forward_s"),
        "backward_s": each("backward_s"),
        "waiting_s": [round((slowest_s - one) / batches, 6) for one in own],
        "communication_s": each("exposed_s"),
        "optimizer_s": each("optimizer_s"),
    }


def _mean_loss(reports: list[Report], samples: int) -> float:
    known = [report for report in reports if report.used]
    return math.fsum(report.loss * report.used for report in known) / samples
