"""Saves and loads a run's checkpoint: one file, or a folder of parts where no rank has the complete model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UgroError, UsageError
from ugro.train import checkpoint
from ugro.train.elastic_meeting import Formed
from ugro.train.group import Content
from ugro.train.samples import Order, Progress
from ugro.train.stepping import Stepping

# --- state ------------------------------------------------------------------------------------------------------------
# The state of a rank: given up, sent to another, taken over.


# No names that a script can give.
_MODEL, _SCALER, _GRADIENTS, _TRAINED = "\0model", "\0scaler", "\0gradients", "\0trained"
MEMBERS_FILE = "members.json"


def let_go(stepping: Stepping, *, keeps_gradients: bool = False) -> None:
    """Of everything that keeps the old group: its connections are closed with the last reference, and others notice."""
    stepping.abandon()
    model = stepping.model
    if model is None:
        return
    for parameter in model.parameters():
        # Parts of the exchange buffers.
        parameter.grad = parameter.grad.clone() if keeps_gradients and parameter.grad is not None else None
    if hasattr(model, "reducer"):
        model.reducer = model.logger = model.process_group = None


def void_gradients(model: Any, scaler: Any) -> None:
    """Such that an optimizer's step changes nothing: the script takes one, whatever has happened."""
    import torch

    for parameter in model.parameters():
        parameter.grad = None
    if scaler is not None and scaler.is_enabled():
        # It refuses a step without gradients, and skips one whose gradients are not finite.
        first = next(one for one in model.parameters() if one.requires_grad)
        first.grad = torch.full_like(first, float("inf"))


def pack(file: io.BytesIO, model: Any, kept: Mapping[str, Any], scaler: Any, *, with_gradients: bool = False) -> None:
    """``with_gradients``: the rank that gets this still has to apply them, as this one has."""
    import torch

    objects = checkpoint.states(kept)
    if model is not None:
        objects[_TRAINED] = {name: one.requires_grad for name, one in checkpoint.bare(model).named_parameters()}
    if model is not None and not _is_among(model, kept):
        objects[_MODEL] = checkpoint.bare(model).state_dict()
    if scaler is not None:
        objects[_SCALER] = scaler.state_dict()
    if with_gradients:
        objects[_GRADIENTS] = [one.grad for one in model.parameters()]
    torch.save(objects, file)


def unpack(content: Content, model: Any, kept: Mapping[str, Any], *, is_all: bool) -> dict[str, Any] | None:
    """``is_all``: for a rank that joins. One that is a step behind takes what the optimizer has made of it; the rest
    of its objects, such as schedulers, its own script moves on. Returns the state of a GradScaler."""
    import torch

    objects = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    scaler: dict[str, Any] | None = objects.pop(_SCALER, None)
    # Layers that thaw between two epochs do so in scripts that were there.
    parameters = {} if model is None else dict(checkpoint.bare(model).named_parameters())
    for name, is_trained in objects.pop(_TRAINED, {}).items():
        parameters[name].requires_grad_(is_trained)
    if (gradients := objects.pop(_GRADIENTS, None)) is not None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if _MODEL in objects:
        checkpoint.bare(model).load_state_dict(objects.pop(_MODEL))
    if is_all:
        checkpoint.load(kept, objects)
        return scaler
    for name, one in kept.items():
        if isinstance(one, torch.optim.Optimizer):
            # Its own learning rate: the scheduler of this rank has not stepped yet.
            one.load_state_dict({**one.state_dict(), "state": objects[name]["state"]})
        elif model is not None and checkpoint.bare(one) is checkpoint.bare(model):
            checkpoint.bare(one).load_state_dict(objects[name])
    return scaler


def note_members(formed: Formed, ranks: list[int]) -> None:
    """In the run's folder, for its supervisor: an attempt has succeeded if these ranks have."""
    folder = os.environ.get("UGRO_RUN_DIR")
    if not folder:
        return
    noted, unfinished = Path(folder) / MEMBERS_FILE, Path(folder) / f".{MEMBERS_FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk must not end the training
        if _number_in(noted) > formed.number:  # this rank was stopped, and others of its node have gone on
            return
        unfinished.write_text(json.dumps({"number": formed.number, "ranks": ranks}))
        unfinished.rename(noted)


def _number_in(noted: Path) -> int:
    try:
        return int(json.loads(noted.read_text())["number"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return -1


def optimizers(kept: Mapping[str, Any]) -> list[Any]:
    import torch

    return [one for one in kept.values() if isinstance(one, torch.optim.Optimizer)]


def seed_apart(seed: int, rank: int, number: int) -> None:
    """The noise of a rank that joins is its own, and not that of its first process again."""
    import torch

    random.seed(hash((seed, rank, number)))
    torch.manual_seed(hash((seed, rank, number)) % 2**63)


def _is_among(model: Any, kept: Mapping[str, Any]) -> bool:
    return any(checkpoint.bare(one) is checkpoint.bare(model) for one in kept.values())


# --- saving -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    folder: Path
    step: int
    most_kept: int | None


def save(objects: Mapping[str, Any], about: Mapping[str, Any], target: Target, stepping: Stepping) -> Path | None:
    """All ranks call it; the main rank gets the path. ``about``: all that is not the script's."""
    way, group = stepping.way, stepping.group
    if way is not None and way.is_sharded:
        from ugro.train.parallel import sharded as sharded_checkpoint

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
        from ugro.train.parallel import sharded as sharded_checkpoint

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
