"""The exact shape of a model, from its ``config.json``; which recipe it takes; and the flags of its training.

Architectures that are not known here have no shape: then nothing is claimed about their memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.features.recipes.model import Flag, Recipe
from ugro.kernel.support.errors import UgroError, UsageError

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


# --- choice -----------------------------------------------------------------------------------------------------------
# Which recipe a model needs, what its name means, and how it gets to the nodes. Pure; each refusal says what to do.


_TASKS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForSequenceClassification": "text-classification",
    "ForMaskedLM": "text-classification",
    "ForPreTraining": "text-classification",
    "ForImageClassification": "image-classification",
}
_GATED = ("meta-llama/", "google/gemma")
_LEFT = "--recipe NAME chooses one; see: ugro recipe ls"


def hub_id(recipes: Sequence[Recipe], model: str) -> str:
    """What a name that is no path means. Raises UsageError for one that nobody knows."""
    for recipe in recipes:
        if model in recipe.models:
            return recipe.models[model]
    if "/" in model:
        return model
    names = sorted({name for recipe in recipes for name in recipe.models})
    near = difflib.get_close_matches(model, names, n=1, cutoff=0.5)
    other = "a hub id such as org/name, or a folder such as ./model"
    hint = f"did you mean {near[0]}? Or give {other}" if near else f"give {other}; see: ugro recipe ls"
    raise UsageError(f"unknown model {model!r}", hint=hint)


def dataset_id(recipe: Recipe, dataset: str) -> str:
    if dataset in recipe.datasets:
        return str(recipe.datasets[dataset]["path"])
    if "/" in dataset:
        return dataset
    near = difflib.get_close_matches(dataset, sorted(recipe.datasets), n=1, cutoff=0.5)
    other = "a hub id such as org/name, or a file such as ./text.txt"
    known = f"did you mean {near[0]}?" if near else f"{recipe.name} knows {', '.join(recipe.datasets)};"
    raise UsageError(f"unknown dataset {dataset!r}", hint=f"{known} Or give {other}" if near else f"{known} or {other}")


def choose(
    recipes: Sequence[Recipe], model: str | None, dataset: str | None, config: Mapping[str, Any] | None
) -> Recipe:
    """By the model's own configuration, else by the names that the recipes know."""
    task = _task(config) if config is not None else None
    if task is not None:
        return next(one for one in recipes if one.task == task)
    for recipe in recipes:
        if model is not None and (model in recipe.models or model in recipe.models.values()):
            return recipe
    known = [one for one in recipes if dataset is not None and dataset in one.datasets]
    if len(known) == 1:
        return known[0]
    raise UsageError(f"which recipe trains {model or 'it'}?", hint=_LEFT)


def _task(config: Mapping[str, Any]) -> str | None:
    for name in config.get("architectures") or ():
        found = next((task for ending, task in _TASKS.items() if str(name).endswith(ending)), None)
        if found is not None:
            return found
    shape = shape_of(config)
    return shape.task if shape is not None else None


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Who has a model or a dataset of the hub."""

    kind: str  # model or dataset
    repo: str
    here: str | None  # its folder on this machine
    nodes: Mapping[str, bool]  # whether the node has it in its cache; of those that could be asked
    reaches: Mapping[str, bool]  # of nodes that lack it: whether they reach the hub
    has_token: bool = False

    @property
    def lacking(self) -> list[str]:
        return [node for node, has in self.nodes.items() if not has]


def travel(about: Whereabouts) -> tuple[str | None, str]:
    """The folder that goes with the job, if one does, and a sentence about it. Raises UgroError if nobody gets it."""
    lacking = about.lacking
    if not about.nodes:
        return about.here, f"{about.kind} {about.repo}: no node could be asked whether it has it"
    if not lacking:
        return None, f"{about.kind} {about.repo}: in the cache of every node"
    if about.here is not None:
        return about.here, f"{about.kind} {about.repo}: sent from the cache of this machine to nodes that lack it"
    get = f"hf download {'--repo-type dataset ' if about.kind == 'dataset' else ''}{about.repo}"
    cut_off = [node for node in lacking if not about.reaches.get(node)]
    if cut_off:
        others = [node for node in about.nodes if node not in cut_off]
        only = "".join(f" --only {node}" for node in others)
        other = f"; or use the nodes that have it, or reach the hub:{only}" if others else ""
        raise UgroError(
            f"{about.kind} {about.repo} is not in the cache of {_listed(cut_off)}, nor of this machine, and the hub is "
            f"not reached from there",
            hint=f"get it on this machine, and it is sent: {get}{other}",
        )
    if about.repo.startswith(_GATED) and not about.has_token:
        raise UgroError(
            f"{about.kind} {about.repo} is gated: the hub gives it to those who accepted its licence",
            hint=f"accept it at https://huggingface.co/{about.repo}, then pass your token: --env HF_TOKEN; "
            f"or get it here, and it is sent: {get}",
        )
    return None, f"{about.kind} {about.repo}: {_listed(lacking)} will download it"


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 3 else f"{', '.join(nodes[:2])} and {len(nodes) - 2} more"


# --- flags ------------------------------------------------------------------------------------------------------------
# The words for a recipe's script, compared with the flags that it has, before anything is started. Pure.


def check_flags(recipe: Recipe, words: Sequence[str]) -> None:
    """Raises UsageError for one that it does not have. What a value means is the script's own matter."""
    known = {name: flag for flag in recipe.flags for name in (flag.name, *flag.also)}
    rest = list(words)
    while rest:
        name, equals, _ = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UsageError(f"{name!r:.80} is not an option of recipe {recipe.name}", hint=_see(recipe))
        flag = known.get(name.replace("_", "-"))
        if flag is None:
            raise UsageError(f"recipe {recipe.name} has no option {name:.80}", hint=_hint(recipe, name, list(known)))
        if not equals and not _is_switch(flag):
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"{name} needs a value", hint=f"{flag.name}: {flag.help}")
            rest.pop(0)


def _is_switch(flag: Flag) -> bool:
    return isinstance(flag.default, bool)


def _hint(recipe: Recipe, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"did you mean {near[0]}?" if near else _see(recipe)


def _see(recipe: Recipe) -> str:
    return f"its options: ugro recipe show {recipe.name}"
