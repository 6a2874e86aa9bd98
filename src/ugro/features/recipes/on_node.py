"""What is in this account's cache of Hugging Face, found by its files alone: the library need not be installed.

``<cache>/models--ORG--NAME/refs/main`` names a revision, ``snapshots/REVISION/`` has its files, as links to ``blobs/``.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Dict, Mapping, Optional

from ugro.node import foreign, worker
from ugro.node.program import Call, method
from ugro.node.runs.rundir import agent_of

KINDS = ("model", "dataset")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[0-9a-zA-Z._-]{1,100}")
_WEIGHTS = (".safetensors", ".bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MOST_BYTES = 64 << 20


def folder_of(env: Mapping[str, str]) -> str:
    """Where the library would look."""
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    chosen = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.expanduser(chosen)


@method("hub.cached")
def cached(call: Call, *, kind: str, repo: str, env: Dict[str, str]) -> None:
    """Says in which folder this account has a repository of Hugging Face, if it has."""
    agent_of(call)  # one that was replaced is refused
    there = {**os.environ, **{str(name): str(value) for name, value in env.items()}}
    worker.do(call, lambda: {"folder": find(str(kind), str(repo), there)})


def find(kind: str, repo: str, env: Mapping[str, str]) -> Optional[str]:
    """The folder with a complete copy of it; None if there is none."""
    if kind not in KINDS or not _REPO.fullmatch(repo):
        raise ValueError("no %s: %.120r" % (kind, repo))
    place = os.path.join(folder_of(env), "%ss--%s" % (kind, repo.replace("/", "--")))
    for revision in _revisions(place):
        folder = os.path.join(place, "snapshots", revision)
        if _is_complete(kind, folder):
            return folder
    return None


def _revisions(place: str) -> "list[str]":
    """That of the main branch; without one, the only one that there is."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open(os.path.join(place, "refs", "main"), encoding="ascii") as file:
            named = file.read(200).strip()
        if _REVISION.fullmatch(named) and named not in (".", ".."):
            return [named]
    with contextlib.suppress(OSError):
        found = os.listdir(os.path.join(place, "snapshots"))
        return found if len(found) == 1 else []
    return []


def _is_complete(kind: str, folder: str) -> bool:
    names = set()
    for at, _, files in os.walk(folder, followlinks=True):
        for name in files:
            path = os.path.join(at, name)
            if not os.path.exists(path):  # a link to something that was not downloaded
                return False
            names.add(os.path.relpath(path, folder))
    if kind == "dataset":
        return bool(names)
    wanted = [part for index in _INDEXES if index in names for part in _parts(os.path.join(folder, index))]
    has_weights = any(name.endswith(_WEIGHTS) for name in names)
    return "config.json" in names and has_weights and all(part in names for part in wanted)


def _parts(index: str) -> "list[str]":
    """The files that a model is divided into."""
    try:
        with open(index, "rb") as file:
            named = foreign.read(file, _MOST_BYTES)["weight_map"]
        return sorted(set(map(str, named.values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["?"]
