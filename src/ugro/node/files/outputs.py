"""The outputs of a run: the files below its folder ``UGRO_OUTPUT``, those of its working directory that match its
patterns and changed since it began, and everything that it made in a working directory of ours.

If both have a file of the same name, the one in the folder is used. Links are not followed. What is not fetched is
kept: it leaves the run's folder before that is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
from typing import Any, AnyStr, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from ugro.node import durable
from ugro.node.files import listing
from ugro.node.files.listing import MOST_DEPTH, MOST_FILES, RunFile
from ugro.node.files.workdir import WorkDir
from ugro.node.globs import Glob
from ugro.node.runs.logs import open_below
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.runspec import RunSpec

# --- aside ------------------------------------------------------------------------------------------------------------
# Files that are linked, set aside and deleted: a name is given or taken in one step, the rest may take its time.


ARRIVING = ".arriving."
REMOVING = ".removing."


def link(path: bytes, target: bytes) -> None:
    os.link(path, target, follow_symlinks=False)


def link_or_copy(path: bytes, target: bytes) -> None:
    try:
        link(path, target)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)


def link_all(path: str, root: str, place: Callable[[bytes, bytes], None] = link) -> None:
    """A new folder with hard links to the files of a folder, or to the one file."""
    os.mkdir(root, 0o700)
    base = path if os.path.isdir(path) else os.path.dirname(path)
    for file in listing.files_of(path):
        target = os.path.join(os.fsencode(root), file.name)
        if file.is_folder:
            os.mkdir(target, 0o700)
        else:
            place(os.path.join(os.fsencode(base), file.name), target)


def move(path: AnyStr, target: AnyStr) -> None:
    """A folder that forbids it is opened: its user made it, and we are that user."""
    try:
        os.rename(path, target)
    except PermissionError:
        _open_up(os.path.dirname(path))
        _open_up(path)
        os.rename(path, target)


def beside(path: str, mark: str) -> str:
    return os.path.join(os.path.dirname(path), mark + os.urandom(8).hex())


def names_in(folder: str) -> List[str]:
    """None of one that is not there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))
    return []


def remove_all(folder: str, *marks: str) -> None:
    """Those of these names that no process has locked."""
    for path in [os.path.join(folder, name) for name in names_in(folder) if name.startswith(marks)]:
        if os.path.isdir(path) and not os.path.islink(path):
            if not _is_held(path):
                _remove(path)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for folder, _, _ in os.walk(path):
            _open_up(folder)
        shutil.rmtree(path, ignore_errors=True)


def _open_up(path: AnyStr) -> None:
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.chmod(path, stat.S_IMODE(mode) | stat.S_IRWXU)


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not durable.lock_within(fd, fcntl.LOCK_EX, 0)
    finally:
        os.close(fd)


# --- outputs ----------------------------------------------------------------------------------------------------------


_KEPT = "kept"
_REMOVING = ".removing"
_TICK_NS = 10_000_000  # the kernel's clock for files may be behind by that much
_SECOND_NS = 1_000_000_000  # some file systems store whole seconds only
_Part = Optional[Tuple[str, Glob[str]]]  # of a pattern; None: any number of folders
_TWICE = "a file where $UGRO_OUTPUT has a folder, or a folder where it has a file"


class Outputs:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        fields = (run.envelope() or {}).get("spec")
        spec = RunSpec(fields) if fields else None
        self._patterns = spec.outputs if spec else []
        self._folder = os.fsencode(run.file("output"))
        self._work = WorkDir(run, spec)
        self._cwd = (spec.cwd if spec else None) or self._work.path

    def has_any(self) -> bool:
        """Or may have."""
        return bool(self._patterns) or self._run.has_written() or self._work.may_have_any()

    def files(self) -> Iterator[RunFile]:
        seen: Set[bytes] = set()
        folders: Set[bytes] = set()
        for file in self._everywhere():
            if file.is_folder or file.name in seen:
                continue
            above = list(listing.folders_above(file.name))
            if file.name in folders or not seen.isdisjoint(above):
                yield file._replace(problem=_TWICE)
                continue
            seen.add(file.name)
            folders.update(above)
            yield file

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        has_two = self._patterns or self._work.is_collected
        for folder in (self._folder, self._cwd) if has_two else (self._folder,):
            with contextlib.suppress(FileNotFoundError):
                fd = open_below(os.fsdecode(folder), listing.parts_of(name))
                if fd is not None:
                    return fd
        return None

    def keep(self, names: List[bytes], *, with_unlisted: bool) -> Dict[str, Any]:
        """Moves files out of the run's folder before it is removed. Files in a folder of the user stay there.

        ``with_unlisted``: also those that are too many to be listed.
        """
        ours = os.fsencode(self._run.path) + b"/"
        roots = [root for root in (self._folder, self._cwd) if root.startswith(ours)]
        more = [file.name for file in itertools.islice(self.files(), MOST_FILES, None)] if with_unlisted else []
        for name in (*names, *more):
            keep(self._run, name, [os.path.join(root, name) for root in roots])
        return {}

    def _everywhere(self) -> Iterator[RunFile]:
        yield from listing.below(self._folder)
        if self._patterns:
            since_ns = self._run.began_ns() or 0
            for pattern in self._patterns:
                for name in _matches(self._cwd, pattern):
                    for file in _file_or_below(self._cwd, name):
                        if _is_since(file.changed_ns, since_ns) and not self._work.is_apart(file.name):
                            yield file
        yield from self._work.files()


class Kept:
    """The files that an attempt left on this node: its own, or those of one ``part``."""

    def __init__(self, run: RunDir, part: str = "") -> None:
        self._folder = _kept_folder(run, part)

    def has_any(self) -> bool:
        return os.path.isdir(self._folder)

    def files(self) -> Iterator[RunFile]:
        return (file for file in listing.below(os.fsencode(self._folder)) if not file.is_folder)

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        with contextlib.suppress(FileNotFoundError):
            return open_below(self._folder, listing.parts_of(name))
        return None

    def forget(self, names: Iterable[bytes]) -> Dict[str, Any]:
        """Deletes these files, and folders that are empty then."""
        root = os.fsencode(self._folder)
        for name in names:
            listing.parts_of(name)
            folder = os.path.join(root, name)
            with contextlib.suppress(OSError):
                os.unlink(folder)
                while folder != root:
                    folder = os.path.dirname(folder)
                    os.rmdir(folder)
        return {}


def keep(run: RunDir, name: bytes, paths: Iterable[bytes], part: str = "") -> None:
    """Moves the first of these that is a file to where it outlives the run, under that name, unless that was done."""
    target = os.path.join(os.fsencode(_kept_folder(run, part)), name)
    if os.path.lexists(target):  # what has the name now was hidden by it
        return
    for path in paths:
        if stat.S_ISREG(_mode(path)):
            os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
            move(path, target)
            return


def forget_kept(agent: AgentDir, job: str) -> Dict[str, Any]:
    """Deletes the files that were kept of all attempts at the job."""
    folder = os.path.join(agent.path, _KEPT)
    names: List[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for name in names:
        if name.rpartition(".")[0] == job or name.endswith(_REMOVING):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return {}


def _kept_folder(run: RunDir, part: str) -> str:
    """Parts may have files of the same names."""
    return os.path.join(run.agent.path, _KEPT, "%s+%s" % (run.name, part) if part else run.name)


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


def _matches(root: bytes, pattern: str) -> Iterator[bytes]:
    """Names below ``root`` that match the pattern; ``**`` is any number of folders. Follows no links.

    Each folder is read once, with all places of the pattern that it has led to: with several ``**`` there are many
    ways to one name.
    """
    parts = [None if part == "**" else (part, Glob(part)) for part in pattern.split("/")]
    yield from _matching(root, b"", parts, {0}, 0)


def _matching(root: bytes, name: bytes, parts: Sequence[_Part], reached: Set[int], depth: int) -> Iterator[bytes]:
    for at, part in enumerate(parts):
        if at in reached and part is None:
            reached.add(at + 1)
    if len(parts) in reached and name:
        yield name
    going_on = sorted(reached - {len(parts)})
    folder = os.path.join(root, name)
    if not going_on or depth > MOST_DEPTH or not stat.S_ISDIR(_mode(folder) if name else os.stat(folder).st_mode):
        return
    for one in _names(folder):
        inner = name + b"/" + one if name else one
        text = listing.text(one)
        then = {at if part is None else at + 1 for at in going_on for part in [parts[at]] if _leads_on(text, part)}
        if then:
            yield from _matching(root, inner, parts, then, depth + 1)


def _leads_on(name: str, part: _Part) -> bool:
    """As in a shell: a leading dot is matched only by a dot."""
    return part is None or ((part[0].startswith(".") or not name.startswith(".")) and part[1].fits(name))


def _names(folder: bytes) -> List[bytes]:
    """What cannot be read is skipped: programs change their folders at any time."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _mode(path: bytes) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mode
    return 0
