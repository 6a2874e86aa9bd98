"""The runs of an experiment, as a sweep: models, ways to train them, and seeds. Pure: a wish in, a sweep file out.

The seed varies slowest: after the first part of the time there is one run of everything, and a machine that gets slower
in the course of hours does not favour the first variants.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ugro.kernel.support.errors import ConfigError, Unsatisfiable, UsageError

SIZES = ("tiny", "small", "full")
MODES: Mapping[str, Mapping[str, str]] = {
    "uniform": {"balance": "off"},
    "static": {"balance": "static"},
    "adaptive": {"balance": "adaptive"},
    "local": {},  # the option that means it is found in the schema of jobs
}
LOCAL = "local"
UNIFORM = "uniform"
PRECISIONS = ("fp32", "bf16")
NO_COMPRESSION = "none"
MOST_RUNS = 1000
_MOST_SEEDS = 100
_ROUNDS_S = {"tiny": "1", "small": "5"}  # a run has several rounds; else the training's default
_PARAMETERS = ("seed", "model", "variant")


@dataclass(frozen=True, slots=True)
class Model:
    script: str
    sizes: Mapping[str, str]  # the words after the script, without the number of epochs
    epochs: Mapping[str, int]


MODELS: Mapping[str, Model] = {
    "gpt": Model(
        "train_gpt.py",
        {
            "tiny": "--layers 4 --width 128 --heads 4 --context 32 --global-batch 96 --sentences 1000 --lr 2e-3",
            "small": "--layers 6 --width 256 --heads 8 --context 128 --global-batch 96 --sentences 8000 --lr 1e-3",
            "full": "--layers 6 --width 384 --heads 6 --context 256 --global-batch 64 --sentences 100000",
        },
        {"tiny": 2, "small": 2, "full": 1},
    ),
    "bert": Model(
        "train_bert.py",
        {
            "tiny": "--layers 3 --width 128 --heads 4 --length 32 --global-batch 96 --sentences 12000 --lr 1e-3 "
            "--warm-up 10",
            "small": "--layers 6 --width 256 --heads 4 --length 64 --global-batch 96 --sentences 40000 --lr 5e-4 "
            "--warm-up 50",
            "full": "--sentences 400000",
        },
        {"tiny": 2, "small": 2, "full": 1},
    ),
    "resnet50": Model(
        "train_resnet50.py",
        {
            "tiny": "--blocks 1 1 1 1 --width 16 --size 32 --global-batch 96 --samples 2304 --lr 0.05",
            "small": "--blocks 3 4 6 3 --width 16 --size 64 --global-batch 96 --samples 4608 --lr 0.05",
            "full": "--global-batch 96 --samples 20000 --lr 0.05",
        },
        {"tiny": 2, "small": 2, "full": 1},
    ),
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What to compare. Every combination is run, with every seed, as far as it makes sense."""

    models: Sequence[str] = ("gpt", "bert", "resnet50")
    modes: Sequence[str] = ("uniform", "static", "adaptive")
    seeds: int = 3
    size: str = "tiny"
    epochs: int | None = None  # None: as the size says
    precision: Sequence[str] = ("fp32",)
    accumulate: Sequence[int] = (1,)
    compress: Sequence[str] = (NO_COMPRESSION,)
    staleness: Sequence[int] = ()  # of ``local``; empty: as the training does by default


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this version can do beyond what it always could."""

    local: Mapping[str, Any] | None = None  # the options of a job that mean local updates
    staleness: str | None = None  # the variable of a training that limits it
    round_s: str | None = None  # the variable that says how long ranks train alone
    compress: Sequence[str] | None = None  # kinds of compression; None: the training has no such option


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train: a mode, and what else differs from the usual."""

    mode: str
    precision: str = "fp32"
    accumulate: int = 1
    compress: str = NO_COMPRESSION
    staleness: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        parts = [
            self.mode,
            *([f"staleness {self.staleness}"] if self.staleness is not None else []),
            *([self.precision] if self.precision != "fp32" else []),
            *([f"accumulate {self.accumulate}"] if self.accumulate != 1 else []),
            *([f"{self.compress} gradients"] if self.compress != NO_COMPRESSION else []),
        ]
        return ", ".join(parts)


def document(wish: Wish, abilities: Abilities, job: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep in the format of its file. ``job``: options of all its jobs, such as the number of nodes.

    Raises UsageError for what is not known, and Unsatisfiable for what this version cannot do.
    """
    _check(wish)
    made = list(variants(wish, abilities))
    if (count := len(made) * len(wish.models) * wish.seeds) > MOST_RUNS:
        raise UsageError(f"that makes {count} runs", hint=f"at most {MOST_RUNS}: leave out models, modes or ablations")
    models = {name: _model(MODELS[name], wish) for name in wish.models}
    values = (list(range(1, wish.seeds + 1)), list(models), [one.label for one in made])
    return {
        "program": MODELS[wish.models[0]].script,
        "method": "grid",
        "parameters": {name: {"values": value} for name, value in zip(_PARAMETERS, values, strict=True)},
        "ugro": {
            "max_parallel": 1,
            "nodes": "all",  # on one node there would be nothing to compare
            **job,
            "options": {"model": models, "variant": {one.label: dict(one.options) for one in made}},
        },
    }


def variants(wish: Wish, abilities: Abilities) -> Iterator[Variant]:
    for mode in wish.modes:
        # Local updates exchange weights and not gradients; only they can be stale.
        compress = [NO_COMPRESSION] if mode == LOCAL else wish.compress
        stale: Sequence[int | None] = (wish.staleness or [None]) if mode == LOCAL else [None]
        for one in itertools.product(wish.precision, wish.accumulate, compress, stale):
            made = Variant(mode, *one)
            args = _args(made, abilities)
            yield replace(made, options=_mode(made, wish.size, abilities) | ({"args": args} if args else {}))


def parts_of(found: Mapping[str, Any]) -> tuple[list[str], list[str], list[int]] | None:
    """Models, variants and seeds of a sweep's document; None if it is no experiment."""
    parameters, options = found.get("parameters", {}), found.get("ugro", {}).get("options", {})
    if not set(_PARAMETERS) <= set(parameters) or not {"model", "variant"} <= set(options):
        return None
    seeds, models, labels = ([*parameters[name].get("values", ())] for name in _PARAMETERS)
    return [str(one) for one in models], [str(one) for one in labels], [int(one) for one in seeds]


def baseline(label: str, labels: Iterable[str]) -> str | None:
    """What a variant is compared with: equal shares, everything else being the same; else equal shares alone."""
    known = list(labels)
    _, comma, rest = label.partition(", ")
    for wanted in (f"{UNIFORM}{comma}{rest}", UNIFORM):
        if wanted in known:
            return wanted
    return None


def _model(model: Model, wish: Wish) -> dict[str, Any]:
    epochs = wish.epochs or model.epochs[wish.size]
    return {"script": model.script, "args": [*model.sizes[wish.size].split(), "--epochs", str(epochs)]}


def _mode(variant: Variant, size: str, abilities: Abilities) -> dict[str, Any]:
    if variant.mode != LOCAL:
        return dict(MODES[variant.mode])
    if abilities.local is None:
        raise Unsatisfiable("this version of UGRO has no local updates", hint="leave local out of --modes")
    if variant.staleness is not None and abilities.staleness is None:
        raise Unsatisfiable("trainings of this version have no limit of staleness", hint="leave --staleness out")
    env = {abilities.round_s: _ROUNDS_S[size]} if abilities.round_s and size in _ROUNDS_S else {}
    if variant.staleness is not None and abilities.staleness is not None:
        env[abilities.staleness] = str(variant.staleness)
    return {**abilities.local, **({"env": env} if env else {})}


def _args(variant: Variant, abilities: Abilities) -> list[str]:
    """Flags of the script, for what is not the default."""
    args = ["--precision", variant.precision] if variant.precision != "fp32" else []
    args += ["--accumulate", str(variant.accumulate)] if variant.accumulate != 1 else []
    if variant.compress != NO_COMPRESSION:
        args += ["--compress", _compression(variant.compress, abilities)]
    return args


def _compression(kind: str, abilities: Abilities) -> str:
    if abilities.compress is None:
        raise Unsatisfiable("this version of UGRO compresses no gradients", hint="leave --compress out")
    if kind not in abilities.compress:
        known = ", ".join((NO_COMPRESSION, *abilities.compress))
        raise UsageError(f"unknown compression {kind!r}", hint=f"there is: {known}")
    return kind


def _check(wish: Wish) -> None:
    _expect_known("model", wish.models, MODELS)
    _expect_known("mode", wish.modes, MODES)
    _expect_known("precision", wish.precision, PRECISIONS)
    _expect_known("size", [wish.size], SIZES)
    if not 1 <= wish.seeds <= _MOST_SEEDS:
        raise UsageError(f"{wish.seeds} seeds", hint=f"from 1 to {_MOST_SEEDS}")
    for name, numbers, least in (("accumulate", wish.accumulate, 1), ("staleness", wish.staleness, 0)):
        if wrong := [number for number in numbers if number < least]:
            raise UsageError(f"--{name}: {wrong[0]} is less than {least}")
    if wish.staleness and LOCAL not in wish.modes:
        raise UsageError("only local updates can be stale", hint="add local to --modes, or leave --staleness out")
    for name in ("models", "modes", "precision", "accumulate", "compress", "staleness"):
        given = list(getattr(wish, name))
        if len(set(given)) < len(given):
            raise UsageError(f"--{name} names something twice: {', '.join(map(str, given))}")


def _expect_known(what: str, given: Sequence[str], known: Iterable[str]) -> None:
    names = list(known)
    if not given:
        raise UsageError(f"no {what} is named", hint=f"there is: {', '.join(names)}")
    for one in given:
        if one not in names:
            near = difflib.get_close_matches(one, names, n=1) if len(one) <= 100 else []
            hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(names)}"
            raise UsageError(f"unknown {what} {one!r:.60}", hint=hint)


def expect_experiment(name: str, found: Mapping[str, Any]) -> tuple[list[str], list[str], list[int]]:
    parts = parts_of(found)
    if parts is None:
        raise ConfigError(f"{name} is no experiment", hint="see: ugro experiment ls; of a sweep: ugro sweep report")
    return parts
