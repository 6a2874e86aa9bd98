"""Whether a training fits the devices that it would get; if not, the nearest choice that does. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from ugro.features.recipes.model import Recipe
from ugro.features.recipes.rules import Shape, lora_parameters
from ugro.kernel.links.model import Facts
from ugro.kernel.support.quantities import format_size

# --- memory -----------------------------------------------------------------------------------------------------------
# What a training needs in the memory of one device: weights, gradients, optimizer, activations, logits. Pure.
#
# The recipes decide the precisions: trained parameters, their gradients and the optimizer's two moments have 4 bytes;
# frozen weights have the precision of the computation. Weights, gradients and optimizer are counted exactly. What
# layers keep for the backward pass was measured with transformers 5, once for each kind of layer, as multiples of a
# token's width and of the MLP's; ``tests`` measure it again.


_FLOAT = 4  # bytes
MOMENTS = 2  # of AdamW
_FOUR_BITS = 0.5 + 1 / 64  # bytes of a weight, with the scale of its block
AROUND_CPU, AROUND_GPU = 450_000_000, 800_000_000  # Python and torch; CUDA's context and workspaces
_AROUND_LAYERS = 3  # embeddings and the last norm, in widths of a token
_MASKS = 2  # of dropout, the same
_SQUARES = 3  # attention with dropout on a CPU keeps so many matrices of all pairs of tokens
_LAST = 16  # bytes for each word of each token: logits, probabilities, their gradients


class Mode(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@dataclass(frozen=True, slots=True)
class Training:
    """What one device computes at once."""

    mode: Mode
    samples: int
    seq_length: int = 0
    value_bytes: int = _FLOAT  # of the computation: 2 for bf16 and fp16
    rank: int = 16
    targets: tuple[str, ...] | None = None  # that get LoRA; None: the usual ones, empty: all
    has_checkpointing: bool = False
    is_on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """In bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    around: int  # what is there before the first tensor

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.around


@dataclass(frozen=True, slots=True)
class _Kept:
    """Values of 4 bytes for a token in one layer: multiples of its width, and of the MLP's."""

    width: float
    inner: float

    def bytes(self, shape: Shape) -> float:
        return _FLOAT * (self.width * shape.hidden + self.inner * shape.inner)


# By family, whether most weights are frozen, and the bytes of a value.
_KEPT = {
    ("llama", False, 4): _Kept(10.1, 4),
    ("llama", False, 2): _Kept(8.6, 2),
    ("llama", True, 4): _Kept(7.2, 3),
    ("llama", True, 2): _Kept(5.2, 1.5),
    ("gpt2", False, 4): _Kept(8.1, 5),
    ("gpt2", False, 2): _Kept(5.1, 2.5),
    ("gpt2", True, 4): _Kept(7.1, 4),
    ("gpt2", True, 2): _Kept(4.6, 2),
    ("bert", False, 4): _Kept(8.1, 2),
    ("bert", False, 2): _Kept(6.1, 1),
    ("bert", True, 4): _Kept(7.2, 1),
    ("bert", True, 2): _Kept(4.6, 0.5),
}


def need(shape: Shape, training: Training) -> Need:
    trained = trained_parameters(shape, training)
    return Need(
        weights=_weights(shape, training, trained),
        gradients=_FLOAT * trained,
        optimizer=_FLOAT * MOMENTS * trained,
        activations=_activations(shape, training),
        logits=_tokens(shape, training) * shape.vocabulary * _LAST,
        around=AROUND_CPU if training.is_on_cpu else AROUND_GPU,
    )


def trained_parameters(shape: Shape, training: Training) -> int:
    if training.mode is Mode.FULL:
        return shape.parameters
    targets = shape.usual if training.targets is None else training.targets
    return lora_parameters(shape, training.rank, targets)


def _weights(shape: Shape, training: Training, trained: int) -> int:
    if training.mode is Mode.FULL:
        # The computation has its own copy of them, in its precision.
        return shape.parameters * (_FLOAT + (2 if training.value_bytes == 2 else 0))
    if training.mode is Mode.LORA:
        return shape.parameters * training.value_bytes + _FLOAT * trained
    matrices = shape.layers * sum(one.inputs * one.outputs for one in shape.linears)
    return round(matrices * _FOUR_BITS) + (shape.parameters - matrices) * _FLOAT + _FLOAT * trained


def _tokens(shape: Shape, training: Training) -> int:
    """At once on the device; an image is a sequence of patches."""
    return training.samples * (shape.patches or length_of(shape, training.seq_length))


def length_of(shape: Shape, wanted: int) -> int:
    return min(wanted, shape.positions) if shape.positions else wanted


def _activations(shape: Shape, training: Training) -> int:
    if shape.pixels:
        return training.samples * shape.pixels * _FLOAT
    tokens = _tokens(shape, training)
    is_frozen = training.mode is not Mode.FULL
    layer = _KEPT[shape.family, is_frozen, training.value_bytes].bytes(shape)
    if shape.has_dropout:
        layer += _FLOAT * _MASKS * shape.hidden
        if training.is_on_cpu:
            layer += _FLOAT * _SQUARES * shape.heads * length_of(shape, training.seq_length)
    around = _FLOAT * _AROUND_LAYERS * shape.hidden
    if training.has_checkpointing:  # each layer's input, and all of one layer, which is computed again
        return round(tokens * (shape.layers * shape.hidden * training.value_bytes + layer + around))
    return round(tokens * (shape.layers * layer + around))


# --- fit --------------------------------------------------------------------------------------------------------------


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


# --- known ------------------------------------------------------------------------------------------------------------
# The configurations of well-known models, as far as their memory depends on them: those that are not on any disk.


Config = dict[str, Any]


def known_config(hub_id: str) -> Config | None:
    return _KNOWN.get(hub_id)


def _llama(sizes: str, words: int, positions: int, kind: str = "llama", **more: Any) -> Config:
    """``sizes``: width, width of the MLP, layers, heads, heads of keys and values."""
    hidden, inner, layers, heads, keys = map(int, sizes.split())
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words,
        "max_position_embeddings": positions, **more,
    }  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "vocab_size": 50257, "n_positions": 1024}


def _bert(words: int, kind: str = "bert", hidden: int = 768, layers: int = 12, heads: int = 12) -> Config:
    positions, types = (512, 2) if kind == "bert" else (514, 1)
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": words, "max_position_embeddings": positions,
        "type_vocab_size": types,
    }  # fmt: skip


def _resnet(*depths: int, layer: str = "bottleneck", sizes: tuple[int, ...] = (256, 512, 1024, 2048)) -> Config:
    return {"model_type": "resnet", "layer_type": layer, "hidden_sizes": sizes, "depths": depths, "num_labels": 1000}


_DISTILBERT = {
    "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
    "max_position_embeddings": 512,
}  # fmt: skip
_VIT = {
    "model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_labels": 1000,
}  # fmt: skip
_TIED: Config = {"tie_word_embeddings": True}

_KNOWN: dict[str, Config] = {
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "HuggingFaceTB/SmolLM2-135M": _llama("576 1536 30 9 3", 49152, 8192, **_TIED),
    "HuggingFaceTB/SmolLM2-360M": _llama("960 2560 32 15 5", 49152, 8192, **_TIED),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama("2048 5632 22 32 4", 32000, 2048),
    "Qwen/Qwen2.5-0.5B": _llama("896 4864 24 14 2", 151936, 32768, "qwen2", **_TIED),
    "Qwen/Qwen2.5-1.5B": _llama("1536 8960 28 12 2", 151936, 131072, "qwen2", **_TIED),
    "Qwen/Qwen2.5-7B": _llama("3584 18944 28 28 4", 152064, 131072, "qwen2"),
    "huggyllama/llama-7b": _llama("4096 11008 32 32 32", 32000, 2048),
    "huggyllama/llama-13b": _llama("5120 13824 40 40 40", 32000, 2048),
    "meta-llama/Llama-2-7b-hf": _llama("4096 11008 32 32 32", 32000, 4096),
    "meta-llama/Llama-3.1-8B": _llama("4096 14336 32 32 8", 128256, 131072),
    "meta-llama/Llama-3.2-1B": _llama("2048 8192 16 32 8", 128256, 131072, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _llama("3072 8192 28 24 8", 128256, 131072, head_dim=128, **_TIED),
    "mistralai/Mistral-7B-v0.1": _llama("4096 14336 32 32 8", 32000, 32768, "mistral"),
    "google-bert/bert-base-uncased": _bert(30522),
    "google-bert/bert-base-cased": _bert(28996),
    "google-bert/bert-large-uncased": _bert(30522, hidden=1024, layers=24, heads=16),
    "FacebookAI/roberta-base": _bert(50265, "roberta"),
    "FacebookAI/xlm-roberta-base": _bert(250002, "xlm-roberta"),
    "distilbert/distilbert-base-uncased": _DISTILBERT,
    "microsoft/resnet-18": _resnet(2, 2, 2, 2, layer="basic", sizes=(64, 128, 256, 512)),
    "microsoft/resnet-50": _resnet(3, 4, 6, 3),
    "microsoft/resnet-101": _resnet(3, 4, 23, 3),
    "google/vit-base-patch16-224": _VIT,
}
