"""Whether a training fits the devices that it would get; if not, the nearest choice that does. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ugro.core.node import Facts
from ugro.core.recipe import Recipe
from ugro.core.support.quantity import format_size
from ugro.policy.recipes.memory import Mode, Need, Training, need, trained_parameters
from ugro.policy.recipes.shape import Shape

_LEAST_LENGTH = 64
_TIGHT = 0.9  # of a device: the estimate may be wrong by so much


@dataclass(frozen=True, slots=True)
class Device:
    """``room_bytes``: without what processes of others use."""

    node: str
    name: str
    room_bytes: int
    is_cpu: bool

    def __str__(self) -> str:
        return f"{self.node} ({self.name})"


def devices_of(node: str, gpus: Sequence[int], facts: Facts) -> list[Device]:
    """The GPUs that a job gets of a node, or its main memory."""
    if not gpus:
        return [Device(node, "memory", facts.memory_total_bytes, is_cpu=True)]
    found = []
    for gpu in facts.gpus:
        if gpu.index in gpus and gpu.memory_total_bytes:
            others = sum(one.memory_bytes or 0 for one in gpu.processes if not one.is_ours)
            found.append(Device(node, gpu.model, gpu.memory_total_bytes - others, is_cpu=False))
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    lines: tuple[str, ...]
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """A training, and the words that change the user's command to it."""

    training: Training
    words: tuple[str, ...] = ()


def judge(shape: Shape, training: Training, devices: Sequence[Device]) -> Verdict:
    """``training.samples``: the share of each device, if they were equal."""
    lines = [_headline(shape, training)]
    lines += [_line(shape, training, one) for one in _tightest(devices)]
    full = [one for one in devices if not _fits(shape, training, one)]
    if not full:
        return Verdict(tuple(lines))
    worst = min(full, key=lambda one: one.room_bytes)
    least = _need(shape, _smallest(training, worst), worst).total
    problem = f"does not fit {worst}: it needs {format_size(least)}, and {format_size(worst.room_bytes)} are there"
    return Verdict(tuple(lines), problem, _hint(shape, training, devices, full))


def training_of(
    args: Sequence[str], recipe: Recipe, devices: Sequence[Device]
) -> Training:
    """What the script's words say, and its defaults. Of several values, as a sweep has them, the largest."""
    given = _words(args)

    def number(flag: str, usual: int) -> int:
        found = re.findall(r"\d+", given.get(flag) or "")
        default = recipe.default(flag)
        return max(map(int, found)) if found else int(default) if default else usual

    is_text = recipe.default("--lora-r") is not None
    mode = Mode.FULL if "--full" in given or not is_text else Mode.QLORA if "--qlora" in given else Mode.LORA
    on_cpu = any(one.is_cpu for one in devices)
    dtype = given.get("--dtype") or "auto"
    has_halves = dtype in ("bf16", "fp16") or (dtype == "auto" and not on_cpu)
    targets = given.get("--lora-targets")
    return Training(
        mode,
        samples=-(-number("--batch-size", 32) // max(1, len(devices))),
        seq_length=number("--seq-length", 0),
        value_bytes=2 if has_halves else 4,
        rank=number("--lora-r", 16),
        targets=None if not targets else () if targets == "all-linear" else tuple(targets.split(",")),
        has_checkpointing="--gradient-checkpointing" in given,
        is_on_cpu=on_cpu,
    )


def _words(args: Sequence[str]) -> Mapping[str, str | None]:
    """Flags and their values; ``_`` and ``-`` are the same."""
    found: dict[str, str | None] = {}
    for at, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            after = args[at + 1] if at + 1 < len(args) and not args[at + 1].startswith("--") else None
            found[name.replace("_", "-")] = value if equals else after
    return found


# --- does it fit ---------------------------------------------------------------------------------------------------


def _need(shape: Shape, training: Training, device: Device) -> Need:
    return need(shape, replace(training, is_on_cpu=device.is_cpu))


def _smallest(training: Training, device: Device) -> Training:
    """A GPU that runs out of memory computes its share in parts; a process that fills a machine's memory is killed."""
    return training if device.is_cpu else replace(training, samples=1)


def _fits(shape: Shape, training: Training, device: Device) -> bool:
    return _need(shape, _smallest(training, device), device).total <= device.room_bytes


def _most_samples(shape: Shape, training: Training, device: Device) -> int:
    low, high = 0, training.samples
    while low < high:
        middle = (low + high + 1) // 2
        if _need(shape, replace(training, samples=middle), device).total <= device.room_bytes:
            low = middle
        else:
            high = middle - 1
    return low


# --- the nearest that does -----------------------------------------------------------------------------------------


def _hint(shape: Shape, training: Training, devices: Sequence[Device], full: Sequence[Device]) -> str:
    found = next(
        (choice for choice in _others(shape, training, devices) if _all_fit(shape, choice.training, devices)), None
    )
    roomy = [one for one in devices if one not in full]
    nodes = sorted({one.node for one in roomy} - {one.node for one in full})
    parts = [f"this fits: {' '.join(found.words)}"] if found else []
    if nodes:
        parts.append(f"nodes with room: --nodes {len(nodes)}{''.join(f' --only {node}' for node in nodes)}")
    return "; or ".join(parts) if parts else "no setting of this recipe fits: choose a smaller model, or other nodes"


def _all_fit(shape: Shape, training: Training, devices: Sequence[Device]) -> bool:
    return all(_fits(shape, training, one) for one in devices)


def _others(shape: Shape, training: Training, devices: Sequence[Device]) -> Iterator[_Choice]:
    """From what changes least for the user to what changes most."""
    has_linears = bool(shape.linears) and shape.patches == 0
    first = _Choice(training)
    yield from _smaller(shape, first, devices)
    modes = []
    if has_linears and training.mode is Mode.FULL:
        modes.append(_Choice(replace(training, mode=Mode.LORA), ("without --full",)))
    if has_linears and training.mode is not Mode.QLORA and not any(one.is_cpu for one in devices):
        words = ("--qlora",) if training.mode is Mode.LORA else ("--qlora", "without --full")
        modes.append(_Choice(replace(training, mode=Mode.QLORA), words))
    for choice in modes:
        yield choice
        yield from _smaller(shape, choice, devices)


def _smaller(shape: Shape, choice: _Choice, devices: Sequence[Device]) -> Iterator[_Choice]:
    fewer = partial(_fewer_samples, len(devices))
    steps: list[Callable[[_Choice], Iterator[_Choice]]] = [_checkpointed, fewer, _shorter]
    if shape.pixels or shape.patches:
        steps = [fewer]
    elif not any(one.is_cpu for one in devices):
        steps.remove(fewer)  # a GPU takes one at a time by itself
    for step in steps:
        for found in step(choice):
            yield found
            choice = found


def _checkpointed(choice: _Choice) -> Iterator[_Choice]:
    if not choice.training.has_checkpointing:
        yield _Choice(
            replace(choice.training, has_checkpointing=True), (*choice.words, "--gradient-checkpointing")
        )


def _fewer_samples(ranks: int, choice: _Choice) -> Iterator[_Choice]:
    training = choice.training
    while training.samples > 1:
        training = replace(training, samples=training.samples // 2)
        yield _Choice(training, (*choice.words, "--batch-size", str(training.samples * ranks)))


def _shorter(choice: _Choice) -> Iterator[_Choice]:
    training = choice.training
    while training.seq_length // 2 >= _LEAST_LENGTH:
        training = replace(training, seq_length=training.seq_length // 2)
        yield _Choice(training, (*choice.words, "--seq-length", str(training.seq_length)))


# --- words ---------------------------------------------------------------------------------------------------------


def _headline(shape: Shape, training: Training) -> str:
    trained = trained_parameters(shape, training)
    what = "all of them trained" if training.mode is Mode.FULL else f"{_count(trained)} trained ({training.mode})"
    return f"{_count(shape.parameters)} parameters, {what}"


def _line(shape: Shape, training: Training, device: Device) -> str:
    found = _need(shape, training, device)
    parts = [
        f"weights {format_size(found.weights)}",
        f"gradients {format_size(found.gradients)}",
        f"optimizer {format_size(found.optimizer)}",
        f"activations {format_size(found.activations)}",
        *([f"logits {format_size(found.logits)}"] if found.logits else []),
    ]
    text = f"{device}: about {format_size(found.total)} of {format_size(device.room_bytes)} ({', '.join(parts)})"
    if found.total <= _TIGHT * device.room_bytes:
        return text
    if found.total <= device.room_bytes:
        return f"{text}; that is tight"
    at_once = _most_samples(shape, training, device)
    return f"{text}; {at_once} of {training.samples} samples at once" if at_once and not device.is_cpu else text


def _tightest(devices: Sequence[Device]) -> list[Device]:
    """One for each kind of device, the one with the least room."""
    found: dict[tuple[str, bool], Device] = {}
    for one in sorted(devices, key=lambda one: -one.room_bytes):
        found[one.name, one.is_cpu] = one
    return list(found.values())


def _count(number: int) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,}"


