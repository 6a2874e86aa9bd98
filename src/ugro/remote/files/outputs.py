"""The outputs of a run: the files below its folder ``UGRO_OUTPUT``, and those of its working directory that match its
patterns and changed since it began.

If both have a file of the same name, the one in the folder is used. Links are not followed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import stat
from typing import Any, Dict, Iterator, List, Optional

from ugro.remote.files import listing
from ugro.remote.files.listing import MOST_DEPTH, RunFile
from ugro.remote.files.tail import open_below
from ugro.remote.state.rundir import AgentDir, RunDir
from ugro.remote.state.runspec import RunSpec

_KEPT = "kept"
_REMOVING = ".removing"
_TICK_NS = 10_000_000  # the kernel's clock for files may be behind by that much
_SECOND_NS = 1_000_000_000  # some file systems store whole seconds only


class Outputs:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        spec = (run.envelope() or {}).get("spec") or {}
        self._patterns = [str(pattern) for pattern in spec.get("outputs") or ()]
        self._folder = os.fsencode(run.file("output"))
        self._cwd = os.fsencode(run.file("work"))
        if self._patterns:
            self._cwd = RunSpec(spec).cwd or self._cwd

    def has_any(self) -> bool:
        return bool(self._patterns) or self._run.has_written()

    def files(self) -> Iterator[RunFile]:
        seen = set()
        for file in self._in_both():
            if not file.is_folder and file.name not in seen:
                seen.add(file.name)
                yield file

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        for folder in (self._folder, self._cwd) if self._patterns else (self._folder,):
            with contextlib.suppress(FileNotFoundError):
                fd = open_below(os.fsdecode(folder), listing.parts_of(name))
                if fd is not None:
                    return fd
        return None

    def keep(self, names: List[bytes]) -> str:
        """Moves files out of the run's folder before it is removed. Files in a folder of the user stay there."""
        kept = os.path.join(self._run.agent.path, _KEPT, self._run.name)
        ours = os.fsencode(self._run.path) + b"/"
        roots = [root for root in (self._folder, self._cwd) if root.startswith(ours)]
        for name in names:
            target = os.path.join(os.fsencode(kept), name)
            for root in roots:
                if stat.S_ISREG(_mode(os.path.join(root, name))):
                    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                    os.rename(os.path.join(root, name), target)
                    break
        return kept

    def _in_both(self) -> Iterator[RunFile]:
        yield from listing.below(self._folder)
        if self._patterns:
            since_ns = self._began_ns()
            for pattern in self._patterns:
                for name in _matches(self._cwd, b"", pattern.split("/")):
                    for file in _file_or_below(self._cwd, name):
                        if _is_since(file.changed_ns, since_ns):
                            yield file

    def _began_ns(self) -> int:
        state = self._run.state() or {}
        return int(float(state.get("started_at") or 0) * 1e9)


def forget_kept(agent: AgentDir, job: str) -> Dict[str, Any]:
    """Deletes the files that ``keep`` moved, of all attempts at the job."""
    folder = os.path.join(agent.path, _KEPT)
    names: List[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for name in names:
        if name.rpartition(".")[0] == job or name.endswith(_REMOVING):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return {}


def _is_since(changed_ns: int, since_ns: int) -> bool:
    return changed_ns >= since_ns - (_TICK_NS if changed_ns % _SECOND_NS else _SECOND_NS)


def _file_or_below(root: bytes, name: bytes) -> Iterator[RunFile]:
    path = os.path.join(root, name)
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            yield from listing.below(path, name + b"/", name.count(b"/"))
        else:
            yield listing.described(name, status)


def _matches(root: bytes, name: bytes, parts: List[str], depth: int = 0) -> Iterator[bytes]:
    """Names below ``root`` that match the pattern; ``**`` is any number of folders. Follows no links."""
    if not parts:
        if name:
            yield name
        return
    folder = os.path.join(root, name)
    if depth > MOST_DEPTH or not stat.S_ISDIR(_mode(folder) if name else os.stat(folder).st_mode):
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matches(root, name, rest, depth + 1)
    for one in _names(folder):
        inner = name + b"/" + one if name else one
        if first == "**" and stat.S_ISDIR(_mode(os.path.join(root, inner))):
            yield from _matches(root, inner, parts, depth + 1)
        elif first != "**" and _fits(one, first):
            yield from _matches(root, inner, rest, depth + 1)


def _names(folder: bytes) -> List[bytes]:
    """What cannot be read is skipped: programs change their folders at any time."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _fits(name: bytes, pattern: str) -> bool:
    """As in a shell: a leading dot is matched only by a dot."""
    if name.startswith(b".") and not pattern.startswith("."):
        return False
    return fnmatch.fnmatchcase(listing.text(name), pattern)


def _mode(path: bytes) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mode
    return 0
