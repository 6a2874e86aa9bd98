"""Keeps the folders on this node within a limit: the least recently used go first, none that a run may still read."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Set

from ugro.remote.folders.place import GOING, Place, delete

RECENT_S = 300.0  # used just now: perhaps by a job that is about to start
_ABANDONED_S = 24 * 3600.0  # a transfer that nobody went on with


class Found(NamedTuple):
    tree: bytes
    size: int
    idle_s: float
    must_stay: bool


def choose(found: Sequence[Found], limit_bytes: int) -> Set[bytes]:
    """Which to remove. Pure."""
    kept = sum(one.size for one in found if one.must_stay)
    doomed: Set[bytes] = set()
    for one in sorted(found, key=lambda one: one.idle_s):
        if one.must_stay:
            continue
        if kept + one.size > limit_bytes:
            doomed.add(one.tree)
        else:
            kept += one.size
    return doomed


def tidy(place: Place, limit_bytes: int, keep: Iterable[bytes], recent_s: float = RECENT_S) -> Dict[str, Any]:
    """``keep``: those that jobs of the agent still need."""
    kept = set(keep)
    with place.locked(alone=True):
        used = place.in_use()
        found = [_found(place, tree, tree in used or tree in kept, recent_s) for tree in place.trees()]
        doomed = choose(found, limit_bytes)
        asides = [place.set_aside(place.complete(tree)) for tree in doomed]
        asides += _left(place, {place.arriving(tree) for tree in kept})
    for path in asides:
        delete(path)
    freed = sum(one.size for one in found if one.tree in doomed)
    left = sum(one.size for one in found) - freed
    return {"freed_bytes": freed, "kept_bytes": left, "trees": len(found) - len(doomed)}


def _found(place: Place, tree: bytes, is_needed: bool, recent_s: float) -> Found:
    idle_s = max(0.0, time.time() - place.used_at(tree))
    size = int((place.record(tree) or {}).get("bytes", 0))
    return Found(tree, size, idle_s, is_needed or idle_s < recent_s)


def _left(place: Place, needed: Set[str]) -> List[str]:
    """What crashes left: half deletions, and transfers that nobody went on with."""
    found = []
    for entry in list(os.scandir(place.folder)):
        if entry.name.endswith(GOING):
            found.append(entry.path)
        elif entry.name.endswith(".arriving") and entry.path not in needed and _is_abandoned(entry.path):
            found.append(place.set_aside(entry.path))
    return found


def _is_abandoned(path: str) -> bool:
    """A process that goes on with it touches its lock."""
    newest = 0.0
    for name in ("lock", "journal"):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(os.path.join(path, name)).st_mtime)
    return time.time() - newest > _ABANDONED_S
