"""Lists and removes environments, and keeps them within a limit: the least recently used go first, none in use."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from ugro.features.environments.node import place as usage
from ugro.features.environments.node.place import CACHE_LOCK, Place, delete
from ugro.node.process.execute import close_all_but
from ugro.node.runs.rundir import point

# --- deleting ---------------------------------------------------------------------------------------------------------
# Deletes folders that were set aside. A large environment on a busy disk takes a minute: nobody waits for it.
#
# What is left when the deleting process is killed, too, is deleted by the next who cleans up or needs the room.


POINTS = ("env.aside",)  # where tests kill or stop the process that deletes


def delete_all(paths: List[str], wait_s: float) -> bool:
    """Whether it is over when this returns, which is after ``wait_s`` at the latest; else it goes on."""
    if not paths:
        return True
    heard, say = os.pipe()
    try:
        _begin(paths, say)
        os.close(say)
        ready, _, _ = select.select([heard], [], [], wait_s)  # its end closes the pipe
        return bool(ready)
    finally:
        os.close(heard)


def _begin(paths: List[str], say: int) -> None:
    """In a process that outlives the call, and lets go of the pipe when it is done."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                close_all_but([say])
                point("env.aside")
                for path in paths:
                    delete(path)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


# --- tidy -------------------------------------------------------------------------------------------------------------


RECENT_S = 300.0  # used just now: perhaps by a job that is about to start
_DELETE_S = 5.0  # so long is waited for what is deleted
_TOOL_S = 7 * 24 * 3600.0
_MOST_ANSWER = 400_000  # characters of packages in a list; the answer has a limit


class Found(NamedTuple):
    """``size``: what would be free without it, if all that come after it in the list were gone."""

    name: str
    size: int
    idle_s: float
    is_in_use: bool


def choose(
    found: Sequence[Found], cache_bytes: int, limit_bytes: int, unused_s: Optional[float]
) -> Tuple[Set[str], bool]:
    """Which to remove, and whether to delete the cache. ``found``: the most recently used first. Pure."""
    doomed: Set[str] = set()
    kept = sum(one.size for one in found if _must_stay(one))
    for one in found:
        if _must_stay(one):
            continue
        is_old = unused_s is not None and one.idle_s > unused_s
        if is_old or kept + one.size > limit_bytes:
            doomed.add(one.name)
        else:
            kept += one.size
    return doomed, kept + cache_bytes > limit_bytes


def _must_stay(one: Found) -> bool:
    return one.is_in_use or one.idle_s < RECENT_S


# --- listing -----------------------------------------------------------------------------------------------------


def listed(place: Place) -> List[Dict[str, Any]]:
    """The most recently used first."""
    used = usage.counts(place)
    answer, characters = [], 0
    for name in _by_use(place):
        made = place.made(name)
        if made is not None:
            characters += sum(len(text) + 4 for pair in made["packages"] for text in pair)
            if characters > _MOST_ANSWER:
                made["packages"] = []
            answer.append({"made": made, "in_use": used.get(name, 0)})
    return answer


def _by_use(place: Place) -> List[str]:
    return sorted(place.names(), key=lambda name: (-place.used_at(name), name))


# --- removing ----------------------------------------------------------------------------------------------------


def remove(place: Place, names: Iterable[str]) -> Dict[str, Any]:
    """``is_deleting``: they are gone for all who look, and not all of their space is free yet."""
    place.prepare()
    before = _free_bytes(place)
    asides: List[str] = []
    removed = [{"name": name, "problem": _take_away(place, name, asides)} for name in names]
    is_over = delete_all(asides, _DELETE_S)
    return {"removed": removed, "freed_bytes": _freed(place, before), "is_deleting": not is_over}


def _take_away(place: Place, name: str, asides: List[str]) -> Optional[str]:
    """Why it stays; None when it is out of sight, which takes one step. ``asides`` are to be deleted."""
    if name not in place.names():
        return "not-found"
    lock = place.lock(name, alone=True)
    if lock is None:  # a run has it, or somebody makes it
        return "in-use" if place.made(name) is not None else "busy"
    try:
        if usage.counts(place).get(name):
            return "in-use"
        aside = place.set_aside(name)
    finally:
        os.close(lock)
    if aside is not None:
        asides.append(aside)
    return None


def _free_bytes(place: Place) -> int:
    usage_of_disk = os.statvfs(place.folder)
    return usage_of_disk.f_bfree * usage_of_disk.f_frsize


def _freed(place: Place, before: int) -> int:
    return max(0, _free_bytes(place) - before)


# --- within a limit ----------------------------------------------------------------------------------------------


def tidy(place: Place, limit_bytes: int, unused_s: Optional[float]) -> Dict[str, Any]:
    place.prepare()
    before = _free_bytes(place)
    asides = _swept(place)
    found, cache_bytes = _measured(place)
    doomed, is_cache_doomed = choose(found, cache_bytes, limit_bytes, unused_s)
    removed = [one for one in found if one.name in doomed and _take_away(place, one.name, asides) is None]
    kept = sum(one.size for one in found) - sum(one.size for one in removed) + cache_bytes
    if is_cache_doomed and _take_cache_away(place, asides):
        kept -= cache_bytes
    is_over = delete_all(asides, _DELETE_S)
    return {
        "removed": [one.name for one in removed],
        "freed_bytes": _freed(place, before),
        "kept_bytes": max(0, kept),
        "is_deleting": not is_over,
    }


def _measured(place: Place) -> Tuple[List[Found], int]:
    """Files that several have in common count for the one that was used last; the cache comes after all."""
    used = usage.counts(place)
    seen: Set[Tuple[int, int]] = set()
    found = []
    for name in _by_use(place):
        size = _disk_bytes(place.environment(name), seen)
        idle_s = max(0.0, time.time() - place.used_at(name))
        found.append(Found(name, size, idle_s, bool(used.get(name))))
    return found, _disk_bytes(place.cache, seen)


def _disk_bytes(top: str, seen: Set[Tuple[int, int]]) -> int:
    size = 0
    for folder, _, names in os.walk(top):
        for name in names:
            with contextlib.suppress(OSError):
                one = os.lstat(os.path.join(folder, name))
                if (one.st_dev, one.st_ino) not in seen:
                    seen.add((one.st_dev, one.st_ino))
                    size += one.st_blocks * 512
    return size


def _swept(place: Place) -> List[str]:
    """What crashes left: half environments and half removals, to be deleted; installers that nobody uses are."""
    asides = place.set_asides()
    for path in place.half():
        name = os.path.basename(path).partition(".")[0]
        lock = place.lock(name, alone=True)
        if lock is not None:
            try:
                if place.is_abandoned(path):
                    asides.append(place.put_aside(path, name))
            finally:
                os.close(lock)
    for entry in list(os.scandir(place.tools)):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _TOOL_S:
                os.unlink(entry.path)
    return asides


def _take_cache_away(place: Place, asides: List[str]) -> bool:
    """Not while an environment is being made."""
    lock = place.lock(CACHE_LOCK, alone=True)
    if lock is None:
        return False
    try:
        asides.append(place.put_aside(place.cache, "cache"))
    except FileNotFoundError:
        return True
    finally:
        os.close(lock)
    return True
