"""A plan before a launch: what trials of a training measured, and what sets of nodes are predicted to do.

A trial is a short run of the user's own script. ``rules`` read its records and predict from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.support.quantities import format_size

MOST_NODES = 10  # every set of them is considered: 1,023
_LESS = 60.0  # samples per second that are shown with digits after the point
_NUMBERS = ("", "", "", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of a rank with one number of samples."""

    samples: int
    seconds: float  # of a step, without waiting for others
    spread: float  # of single steps, relative to that
    steps: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankTrial:
    points: tuple[Point, ...]  # the smallest share first; at least one
    optimizer_s: float = 0.0
    data_s: float = 0.0  # of a step with the largest share: waiting for data
    cap: int | None = None  # how many samples it can hold at once, if that is known


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a training has in memory, in bytes, if one device has all of it."""

    parameters: int
    gradients: int
    optimizer: int
    sample: int = 0  # what layers keep of one sample for the backward pass; 0: not known
    block: int = 0  # the parameters of the largest block; 0: the model has no blocks
    rest: int = 0  # parameters in no block


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What one device would need if the model were spread in one way. In bytes."""

    way: str
    node: str
    device: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int  # of all its samples at once
    around: int  # what is there before the first tensor
    room: int  # of the device, without what others use
    samples: int  # its share, if shares are equal
    at_once: int  # how many of these fit at the same time; 0: it does not fit

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.around


@dataclass(frozen=True, slots=True)
class NodeTrial:
    """A trial on one node alone."""

    node: str
    device: str
    ranks: tuple[RankTrial, ...]
    global_batch: int
    parameters: int
    gradient_bytes: int
    communication_s: float = 0.0  # of a step, between the ranks of this node
    least: int = 1  # samples that every rank needs
    can_accumulate: bool = False
    at: str = ""  # when it was measured
    job: int = 0
    size: ModelSize | None = None
    is_of_local: bool = False  # the training itself is local SGD; this was measured with exchanges in every step


@dataclass(frozen=True, slots=True)
class Pair:
    """An exchange of all gradients between two nodes alone."""

    first: str
    second: str
    seconds: float


@dataclass(frozen=True, slots=True)
class JointTrial:
    """A trial on several nodes together."""

    nodes: tuple[str, ...]  # of each rank
    shares: tuple[float, ...]  # on average
    own_s: tuple[float, ...]  # each rank's time of a step, without waiting for others
    communication_s: float  # of a step, after the last rank was ready
    step_s: float
    whole_s: float = 0.0  # an exchange of all gradients, without a training
    pairs: tuple[Pair, ...] = ()
    at: str = ""
    job: int = 0

    @property
    def distinct(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.nodes))


@dataclass(frozen=True, slots=True)
class JointFailure:
    """A trial on several nodes together that has measured nothing."""

    nodes: tuple[str, ...]
    reason: str
    at: str = ""
    job: int = 0


class Links(StrEnum):
    """How the time of an exchange between nodes is known."""

    NONE = "none"  # one node: there is none
    TRIAL = "trial"
    BENCH = "bench"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a set of nodes should do."""

    nodes: tuple[str, ...]
    samples_per_s: float
    error: float  # relative: 0.08 is ± 8 %
    step_s: float
    communication_s: float
    shares: tuple[int, ...]  # of the ranks, in the order of the nodes
    accumulate: int = 1  # micro-batches of the rank with the most
    links: Links = Links.NONE
    why: str = ""  # it is not the best, in a few words


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What local SGD on all nodes should do. It is another training: nobody gets it without asking for it."""

    nodes: tuple[str, ...]
    samples_per_s: float
    steps: int  # of a rank between two exchanges, on average
    round_s: float
    exchange_s: float  # once in a round


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a node's trial says, for people."""

    node: str
    device: str
    fixed_s: float  # of a step, of its slowest rank
    per_sample_s: float
    data_share: float  # of a step
    memory_bytes: int | None
    at: str
    job: int
    is_cached: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    node: str
    reason: str
    job: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    name: str
    global_batch: int
    parameters: int
    gradient_bytes: int
    predictions: tuple[Prediction, ...]  # the best first
    nodes: tuple[NodeFigures, ...]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    local: LocalPlan | None = None  # only if it is clearly faster than the best, or what the training does anyway
    memory: tuple[DeviceNeed, ...] = ()  # of each device of all these nodes, in each way to spread the model
    is_of_local: bool = False  # the training itself is local SGD, which only ``local`` is about

    @property
    def best(self) -> Prediction:
        return self.predictions[0]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was predicted of a job when it was submitted."""

    prediction: Prediction
    made_at: str


def title(prediction: Prediction, everyone: int) -> str:
    """``gpu1 + gpu2, accumulate 4``"""
    words = _set(prediction.nodes, everyone)
    return f"{words}, accumulate {prediction.accumulate}" if prediction.accumulate > 1 else words


def local_title(local: LocalPlan, everyone: int) -> str:
    """``all three, local SGD every 80 steps``"""
    return f"{_set(local.nodes, everyone)}, local SGD every {local.steps} steps"


def _set(nodes: tuple[str, ...], everyone: int) -> str:
    count = len(nodes)
    words = " + ".join(nodes)
    if count == 1:
        return f"{words} alone" if everyone > 1 else words
    if count == everyone and count > 2:
        return f"all {_NUMBERS[count] if count < len(_NUMBERS) else count}"
    return words


def speed(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g}" if samples_per_s < _LESS else f"{samples_per_s:,.0f}"


def percent(error: float) -> str:
    return f"± {max(1, round(100 * error))} %"


def compared(predicted: Prediction, measured: float | None) -> str:
    """``412 samples/s ± 8 %; measured 398, 3 % less``"""
    words = f"{speed(predicted.samples_per_s)} samples/s {percent(predicted.error)}"
    if predicted.links is Links.ASSUMED:
        words += ", with an assumed network"
    if measured is None or predicted.samples_per_s <= 0:
        return words
    off = round(100 * (measured / predicted.samples_per_s - 1))
    apart = "as predicted" if not off else f"{abs(off)} % {'more' if off > 0 else 'less'}"
    return f"{words}; measured {speed(measured)}, {apart}"


def memory_lines(found: Sequence[DeviceNeed]) -> list[str]:
    """One for each way: of the device with the least to spare."""
    ways = dict.fromkeys(one.way for one in found)
    return [_memory_line(way, [one for one in found if one.way == way]) for way in ways]


def _memory_line(way: str, found: Sequence[DeviceNeed]) -> str:
    worst = min(found, key=lambda one: (one.at_once > 0, one.at_once >= one.samples, one.room - one.total))
    parts = [
        f"parameters {format_size(worst.parameters)}",
        f"gradients {format_size(worst.gradients)}",
        f"optimizer {format_size(worst.optimizer)}",
        f"activations {format_size(worst.activations)}" if worst.activations else "activations not known",
    ]
    room = f"{worst.node} ({worst.device}) needs about {format_size(worst.total)} of {format_size(worst.room)}"
    return f"{way:<8} {_verdict(worst)}: {room} ({', '.join(parts)})"


def _verdict(worst: DeviceNeed) -> str:
    if not worst.at_once:
        return "does not fit"
    return "fits" if worst.at_once >= worst.samples else f"fits, {worst.at_once} of {worst.samples} samples at once"
