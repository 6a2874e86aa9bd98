"""Finds the cluster file of a command. The agent reads it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ugro.core.errors import ConfigError, NotAllowed, Unallowed
from ugro.core.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    path: Path | None  # None: there is no file
    is_asked_for: bool = False  # by an option, the environment, a lab or the folder, not as the user's default
    is_found: bool = False  # in a folder, not named: it may be somebody else's, and must be allowed


def find_cluster_file(explicit: Path | None, env: Mapping[str, str], cwd: Path, home: StateDir) -> ClusterFile:
    """The file that was asked for, which must exist; else that of a lab that is up; else the nearest."""
    if explicit is not None:
        return _existing(cwd / explicit.expanduser(), "check the path given with --cluster, or write one: ugro init")
    if named := env.get(CLUSTER_VARIABLE):
        return _existing(cwd / Path(named).expanduser(), f"check the variable {CLUSTER_VARIABLE}, or unset it")
    # A broken link is found too, and reported: using another cluster would surprise the user.
    if os.path.lexists(home.lab_cluster):
        return ClusterFile(home.lab_cluster, is_asked_for=True)
    return nearest_cluster_file(env, cwd, home)


def nearest_cluster_file(env: Mapping[str, str], cwd: Path, home: StateDir) -> ClusterFile:
    """That of the folder or one above it, or the user's.

    Raises NotAllowed if the folder's file may be another user's work: a cluster file names commands to run here.
    """
    of_user = home.path / CLUSTER_FILE
    for folder in upwards(cwd, Path(env.get("HOME") or "/")):
        path = folder / CLUSTER_FILE
        if path != of_user and os.path.lexists(path):
            _check_owner(path, is_above=folder != cwd)
            return ClusterFile(path, is_asked_for=True, is_found=True)
    return ClusterFile(of_user if os.path.lexists(of_user) else None)


def when_allowed(act: Callable[[], _Answer], home: StateDir, ask: Callable[[Unallowed], bool] | None) -> _Answer:
    """Asks the user about a cluster file that is not allowed yet, and tries again."""
    while True:
        try:
            return act()
        except Unallowed as error:
            if ask is None or not ask(error):
                raise
            from ugro.client.allowances import allow  # reads configurations: most commands do without

            allow(home, error)


def _existing(path: Path, hint: str) -> ClusterFile:
    try:
        is_there = path.exists()
    except ValueError:  # a path with a NUL in it
        is_there = False
    if not is_there:
        raise ConfigError(f"{path}: no such cluster file", hint=hint)
    return ClusterFile(path, is_asked_for=True)


def upwards(cwd: Path, user_home: Path) -> Iterator[Path]:
    """The folder and those above it: as far as the user's home folder, or as the file system goes."""
    last = _identity(user_home)
    first = _identity(cwd)
    for folder in (cwd, *cwd.parents):
        here = _identity(folder)
        if here is None or first is None or here[0] != first[0]:
            return
        yield folder
        if here == last:
            return


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_owner(path: Path, *, is_above: bool) -> None:
    try:
        found = path.lstat(), path.stat()
        folder = path.parent.stat()
    except OSError:  # a broken link: the agent reports it
        return
    if (problem := why_untrusted(found, folder, os.geteuid(), is_above=is_above)) is not None:
        raise NotAllowed(
            f"{path} is not used: {problem}",
            hint=f"if you trust it: {CLUSTER_VARIABLE}={path}; or name another file: ugro --cluster FILE …",
        )


def why_untrusted(
    found: tuple[os.stat_result, ...], folder: os.stat_result, user: int, *, is_above: bool
) -> str | None:
    """Why a file that was found, not named, is not used. ``found``: the file itself, and the link that leads to it.

    In the current folder the owner decides, as some file systems let everybody write everything.
    """
    if any(one.st_uid not in (user, 0) for one in found):
        return "it belongs to another user"
    writable = [one for one in (*found, folder) if one.st_mode & stat.S_IWOTH and not stat.S_ISLNK(one.st_mode)]
    return "every user can change it or its folder" if is_above and writable else None
