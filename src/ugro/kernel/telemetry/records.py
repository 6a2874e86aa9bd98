"""The records that a training writes (``ugro.train``). Pure: lines in, records out.

Lines come from a node and may be cut short or be something else: invalid ones are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

MAX_LINE = 1 << 20
MAX_RANKS = 4096
_MAX_TEXT = 1000
_NAME = 200
_LAST_UNIX_S = 2**40


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of all ranks; the lists have an entry for each rank."""

    step: int
    epoch: int
    samples: int
    loss: float | None  # None: not reported; may be NaN or infinite
    step_s: float
    shares: tuple[int, ...]
    own_s: tuple[float, ...]
    data_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    time_s: float = 0.0  # unix seconds of the first rank's clock when it was over; 0: not recorded


@dataclass(frozen=True, slots=True)
class RunRecord:
    nodes: tuple[str, ...]  # a name for each rank
    device: str
    mode: str
    is_local: bool = False  # local SGD


@dataclass(frozen=True, slots=True)
class ModelRecord:
    gradient_bytes: int
    is_compressed: bool  # by a hook of the script
    parameters: int = 0
    parallel: str = "ddp"
    parameter_bytes: int = 0
    block_bytes: int = 0  # of the largest of the blocks that are computed one after the other
    rest_bytes: int = 0  # what is in no block


@dataclass(frozen=True, slots=True)
class PlanRecord:
    holds_from: int
    shares: tuple[int, ...]
    caps: tuple[int | None, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """The stages of a pipeline, in the order of the layers; and how long a step of it takes."""

    ranks: tuple[int, ...]  # of each stage
    layers: tuple[int, ...]  # how many each stage has
    micro_batches: int
    predicted_s: float
    measured_s: float | None  # None: not yet
    reason: str

    def layers_of(self, rank: int) -> int:
        return sum(count for one, count in zip(self.ranks, self.layers, strict=True) if one == rank)


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    step: int
    words: str
    predicted_s: float
    best_s: float
    best_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A short run that measures; the lists have an entry for each rank."""

    global_batch: int = 0
    least: int = 1
    can_accumulate: bool = False
    problem: str | None = None  # why nothing can be measured
    nodes: tuple[str, ...] = ()
    # The most memory in use with the smaller and with the larger share, and the device's; 0: not known.
    memory_bytes: tuple[tuple[int, int, int], ...] = ()
    exchange_s: float = 0.0  # of all gradients between all ranks
    pairs: tuple[tuple[int, int, float], ...] = ()  # two ranks, and the same between them alone
    sizes: tuple[int, ...] = ()  # of the batches
    optimizer_bytes: int = 0  # what it remembers; 0: not known
    sample_bytes: int = 0  # what layers keep of one sample for the backward pass; 0: not known
    is_of_local: bool = False  # the training itself would be local SGD


@dataclass(frozen=True, slots=True)
class AttemptSteps:
    """The steps of one attempt, as a client gets them; the newest, if there are very many."""

    attempt: int
    nodes: tuple[str, ...]  # a name for each rank
    device: str
    mode: str
    parameters: int  # of the model; 0: not recorded
    steps: tuple[StepRecord, ...]


@dataclass(slots=True)
class Training:
    """The last record of each kind, and the steps in order."""

    run: RunRecord | None = None
    model: ModelRecord | None = None
    plan: PlanRecord | None = None
    advice: AdviceRecord | None = None
    pipeline: PipelineRecord | None = None
    trial: TrialRecord | None = None
    steps: list[StepRecord] = field(default_factory=list)

    def names(self, ranks: int) -> tuple[str, ...]:
        nodes = self.run.nodes if self.run is not None else ()
        return nodes if len(nodes) == ranks else tuple(f"rank {rank}" for rank in range(ranks))


def read(lines: Iterable[bytes]) -> Training:
    found = Training()
    for line in lines:
        if (record := document(line)) is not None:
            _add(found, record)
    return found


def document(line: bytes) -> dict[str, Any] | None:
    """A JSON object, or None."""
    if len(line) > MAX_LINE:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def step_record(record: dict[str, Any]) -> StepRecord | None:
    """None if it is not a valid step record."""
    try:
        shares = tuple(_whole(share) for share in _list(record["shares"]))
        names = ("own_s", "data_s", "forward_s", "backward_s", "waiting_s", "communication_s", "optimizer_s")
        lists: list[Any] = [tuple(_seconds(one) for one in _list(record[name])) for name in names]
        if not shares or any(len(one) != len(shares) for one in lists):
            return None
        head = (_whole(record["step"]), _whole(record.get("epoch", 0)), _whole(record["samples"]))
        step_s, time_s = _seconds(record["step_s"]), record.get("time", 0)
        time_s = float(time_s) if isinstance(time_s, int | float) and 0 < time_s < _LAST_UNIX_S else 0.0
        step = StepRecord(*head, loss_of(record.get("loss")), step_s, shares, *lists)
        return replace(step, time_s=time_s) if time_s else step
    except (KeyError, TypeError, ValueError):
        return None


def loss_of(value: object) -> float | None:
    """A number; NaN and infinities, which JSON has no numbers for, are written as texts."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) < 1 << 63 else None


def _add(found: Training, record: dict[str, Any]) -> None:
    kind = record.get("kind")
    if kind == "profile":
        if (step := step_record(record)) is not None:
            found.steps.append(step)
        return
    try:
        if kind == "run":
            _begin(found, record)
        elif isinstance(kind, str) and kind in _READERS:
            setattr(found, kind, _READERS[kind](record))
    except (KeyError, TypeError, ValueError):
        return


def _begin(found: Training, record: dict[str, Any]) -> None:
    """Drops earlier records: they are about ranks that a launcher has since restarted."""
    nodes = tuple(str(name)[:_NAME] for name in _list(record["nodes"]))
    is_local = record.get("sync") == "local"
    found.run = RunRecord(nodes, str(record.get("device"))[:_NAME], str(record.get("mode"))[:_NAME], is_local)
    found.model = found.plan = found.advice = found.trial = found.pipeline = None
    found.steps.clear()


def _model(record: dict[str, Any]) -> ModelRecord:
    parameters = _whole(record.get("parameters", 0))
    sizes = (_whole(record.get(name, 0)) for name in ("parameter_bytes", "block_bytes", "rest_bytes"))
    parallel = str(record.get("parallel", "ddp"))[:_NAME]
    return ModelRecord(_whole(record["gradient_bytes"]), bool(record.get("comm_hook")), parameters, parallel, *sizes)


def _plan(record: dict[str, Any]) -> PlanRecord:
    return PlanRecord(
        _whole(record["holds_from"]),
        tuple(_whole(share) for share in _list(record["shares"])),
        tuple(None if cap is None else _whole(cap) for cap in _list(record["caps"])),
        str(record.get("reason", ""))[:_MAX_TEXT],
    )


def _pipeline(record: dict[str, Any]) -> PipelineRecord:
    measured_s = record.get("measured_s")
    ranks, layers = (tuple(_whole(one) for one in _list(record[name])) for name in ("ranks", "layers"))
    if len(ranks) != len(layers) or not ranks:
        raise ValueError("stages without ranks or layers")
    return PipelineRecord(
        ranks,
        layers,
        _whole(record["micro_batches"]),
        _seconds(record["predicted_s"]),
        None if measured_s is None else _seconds(measured_s),
        str(record.get("reason", ""))[:_MAX_TEXT],
    )


def _advice(record: dict[str, Any]) -> AdviceRecord:
    return AdviceRecord(
        _whole(record["step"]),
        str(record["words"])[:_MAX_TEXT],
        _seconds(record["predicted_s"]),
        _seconds(record["best_s"]),
        tuple(_whole(rank) for rank in _list(record["best_ranks"])),
    )


def _trial(record: dict[str, Any]) -> TrialRecord:
    problem = record.get("problem")
    return TrialRecord(
        _whole(record.get("global_batch", 0)),
        max(1, _whole(record.get("least", 1))),
        bool(record.get("can_accumulate")),
        None if problem is None else str(problem)[:_MAX_TEXT],
        tuple(str(name)[:_NAME] for name in _list(record.get("nodes", []))),
        tuple(_three(one) for one in _list(record.get("memory_bytes", []))),
        _seconds(record.get("exchange_s", 0.0)),
        tuple(_pair(one) for one in _list(record.get("pairs", []))),
        tuple(_whole(one) for one in _list(record.get("sizes", []))),
        _whole(record.get("optimizer_bytes", 0)),
        _whole(record.get("sample_bytes", 0)),
        record.get("sync") == "local",
    )


# The last record of each of these kinds counts, and is the attribute of that name.
_READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "model": _model,
    "plan": _plan,
    "advice": _advice,
    "pipeline": _pipeline,
    "trial": _trial,
}


def _three(value: object) -> tuple[int, int, int]:
    first, second, third = (_whole(one) for one in _list(value))
    return first, second, third


def _pair(value: object) -> tuple[int, int, float]:
    first, second, seconds = _list(value)
    return _whole(first), _whole(second), _seconds(seconds)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        raise TypeError("no list")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError("not an integer")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError("no time")
    return float(value) if math.isfinite(value) else 0.0
