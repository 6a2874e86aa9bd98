"""What a training needs in the memory of one device: weights, gradients, optimizer, activations, logits. Pure.

The recipes decide the precisions: trained parameters, their gradients and the optimizer's two moments have 4 bytes;
frozen weights have the precision of the computation. Weights, gradients and optimizer are counted exactly. What layers
keep for the backward pass was measured with transformers 5, once for each kind of layer, as multiples of a token's
width and of the MLP's; ``tests`` measure it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.policy.recipes.shape import Shape, lora_parameters

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
