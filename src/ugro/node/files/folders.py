"""Where folders are on this node, which are complete, and which runs may still need them.

Below ``<root>/.ugro/folders``: ``<hash>/`` is complete and read-only. ``data/`` is the folder itself; ``record.json``
says what each file looked like when it was complete, and its time when it was last used. ``<hash>.arriving/`` is being
received, by the process that holds its lock. Who uses a folder shares ``lock``; who deletes holds it alone, so that
what a run has just been promised is not deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ugro.node import durable, trees
from ugro.node.program import Refused
from ugro.node.runs import rundir as live_runs
from ugro.node.runs.runspec import FolderAt

# --- layout -----------------------------------------------------------------------------------------------------------
# Where the contents of a tree go: its folders, links and files, and every place of each chunk.


_MOST_ENTRIES = 2_000_000


class FileAt(NamedTuple):
    path: bytes
    mode: int
    size: int
    body: bytes  # the hashes of its chunks


class Layout:
    """``entries`` reads a tree; those that it does not have are in ``lacking``, and what is below them is left out."""

    def __init__(self, root: bytes, entries: Callable[[bytes], List[trees.TreeEntry]]) -> None:
        self.trees: List[bytes] = []
        self.lacking: List[bytes] = []
        self.folders: List[Tuple[bytes, int]] = []  # those above others first
        self.links: List[Tuple[bytes, bytes]] = []
        self.files: List[FileAt] = []
        self._entries = entries
        self._walk(root)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def places(self) -> Dict[bytes, List[Tuple[int, int]]]:
        """By chunk: the number of a file, and the offset in it."""
        found: Dict[bytes, List[Tuple[int, int]]] = {}
        for number, file in enumerate(self.files):
            for index, at in enumerate(range(0, len(file.body), trees.ID_BYTES)):
                key = file.body[at : at + trees.ID_BYTES]
                found.setdefault(key, []).append((number, index * trees.CHUNK))
        return found

    def chunk_bytes(self, place: Tuple[int, int]) -> int:
        number, offset = place
        return min(trees.CHUNK, self.files[number].size - offset)

    def _walk(self, root: bytes) -> None:
        todo = [(b"", root, 0)]
        count = 0
        while todo:
            path, tree, depth = todo.pop()
            self.trees.append(tree)
            try:
                entries = self._entries(tree)
            except KeyError:
                self.lacking.append(tree)
                continue
            count += len(entries)
            if count > _MOST_ENTRIES or depth > trees.MOST_DEPTH:
                raise ValueError("a folder with more than %d entries, or too deep" % _MOST_ENTRIES)
            for entry in entries:
                whole = path + entry.name
                if entry.kind == trees.FOLDER:
                    self.folders.append((whole, entry.mode))
                    todo.append((whole + b"/", entry.body, depth + 1))
                elif entry.kind == trees.LINK:
                    self.links.append((whole, entry.body))
                else:
                    self.files.append(FileAt(whole, entry.mode, entry.size, entry.body))


# --- place ------------------------------------------------------------------------------------------------------------


DATA = b"data"
NO_FOLDER = "no-folder"
_RECORD = "record.json"
_ARRIVING, GOING = ".arriving", ".going"
_LOCK_S = 60.0


class Place:
    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.folder = os.path.join(self.root, ".ugro", "folders")

    def complete(self, tree: bytes) -> str:
        return os.path.join(self.folder, tree.hex())

    def arriving(self, tree: bytes) -> str:
        return self.complete(tree) + _ARRIVING

    def path(self, wanted: FolderAt) -> bytes:
        """As a run finds it: a folder, or the one file that was sent."""
        data = os.path.join(os.fsencode(self.complete(wanted.tree)), DATA)
        return os.path.join(data, wanted.file) if wanted.file else data

    @contextlib.contextmanager
    def locked(self, *, alone: bool = False, wait_s: float = _LOCK_S) -> Iterator[None]:
        durable.make_folder(self.folder)
        fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not durable.lock_within(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, wait_s):
                raise Refused("busy", "the folders in %s are being cleaned up" % self.folder)
            yield
        finally:
            os.close(fd)

    # --- complete ones --------------------------------------------------------------------------------------------

    def trees(self) -> List[bytes]:
        found = []
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else ():
            with contextlib.suppress(ValueError):
                found.append(trees.parse_id(name))
        return found

    def record(self, tree: bytes) -> Optional[Dict[str, Any]]:
        return durable.read_json(os.path.join(self.complete(tree), _RECORD))

    def write_record(self, folder: str, record: Dict[str, Any]) -> None:
        durable.write_json(os.path.join(folder, _RECORD), record)

    def used_at(self, tree: bytes) -> float:
        with contextlib.suppress(OSError):
            return os.stat(os.path.join(self.complete(tree), _RECORD)).st_mtime
        return 0.0

    def note_use(self, tree: bytes) -> None:
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.complete(tree), _RECORD))

    def is_whole(self, tree: bytes) -> bool:
        """Whether it is there, and every file looks as it did: a job may have changed one, although it must not."""
        record = self.record(tree)
        if record is None:
            return False
        data = os.path.join(os.fsencode(self.complete(tree)), DATA)
        return all(_is_same(data, one) for one in record["files"])

    # --- those in use ---------------------------------------------------------------------------------------------

    def in_use(self) -> Set[bytes]:
        """What runs may still read, of all agents and of all machines that share the folder."""
        found: Set[bytes] = set()
        for run in live_runs.those_that_may_live(self.root):
            spec = (run.envelope() or {}).get("spec")
            folders = spec.get("folders") if isinstance(spec, dict) else None
            for one in folders.values() if isinstance(folders, dict) else ():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    found.add(trees.parse_id(one["tree"]))
        return found

    def set_aside(self, path: str) -> str:
        """Out of sight in one step, to be deleted; the caller holds the lock alone."""
        aside = "%s.%s%s" % (path, os.urandom(6).hex(), GOING)
        os.rename(path, aside)
        return aside

    def drop_changed(self, tree: bytes) -> None:
        """One that is no longer what its name says, so that it is sent again; not while a run reads it."""
        with self.locked(alone=True):
            if self.is_whole(tree) or not os.path.lexists(self.complete(tree)):
                return
            if tree in self.in_use():
                text = "a file in %s was changed on this node, and a running job uses it" % self.complete(tree)
                raise Refused("folder-changed", text)
            aside = self.set_aside(self.complete(tree))
        delete(aside)


def _is_same(data: bytes, seen: Any) -> bool:
    path, size, modified = seen[:3]
    try:
        status = os.lstat(os.path.join(data, path.encode("utf-8", "surrogateescape")))
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_mtime_ns == modified


def delete(path: str) -> None:
    """Its folders are read-only: they are made writable on the way."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


# --- for runs -----------------------------------------------------------------------------------------------------


def expect(root: str, wanted: Dict[str, FolderAt], wait_s: float = _LOCK_S) -> None:
    """Refused if one is not here; the others count as used just now, and are not deleted."""
    place = Place(root)
    with place.locked(wait_s=wait_s):
        for name, one in wanted.items():
            if not place.is_whole(one.tree):
                raise Refused(NO_FOLDER, "the folder %s is not on this node" % name)
            place.note_use(one.tree)


def variables(root: str, wanted: Dict[str, FolderAt]) -> Dict[bytes, bytes]:
    place = Place(root)
    return {b"UGRO_FOLDER_" + name.upper().encode(): place.path(one) for name, one in wanted.items()}


# --- tidy -------------------------------------------------------------------------------------------------------------
# Keeps the folders on this node within a limit: the least recently used go first, none that a run may still read.


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
