"""recipe.yaml, which lies beside a recipe's script: what it is for, and short names of models and datasets."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.core.errors import NotFound

MODEL_FOLDER, DATASET_FOLDER = "UGRO_FOLDER_MODEL", "UGRO_FOLDER_DATASET"  # paths of what travelled with the job


@dataclass(frozen=True, slots=True)
class Named:
    """A model or dataset: what the user calls it, and where it is: a hub id, or a path on this machine."""

    name: str
    place: str
    is_local: bool
    about: Mapping[str, Any]  # the table's entry

    @property
    def folder(self) -> Path:
        return Path(self.place)

    def about_text(self, key: str) -> str | None:
        value = self.about.get(key)
        return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Recipe:
    task: str
    models: Mapping[str, str]
    datasets: Mapping[str, Mapping[str, Any]]

    @classmethod
    def beside(cls, script: str) -> Recipe:
        import yaml

        content = yaml.safe_load(Path(script).with_name("recipe.yaml").read_text(encoding="utf-8"))
        return cls(content["task"], content.get("models", {}), content.get("datasets", {}))

    def model(self, name: str) -> Named:
        return _named(name, os.environ.get(MODEL_FOLDER), {key: {"path": hub} for key, hub in self.models.items()})

    def dataset(self, name: str) -> Named:
        return _named(name, os.environ.get(DATASET_FOLDER), self.datasets)


@dataclass(frozen=True, slots=True)
class Names:
    """What --model and --dataset mean; None with --tiny, which makes its own."""

    task: str
    model: Named | None
    dataset: Named | None

    @classmethod
    def of(cls, script: str, arguments: argparse.Namespace) -> Names:
        recipe = Recipe.beside(script)
        model = recipe.model(arguments.model) if arguments.model else None
        return cls(recipe.task, model, recipe.dataset(arguments.dataset) if arguments.dataset else None)

    @property
    def base(self) -> str | None:
        return self.model.name if self.model else None

    @property
    def data(self) -> str:
        return self.dataset.name if self.dataset else "data made by the script"


def _named(name: str, folder: str | None, known: Mapping[str, Mapping[str, Any]]) -> Named:
    by_id = next((one for one in known.values() if one.get("path") == name), {})
    if folder:  # a folder of the user's may be named like one of the table
        return Named(name, folder, True, by_id)
    about = known.get(name) or by_id
    hub_id = str(about.get("path", name))
    local = Path(name).expanduser()
    if local.exists():
        return Named(local.resolve().name, str(local), True, {})
    if name.startswith((".", "/", "~")):
        raise NotFound(f"no file or folder {name}")
    return Named(hub_id, hub_id, False, about)
