"""Checkpoints of a run: one file each, complete or absent, written by one rank and read by all.

A file holds the objects of the script, the progress of the run, the balancer's measurements, and the random
generators of every rank. Of a model that no rank has completely, a checkpoint is a folder: ``run.pt`` is that file, and
beside it are the parts of the model and of its optimizers (``parallel.sharded``).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import NotFound, UgroError

VERSION = 1
HEAD = "run.pt"
_NAME = re.compile(r"step_(\d+)(?:\.pt)?")


def write(folder: Path, step: int, content: Mapping[str, Any], most_kept: int | None) -> Path:
    """Written under another name until it is on disk, so that a partial file is never used."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:09}.pt"
    unfinished = folder / f".{path.name}.tmp"
    write_file(unfinished, content)
    unfinished.rename(path)
    sync(folder)
    prune(folder, most_kept)
    return path


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    import torch

    with path.open("wb") as file:
        torch.save({"version": VERSION, **content}, file)
        file.flush()
        os.fsync(file.fileno())


def prune(folder: Path, most_kept: int | None) -> None:
    if most_kept is None:
        return
    for _, old in _numbered(folder)[:-most_kept]:
        if old.is_dir():
            remove(old)
        else:
            old.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Not a checkpoint any more before the first file of it is gone."""
    if not folder.exists():
        return
    leaving = folder.with_name(f".{folder.name}.removing")
    shutil.rmtree(leaving, ignore_errors=True)
    folder.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def read(place: Path) -> dict[str, Any]:
    """Loads a file, or the newest in a folder. Only numbers, texts and tensors are loaded, never code.

    Of a checkpoint that is a folder, ``shards`` is that folder.
    """
    import torch

    found = _newest(place)
    path = found / HEAD if found.is_dir() else found
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise UgroError(f"{path} is not a checkpoint written by run.checkpoint()", hint="load your own in your script")
    return {**content, "shards": found if found.is_dir() else None}


def _newest(place: Path) -> Path:
    if place.is_file() or (place / HEAD).is_file():
        return place
    found = _numbered(place) if place.is_dir() else []
    if not found:
        raise NotFound(f"no checkpoint in {place}")
    return found[-1][1]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found if path.suffix or (path / HEAD).is_file())


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the script's objects ---------------------------------------------------------------------------------------


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bare(one).state_dict() for name, one in objects.items()}


def load(objects: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    for name, one in objects.items():
        if name not in content:
            raise UgroError(f"the checkpoint has no {name!r}", hint=f"it has: {', '.join(content) or 'nothing'}")
        bare(one).load_state_dict(content[name])


def bare(model: Any) -> Any:
    """The unwrapped model, so that a checkpoint fits any number of ranks."""
    return model.module if hasattr(model, "no_sync") and hasattr(model, "module") else model


# --- random generators ------------------------------------------------------------------------------------------


def random_state() -> bytes:
    import torch

    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    state = {"python": random.getstate(), "torch": bytes(torch.get_rng_state().tolist()).hex(), "cuda": cuda}
    return json.dumps(state).encode()


def set_random_state(content: bytes) -> None:
    import torch

    state = json.loads(content)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


# --- places -----------------------------------------------------------------------------------------------------------
# A library's own checkpoints where UGRO looks for them, so that the next attempt of a job resumes from them.
#
# The library writes where it always does. When a checkpoint is complete, it appears in ``UGRO_CHECKPOINT_DIR`` as well,
# as hard links where possible, under a name that ends in its step.


STATE = "ugro.json"  # what the library's checkpoint lacks: position in the data, measurements of the ranks


def publish(written: Path, name: str, most_kept: int | None, env: Mapping[str, str] = os.environ) -> Path | None:
    """Called by one rank. None outside UGRO, or if it was written there in the first place."""
    if not (place := env.get("UGRO_CHECKPOINT_DIR")):
        return None
    folder = Path(place).absolute()
    if folder in (written.absolute().parent, *written.absolute().parent.parents):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}.partial"
    _remove(unfinished)
    if written.is_dir():
        shutil.copytree(written, unfinished, copy_function=_linked)
    else:
        _linked(str(written), str(unfinished))
    _remove(folder / name)  # of an earlier attempt, which got as far
    unfinished.rename(folder / name)
    for old in numbered(folder, name)[: -most_kept if most_kept else 0]:
        _remove(old)
    return folder / name


def resumable(mark: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """The checkpoint to resume from, in which there is a file whose name matches ``mark``; None if there is nothing."""
    if not (place := env.get("UGRO_RESUME_DIR")):
        return None
    found = sorted(Path(place).glob(mark))
    if not found:
        raise NotFound(
            f"{place} is not a checkpoint of this library: it has no {mark}",
            hint="a job resumes from what its own script wrote; launch it without --resume",
        )
    return found[-1]


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    unfinished = folder / f".{STATE}.tmp"
    unfinished.write_text(json.dumps({"version": VERSION, **state}), encoding="utf-8")
    unfinished.rename(folder / STATE)


def read_state(folder: Path) -> dict[str, Any] | None:
    """None for a checkpoint that was written without UGRO."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return checked(found, folder / STATE)


def checked(state: Any, where: object) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise UgroError(f"{where} was not written by this version of UGRO", hint="resume with the one that did")
    return state


def numbered(folder: Path, name: str) -> list[Path]:
    """Those that are named like it, the oldest first."""
    parts = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
    if parts is None:
        return []
    alike = re.compile(re.escape(parts[1]) + r"(\d+)" + re.escape(parts[3]))
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := alike.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return target


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
