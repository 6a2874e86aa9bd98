"""``client.recipes``: makes an ordinary launch, or sweep, of a model and a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ugro.client.jobs import Ask, body_of
from ugro.features.recipes.model import PreparedLaunch

_CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
LAUNCH = "/v1/recipes/launch"
_ANSWER_S = 180.0  # every node is asked


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to train with a recipe; without a recipe, the model says which."""

    model: str | None = None
    dataset: str | None = None
    recipe: str | None = None


class Recipes:
    """Created by ``Client``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def prepare(self, wanted: Wanted, *, fields: Mapping[str, Any] | None = None) -> PreparedLaunch:
        """The fields for ``client.jobs.submit``, or for a sweep. Of ``fields``, ``args`` are the script's words."""
        from ugro.features.recipes.trainings import catalog  # few launches have a recipe

        cache = {name: os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)}
        names = {"model": wanted.model, "dataset": wanted.dataset, "recipe": wanted.recipe}
        body = {"submit": body_of(None, fields, None), **names, "cache": cache}
        answer = self._ask("POST", LAUNCH, body, timeout_s=_ANSWER_S)["launch"]
        recipe = catalog.find(str(answer["recipe"]))
        # An agent on another machine has the recipe elsewhere: the code that is sent is this machine's.
        made = {**answer["fields"], "workdir": recipe.folder}
        words = [word for one in made.get("args", ()) for word in str(one).split("=", 1)]
        is_evaluated = ("--eval-split", "none") not in pairwise(words)
        metric = recipe.metric if is_evaluated else None
        return PreparedLaunch(made, tuple(answer["notes"]), recipe.name, metric)
