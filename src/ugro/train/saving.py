"""Saves and loads a run's checkpoint: one file, or a folder of parts where no rank has the complete model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ugro.core.errors import UgroError, UsageError
from ugro.train import checkpoint
from ugro.train.sampler import Order, Progress
from ugro.train.stepping import Stepping


@dataclass(frozen=True, slots=True)
class Target:
    folder: Path
    step: int
    most_kept: int | None


def save(objects: Mapping[str, Any], about: Mapping[str, Any], target: Target, stepping: Stepping) -> Path | None:
    """All ranks call it; the main rank gets the path. ``about``: all that is not the script's."""
    way, group = stepping.way, stepping.group
    if way is not None and way.is_sharded:
        from ugro.train.parallel import sharded_checkpoint

        return sharded_checkpoint.save(objects, about, target, way, group)
    states = checkpoint.states(objects) if way is None else way.states(objects, group)
    if group.rank > 0:
        return None
    content = {"objects": states, **about}
    return checkpoint.write(target.folder, target.step, content, target.most_kept)


def expect_same_batch(resumed: Mapping[str, Any], global_batch: int) -> None:
    progress = resumed["progress"]
    if progress["cursor"] and progress["global_batch"] not in (None, global_batch):
        raise UsageError(
            f"the checkpoint is in the middle of an epoch with global batches of {progress['global_batch']}",
            hint="resume with the same global_batch",
        )


def load(objects: Mapping[str, Any], resumed: Mapping[str, Any], stepping: Stepping) -> None:
    """Into any number of ranks. All of them call it."""
    way = stepping.way
    if resumed["shards"] is not None:
        from ugro.train.parallel import sharded_checkpoint

        sharded_checkpoint.load(objects, resumed, way.model if way is not None else None, stepping.group)
    elif way is not None and way.is_sharded:
        raise UgroError(
            "the checkpoint was written by a training whose ranks had complete models",
            hint="resume it with parallel='ddp', or begin a new run from its weights",
        )
    else:
        checkpoint.load(objects, resumed["objects"])


def position(progress: Progress, order: Order | None) -> dict[str, Any]:
    """Where a run goes on."""
    return {
        **asdict(progress),
        "global_batch": order.global_batch if order else None,
        "is_epoch_over": order is not None and progress.cursor >= order.end,
    }
