"""Finds the model that a service serves: in the results of a job, or in a folder of this machine. Blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.agent.support.caller import may_read_files
from ugro.core.errors import ConfigError, NotAllowed, NotFound
from ugro.core.results import JobResults, ResultState
from ugro.remote import foreign

ABOUT = "ugro.json"  # what recipes write beside a model
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_MARKS = (ABOUT, _CONFIG, _ADAPTER)
_DEEPEST = 4
_MOST_FOLDERS = 20_000
_MOST_SHOWN = 5
_LARGEST_ABOUT = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    base: Path | None = None  # of an adapter, if it is a folder of this machine
    base_name: str | None = None  # what its nodes have, or download
    is_adapter: bool = False


def in_results(output: Path, wanted: str | None, job: int) -> ModelFolder:
    """``wanted``: its folder among the results, if the user says which."""
    hint = f"what it has made: ugro results {job}"
    if wanted is not None:
        found = (output / wanted).resolve()
        if not found.is_relative_to(output.resolve()) or not found.exists():
            raise NotFound(f"job {job} has no {wanted} among its results", hint=hint)
        return described(found)
    models = sorted(_models(output), key=lambda path: (len(path.parts), path))
    own = [path for path in models if (path / ABOUT).is_file()] or models
    if not own:
        text = f"job {job} has made no model: no folder with {ABOUT} or {_CONFIG} is among its results"
        raise NotFound(text, hint=f"{hint}; name the folder: --path FOLDER, or give a command: ugro serve -- CMD")
    if len(own) > 1 and (output / "model") not in own:
        names = ", ".join(str(path.relative_to(output)) for path in own[:_MOST_SHOWN])
        raise ConfigError(f"job {job} has {len(own)} models: {names}", hint="say which: --path FOLDER")
    return described(output / "model" if (output / "model") in own else own[0])


def expect_complete(made: JobResults, folder: str, *, is_final: bool) -> None:
    """``folder``: of the model, among the results. Raises NotAllowed if files of it are not here."""
    left = [(file, node.node) for node in made.nodes for file in node.left if _is_in(folder, file.name)]
    if left:
        file, node = left[0]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        text = f"job {made.job}: {file.name}{more} stayed on {node}: {file.reason}"
        raise NotAllowed(text, hint=f"get it: ugro results {made.job} --fetch")
    if is_final and made.state in (ResultState.COMING, ResultState.WAITING, ResultState.UNKNOWN):
        problem = next((f": {node.problem}" for node in made.nodes if node.problem), "")
        text = f"the results of job {made.job} are not complete yet{problem}"
        raise NotAllowed(text, hint=f"see: ugro results {made.job}")


def _is_in(folder: str, name: str) -> bool:
    return folder == "." or name == folder or name.startswith(f"{folder}/")


def described(folder: Path) -> ModelFolder:
    """With the base model of an adapter, if that is known to be a folder of this machine."""
    about = _read(folder / ABOUT) if folder.is_dir() else {}
    base, source = about.get("base"), about.get("base_path")
    if about.get("kind") != "lora":
        return ModelFolder(folder)
    # For others not even looked at: what is said of it would tell which files there are.
    if isinstance(source, str) and may_read_files() and _is_model(Path(source).expanduser()):
        return ModelFolder(folder, base=Path(source).expanduser(), is_adapter=True)
    if not base:
        hint = "train it again, or write the name of its base model into ugro.json"
        raise ConfigError(f"{folder / ABOUT}: the base model of this adapter is not known", hint=hint)
    return ModelFolder(folder, base_name=str(base), is_adapter=True)


def _is_model(folder: Path) -> bool:
    """A node may have written the name of any folder here, and would be sent what is in it."""
    return folder.is_dir() and isinstance(_read(folder / _CONFIG).get("model_type"), str)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = foreign.read(file, _LARGEST_ABOUT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        hint = "train the model again, or remove the file"
        raise ConfigError(f"{path} cannot be read: {error}", hint=hint) from error
    return found if isinstance(found, dict) else {}


def _models(top: Path) -> Iterator[Path]:
    for count, (folder, inner, files) in enumerate(os.walk(top)):
        path = Path(folder)
        if count > _MOST_FOLDERS:
            return
        if len(path.relative_to(top).parts) >= _DEEPEST:
            inner.clear()
        if any(mark in files for mark in _MARKS):
            yield path
            inner.clear()
