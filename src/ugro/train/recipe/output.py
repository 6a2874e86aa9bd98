"""The folder ``model`` in a job's output: weights, tokenizer, ugro.json and a model card. It is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ugro.train.recipe.card import Facts, card
from ugro.train.run import Run

FORMAT = 1
FOLDER = "model"
SOURCE = "UGRO_MODEL_SOURCE"  # where the base model is on the machine that submitted the job


def write(run: Run, facts: Facts, save: Callable[[Path], None], labels: Sequence[str] | None = None) -> Path | None:
    """``save`` writes the weights. All ranks call it; the main rank writes and gets the path."""
    path = None
    if run.is_main:
        path = _write(run.surroundings.output, facts, save, labels)
    run.gather()  # no rank ends before it is there
    return path


def _write(output: Path, facts: Facts, save: Callable[[Path], None], labels: Sequence[str] | None) -> Path:
    path, unfinished = output / FOLDER, output / f".{FOLDER}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save(unfinished)
    (unfinished / "ugro.json").write_text(json.dumps(about(facts, labels), indent=2) + "\n")
    (unfinished / "README.md").write_text(card(facts), encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    return path


def about(facts: Facts, labels: Sequence[str] | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": facts.task,
        "kind": facts.kind,
        "base": None if facts.base is None else facts.base.name,
        "base_path": os.environ.get(SOURCE),
        "labels": None if labels is None else list(labels),
    }


def saver(model: Any, beside: Any, base: str | None, *, merges: bool) -> Callable[[Path], None]:
    """``beside``: a tokenizer or image processor. An adapter names its base as the user does, not a path on a node."""

    def save(folder: Path) -> None:
        whole = model
        if merges and hasattr(model, "merge_and_unload"):
            whole = model.merge_and_unload()
        for configuration in getattr(whole, "peft_config", {}).values():
            configuration.base_model_name_or_path = base
        if hasattr(whole, "generation_config"):
            whole.config.use_cache = True
        whole.save_pretrained(folder)
        if beside is not None:
            beside.save_pretrained(folder)

    return save
