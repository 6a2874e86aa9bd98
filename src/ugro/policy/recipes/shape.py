"""The shape of a model, from its ``config.json``: how many parameters it has, and what its layers look like. Exact.

Architectures that are not known here have no shape: then nothing is claimed about their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Linear:
    """One of the matrices of every layer, which LoRA can adapt."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Shape:
    """``family``: layers that keep the same values for the backward pass. ``inner``: the width of a layer's MLP."""

    family: str
    task: str
    parameters: int
    hidden: int
    layers: int
    inner: int
    heads: int
    vocabulary: int = 0  # of words that it predicts
    positions: int = 0  # the longest sequence; 0: no limit
    linears: tuple[Linear, ...] = ()
    usual: tuple[str, ...] = ()  # the matrices that get LoRA unless others are named; empty: all
    head: int = 0  # parameters that are trained as a whole beside LoRA
    has_dropout: bool = False
    pixels: int = 0  # values in its feature maps, for one image: convolutions
    patches: int = 0  # the length of an image's sequence


def shape_of(config: Config) -> Shape | None:
    """None for an architecture that is not known, or a configuration that lacks something."""
    build = _BUILDERS.get(str(config.get("model_type", "")))
    try:
        return build(config) if build is not None else None
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None


def lora_parameters(shape: Shape, rank: int, targets: tuple[str, ...]) -> int:
    """Of adapters of this rank on the named matrices; without names, on all of them."""
    chosen = [one for one in shape.linears if not targets or one.name in targets]
    return shape.layers * sum(rank * (one.inputs + one.outputs) for one in chosen) + shape.head


# --- decoders ----------------------------------------------------------------------------------------------------


def _llama(config: Config) -> Shape:
    """Llama, Mistral and Qwen: rotary positions, RMS norms, a gated MLP, perhaps fewer heads for keys and values."""
    kind = str(config["model_type"])
    hidden, inner, layers = int(config["hidden_size"]), int(config["intermediate_size"]), _layers(config)
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    keys = int(config.get("num_key_value_heads") or heads) * width
    own = heads * width
    linears = (
        Linear("q_proj", hidden, own),
        Linear("k_proj", hidden, keys),
        Linear("v_proj", hidden, keys),
        Linear("o_proj", own, hidden),
        Linear("gate_proj", hidden, inner),
        Linear("up_proj", hidden, inner),
        Linear("down_proj", inner, hidden),
    )
    has_bias = bool(config.get("attention_bias")) or kind == "qwen2"
    biases = (own + 2 * keys + (0 if kind == "qwen2" else hidden)) if has_bias else 0
    biases += 2 * inner + hidden if config.get("mlp_bias") else 0
    norms = 2 * hidden + (2 * width if kind == "qwen3" else 0)
    words = int(config["vocab_size"])
    ends = words * hidden * (1 if config.get("tie_word_embeddings") else 2) + hidden
    total = layers * (_size(linears) + biases + norms) + ends
    return Shape(
        "llama", "causal-lm", total, hidden, layers, inner, heads, words, _positions(config), linears,
        usual=("q_proj", "v_proj"),
    )  # fmt: skip


def _gpt2(config: Config) -> Shape:
    hidden, layers = int(config["n_embd"]), int(config["n_layer"])
    inner = int(config.get("n_inner") or 4 * hidden)
    words, positions = int(config["vocab_size"]), int(config.get("n_positions") or config.get("n_ctx") or 1024)
    linears = (
        Linear("c_attn", hidden, 3 * hidden),
        Linear("c_proj", hidden, hidden),
        Linear("c_fc", hidden, inner),
        Linear("c_proj", inner, hidden),
    )
    each = _size(linears) + 3 * hidden + hidden + inner + hidden + 4 * hidden
    total = words * hidden + positions * hidden + layers * each + 2 * hidden
    total += 0 if config.get("tie_word_embeddings", True) else words * hidden
    heads = int(config["n_head"])
    return Shape(
        "gpt2", "causal-lm", total, hidden, layers, inner, heads, words, positions, linears,
        usual=("c_attn",), has_dropout=bool(config.get("attn_pdrop", 0.1)),
    )  # fmt: skip


def _neox(config: Config) -> Shape:
    """Pythia."""
    hidden, inner, layers = int(config["hidden_size"]), int(config["intermediate_size"]), _layers(config)
    words = int(config["vocab_size"])
    linears = (
        Linear("query_key_value", hidden, 3 * hidden),
        Linear("dense", hidden, hidden),
        Linear("dense_h_to_4h", hidden, inner),
        Linear("dense_4h_to_h", inner, hidden),
    )
    biases = (3 * hidden + hidden) * bool(config.get("attention_bias", True)) + inner + hidden
    each = _size(linears) + biases + 4 * hidden
    total = words * hidden * (1 if config.get("tie_word_embeddings") else 2) + layers * each + 2 * hidden
    heads = int(config["num_attention_heads"])
    return Shape(
        "bert", "causal-lm", total, hidden, layers, inner, heads, words, _positions(config), linears,
        usual=("query_key_value",),
    )  # fmt: skip


# --- encoders ----------------------------------------------------------------------------------------------------


def _bert(config: Config) -> Shape:
    """BERT and RoBERTa, with a head that classifies."""
    hidden, inner, layers = int(config["hidden_size"]), int(config["intermediate_size"]), _layers(config)
    words, labels = int(config["vocab_size"]), _labels(config)
    linears = _encoder_linears(("query", "key", "value", "dense"), hidden, inner)
    embedded = (words + int(config["max_position_embeddings"]) + int(config.get("type_vocab_size", 2))) * hidden
    each = _size(linears) + 4 * hidden + inner + hidden + 4 * hidden
    head = hidden * hidden + hidden + hidden * labels + labels
    total = embedded + 2 * hidden + layers * each + head
    heads = int(config["num_attention_heads"])
    return Shape(
        "bert", _TEXT, total, hidden, layers, inner, heads, 0, _positions(config), linears,
        usual=("query", "value"), head=head if config["model_type"] != "bert" else hidden * labels + labels,
        has_dropout=bool(config.get("attention_probs_dropout_prob", 0.1)),
    )  # fmt: skip


def _distilbert(config: Config) -> Shape:
    hidden, inner, layers = int(config["dim"]), int(config["hidden_dim"]), int(config["n_layers"])
    words, labels = int(config["vocab_size"]), _labels(config)
    linears = _encoder_linears(("q_lin", "k_lin", "v_lin", "out_lin"), hidden, inner)
    each = _size(linears) + 4 * hidden + inner + hidden + 4 * hidden
    head = hidden * hidden + hidden + hidden * labels + labels
    embedded = (words + int(config["max_position_embeddings"])) * hidden + 2 * hidden
    total = embedded + layers * each + head
    heads = int(config["n_heads"])
    return Shape(
        "bert", _TEXT, total, hidden, layers, inner, heads, 0, _positions(config), linears,
        head=hidden * labels + labels, has_dropout=bool(config.get("attention_dropout", 0.1)),
    )  # fmt: skip


def _encoder_linears(names: tuple[str, str, str, str], hidden: int, inner: int) -> tuple[Linear, ...]:
    own = tuple(Linear(name, hidden, hidden) for name in names)
    return (*own, Linear("intermediate", hidden, inner), Linear("output", inner, hidden))


# --- images ------------------------------------------------------------------------------------------------------


def _vit(config: Config) -> Shape:
    hidden, inner, layers = int(config["hidden_size"]), int(config["intermediate_size"]), _layers(config)
    side, patch = int(config.get("image_size", 224)), int(config.get("patch_size", 16))
    patches = (side // patch) ** 2 + 1
    linears = _encoder_linears(("query", "key", "value", "dense"), hidden, inner)
    biases = (3 * hidden) * bool(config.get("qkv_bias", True)) + hidden + inner + hidden
    channels, labels = int(config.get("num_channels", 3)), _labels(config)
    embedded = channels * patch * patch * hidden + hidden + hidden + patches * hidden
    total = embedded + layers * (_size(linears) + biases + 4 * hidden) + 2 * hidden + hidden * labels + labels
    heads = int(config["num_attention_heads"])
    return Shape("bert", _IMAGES, total, hidden, layers, inner, heads, linears=linears, patches=patches)


def _resnet(config: Config) -> Shape:
    """Parameters, and the values that its feature maps have for one image of 224 × 224."""
    sizes = [int(one) for one in config.get("hidden_sizes", (256, 512, 1024, 2048))]
    depths = [int(one) for one in config.get("depths", (3, 4, 6, 3))]
    first, is_deep = int(config.get("embedding_size", 64)), config.get("layer_type", "bottleneck") == "bottleneck"
    reduction = 4
    total = int(config.get("num_channels", 3)) * first * 49 + 2 * first
    side = 112
    kept = 2 * first * side * side  # what is normalized, and what comes after that
    side = 56
    kept += 3 * first * side * side  # the largest of each patch, and where each was, in 8 bytes
    before = first
    for stage, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        is_halved = stage > 0 or bool(config.get("downsample_in_first_stage"))
        for number in range(depth):
            halves = is_halved and number == 0
            parameters, values = _block(before, size, size // reduction if is_deep else 0, side, halves=halves)
            side = side // 2 if halves else side
            total, kept, before = total + parameters, kept + values, size
    total += sizes[-1] * _labels(config) + _labels(config)
    return Shape("resnet", _IMAGES, total, sizes[-1], sum(depths), 0, 0, pixels=kept)


def _block(before: int, after: int, inner: int, side: int, *, halves: bool) -> tuple[int, int]:
    """Parameters, and values kept for the backward pass: what each normalization gets, and each activation gives."""
    out = side // 2 if halves else side
    shortcut = before * after + 2 * after if before != after or halves else 0
    if inner:
        parameters = before * inner + 2 * inner + 9 * inner * inner + 2 * inner + inner * after + 2 * after
        values = 2 * inner * side * side + 2 * inner * out * out
    else:
        parameters = 9 * before * after + 2 * after + 9 * after * after + 2 * after
        values = 2 * after * out * out
    values += (3 if shortcut else 2) * after * out * out
    return parameters + shortcut, values


# --- helpers -----------------------------------------------------------------------------------------------------

_TEXT, _IMAGES = "text-classification", "image-classification"


def _size(linears: tuple[Linear, ...]) -> int:
    return sum(one.inputs * one.outputs for one in linears)


def _layers(config: Config) -> int:
    return int(config["num_hidden_layers"])


def _positions(config: Config) -> int:
    return int(config.get("max_position_embeddings") or 0)


def _labels(config: Config) -> int:
    named = config.get("id2label")
    return len(named) if isinstance(named, Mapping) and named else int(config.get("num_labels") or 2)


_BUILDERS: dict[str, Callable[[Config], Shape]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _bert),
    "distilbert": _distilbert,
    "vit": _vit,
    "resnet": _resnet,
}
