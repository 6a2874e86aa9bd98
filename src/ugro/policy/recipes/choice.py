"""Which recipe a model needs, what its name means, and how it gets to the nodes. Pure; each refusal says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import UgroError, UsageError
from ugro.core.recipe import Recipe
from ugro.policy.recipes.shape import shape_of

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
