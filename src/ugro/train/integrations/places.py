"""A library's own checkpoints where UGRO looks for them, so that the next attempt of a job resumes from them.

The library writes where it always does. When a checkpoint is complete, it appears in ``UGRO_CHECKPOINT_DIR`` as well,
as hard links where possible, under a name that ends in its step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ugro.core.errors import NotFound, UgroError

STATE = "ugro.json"  # what the library's checkpoint lacks: position in the data, measurements of the ranks
VERSION = 1


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
