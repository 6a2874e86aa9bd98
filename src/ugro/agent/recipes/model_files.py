"""Models and data as they are named on a command line: paths of this machine, and what its caches have. Blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ugro.agent.support.caller import may_read_files
from ugro.agent.support.client_files import expect_local, remote_client
from ugro.core.errors import UsageError
from ugro.remote import foreign
from ugro.remote.folders import hub_cache

_MOST_BYTES = 1 << 20
_WEIGHTS = ".safetensors"
_NAMED_PATHS = ("./", "../", "/", "~")


def path_of(text: str, here: Path) -> Path | None:
    """None if it names something of the hub."""
    if remote_client() is not None:  # whether there is such a file is known on the client's machine alone
        if text.startswith(_NAMED_PATHS):
            expect_local(f"the folder {text}", "name a model or dataset of the hub; or run it on the master")
        return None
    path = here / os.path.expanduser(text)
    is_path = text.startswith(_NAMED_PATHS) or (may_read_files() and os.path.exists(path))
    return Path(os.path.abspath(path)) if is_path else None


def check_model(path: Path) -> None:
    """Raises UsageError for a folder that is no model."""
    try:
        names = os.listdir(path)
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file", hint="name the folder of the model, with its config.json") from error
    except OSError as error:
        hint = "--model names a folder, a hub id or a short name"
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from error
    if "adapter_config.json" in names and "config.json" not in names:
        raise UsageError(
            f"{path} is a LoRA adapter, not a model", hint="train with --merge to get a whole model, and name that"
        )
    if "config.json" not in names:
        raise UsageError(f"{path} is not a model: it has no config.json", hint="save one there: save_pretrained")
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise UsageError(f"{path} has no weights (*{_WEIGHTS})", hint="save the model there: save_pretrained")


def check_dataset(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        hint = "--dataset names a file or folder, a hub id or a short name"
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from error


def config_of(folder: Path | str | None) -> Mapping[str, Any] | None:
    """Of a model on this machine; raises UsageError if it cannot be read."""
    if folder is None:
        return None
    path = Path(folder) / "config.json"
    try:
        with path.open("rb") as file:
            found = foreign.read(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="is it a model of transformers?") from error
    return found if isinstance(found, dict) else None


def cached(kind: str, repo: str, env: Mapping[str, str]) -> str | None:
    """The folder in the cache of this machine; ``env`` says where the submitter has it, if that is here."""
    if remote_client() is not None:
        return None
    try:
        return hub_cache.find(kind, repo, env)
    except ValueError as error:
        hint = "a hub id has the form org/name"
        raise UsageError(f"{repo!r} is not a {kind} of the hub", hint=hint) from error
