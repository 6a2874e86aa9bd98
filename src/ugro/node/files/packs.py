"""A store of contents by their hash: many in one file, because most are smaller than the cost of a file.

``packs/*.pack`` never change once they have that name; ``*.arriving`` is being written by the process that holds its
lock. If that was killed, the valid part is kept. ``roots/`` has an empty file for each complete tree; its modification
time says when it was last used. Deleting requires an exclusive ``lock``; everything else shares it. The agent keeps
what it sends in the same form.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from ugro.node import durable, trees
from ugro.node import machine as disk
from ugro.node.clock import boot_id
from ugro.node.program import Refused

# --- fsync ------------------------------------------------------------------------------------------------------------
# Packs are used before they are on the disk, and synced afterwards: only then do they survive a power cut.
#
# Until then, a file beside a pack names the boot in which it was written. If that was an earlier boot, the pack is
# checked again: its valid part is kept, and no tree counts as complete before it was checked, too.


_UNSYNCED = ".fresh"
_PACK, _ARRIVING = ".pack", ".arriving"


def mark_unsynced(folder: str, pack: str) -> None:
    """Before the pack gets its name."""
    with open(os.path.join(folder, pack + _UNSYNCED), "w", encoding="ascii") as file:
        file.write(boot_id())


def sync_packs(folder: str) -> None:
    """When this returns, every pack that existed before is on the disk."""
    synced = [pack for pack in _unsynced(folder) if _is_synced(folder, pack)]
    if synced:
        durable.sync_folder(folder)
    for pack in synced:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _UNSYNCED))


def sync_in_background(folder: str, then: Callable[[], None]) -> None:
    """In a detached process, which outlives this one."""
    from ugro.node.process.execute import close_all_but

    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                close_all_but([])
                sync_packs(folder)
                then()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def recheck(folder: str, roots: str) -> None:
    """Marks packs that an earlier boot left unsynced as incomplete, so that they are checked again."""
    unsynced = [pack for pack in _unsynced(folder) if _boot_of(folder, pack) != boot_id()]
    if not unsynced:
        return
    for root in os.listdir(roots):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(roots, root))
    for pack in unsynced:
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(folder, pack), _arriving(folder, pack))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _UNSYNCED))


def _is_synced(folder: str, pack: str) -> bool:
    """False for a pack that is about to get its name: its writer marked it, and will have it synced."""
    is_arriving = os.path.exists(_arriving(folder, pack))  # checked first: it may get its name meanwhile
    with contextlib.suppress(FileNotFoundError):
        durable.sync_file(os.path.join(folder, pack))
        return True
    return not is_arriving  # it was deleted


def _arriving(folder: str, pack: str) -> str:
    return os.path.join(folder, pack[: -len(_PACK)] + _ARRIVING)


def _unsynced(folder: str) -> List[str]:
    return [name[: -len(_UNSYNCED)] for name in os.listdir(folder) if name.endswith(_UNSYNCED)]


def _boot_of(folder: str, pack: str) -> str:
    path = os.path.join(folder, pack + _UNSYNCED)
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return file.read()
    return ""


# --- packs ------------------------------------------------------------------------------------------------------------


_HEAD = struct.Struct(">32sBHI")  # hash, kind, bytes of padding, bytes of content
_PAGE = 4096
_ALIGNED_BYTES = 64 * 1024  # larger ones are aligned to pages, so that file systems can share their blocks with copies
_BUFFER_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20  # not read through a map: the pages of a large pack would count as this process's memory
LOCK_S = 120.0
PACK, _PACKS_ARRIVING = ".pack", ".arriving"


class Location(NamedTuple):
    """Where a content is stored."""

    pack: str
    offset: int
    size: int
    kind: int


class Lacking(Exception):
    """Contents that are not in the store."""

    def __init__(self, ids: List[bytes]) -> None:
        super().__init__("%d contents are missing" % len(ids))
        self.ids = ids


class ContentStore:
    """The view of one process; ``refresh`` adds what others have stored."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.packs = os.path.join(folder, "packs")
        self.roots = os.path.join(folder, "roots")
        self._places: Dict[bytes, Location] = {}
        self._seen: Set[str] = set()
        self._maps: Dict[str, mmap.mmap] = {}
        self._is_trusted = False

    # --- what is here -------------------------------------------------------------------------------------------

    def has_root(self, root: bytes) -> bool:
        """Whether a tree is complete; marks it as used."""
        try:
            os.utime(os.path.join(self.roots, root.hex()))
        except FileNotFoundError:
            return False
        return True

    def refresh(self) -> None:
        names = set(os.listdir(self.packs)) if os.path.isdir(self.packs) else set()
        packs = {name for name in names if name.endswith(PACK)}
        if self._seen - packs:  # some were deleted; what was found in them may be in one that was read earlier, too
            self.close()
            self._places, self._seen = {}, set()
        for name in packs - self._seen:
            self._seen.add(name)
            with contextlib.suppress(FileNotFoundError):
                self._places.update(self._walk(name))

    def unseen_bytes(self) -> int:
        """Of packs that ``refresh`` has not read yet."""
        names = os.listdir(self.packs) if os.path.isdir(self.packs) else []
        unseen = [name for name in names if name.endswith(PACK) and name not in self._seen]
        size = 0
        for name in unseen:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                size += os.path.getsize(os.path.join(self.packs, name))
        return size

    def reload(self) -> None:
        """After contents have moved to other packs."""
        self.close()
        self._places, self._seen = {}, set()
        self.refresh()

    def lacks(self, ids: Iterable[bytes]) -> List[bytes]:
        return [one for one in ids if one not in self._places]

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def locate(self, key: bytes) -> Location:
        found = self._places.get(key)
        if found is None:
            raise Lacking([key])
        return found

    def read(self, key: bytes) -> bytes:
        place = self.locate(key)
        if place.size >= _LARGE_BYTES:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, and perhaps still mapped
                return _read(self.path(place), place)
        return self._map(place.pack)[place.offset : place.offset + place.size]

    def entries(self, tree: bytes) -> List[trees.TreeEntry]:
        return trees.decode(self.read(tree))

    def path(self, place: Location) -> str:
        return os.path.join(self.packs, place.pack)

    def close(self) -> None:
        maps, self._maps = self._maps, {}
        for one in maps.values():
            one.close()

    def _map(self, pack: str) -> mmap.mmap:
        found = self._maps.get(pack)
        if found is None:
            with open(os.path.join(self.packs, pack), "rb") as file:
                found = self._maps[pack] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return found

    def _walk(self, pack: str) -> Iterator[Tuple[bytes, Location]]:
        path = os.path.join(self.packs, pack)
        if os.path.getsize(path) == 0:
            return
        for key, kind, offset, size in records(self._map(pack)):
            yield key, Location(pack, offset, size, kind)

    # --- locks --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def using(self, *, alone: bool = False, wait_s: float = LOCK_S) -> Iterator[None]:
        """Nothing is deleted meanwhile; ``alone``: nobody else uses the store."""
        for folder in (self.packs, self.roots):
            durable.make_folder(folder)
        fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not durable.lock_within(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, wait_s):
                raise Refused("busy", "the contents in %s are being cleaned up" % self.folder)
            if not self._is_trusted:
                recheck(self.packs, self.roots)
                self._is_trusted = True
            self.refresh()
            yield
        finally:
            os.close(fd)

    # --- what comes ---------------------------------------------------------------------------------------------

    def salvage(self) -> None:
        """Adds the valid part of interrupted transfers."""
        for name in os.listdir(self.packs):
            if name.endswith(_PACKS_ARRIVING):
                with contextlib.suppress(FileNotFoundError):
                    self._salvage(os.path.join(self.packs, name))
        self.refresh()

    def _salvage(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not durable.lock_within(fd, fcntl.LOCK_EX, 0):
                return
            whole = _whole_bytes(fd)
            if whole == 0:
                os.unlink(path)
                return
            os.ftruncate(fd, whole)
            os.fsync(fd)
            os.rename(path, path[: -len(_PACKS_ARRIVING)] + PACK)
        finally:
            os.close(fd)

    def expect_room(self, size: int) -> None:
        if (text := disk.shortage(self.packs, size, "the code")) is not None:
            raise Refused(disk.NO_SPACE, text)

    def complete(self, root: bytes) -> None:
        """Marks a tree as complete, or raises ``Lacking``."""
        # Most of a changed tree is in the previous one, which is complete.
        before = next((key for key, _ in self.roots_by_use()), None)
        lacking = self.lacks(self.reach(root, before if before in self._places else None))
        if lacking:
            raise Lacking(lacking)
        path = os.path.join(self.roots, root.hex())
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(path)

    def disown(self, root: bytes) -> None:
        """Says no longer that a tree is complete: something of it is missing, whatever the reason."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.roots, root.hex()))

    def reach(self, root: bytes, base: Optional[bytes] = None) -> Iterator[bytes]:
        """Every hash of a tree, its own first, each once; without those in folders that are the same in ``base``.

        What is below a tree that is not in the store is left out.
        """
        seen: Set[bytes] = set()
        todo = [(root, base)]
        while todo:
            tree, before = todo.pop()
            if tree == before or tree in seen:
                continue
            yield tree
            seen.add(tree)
            if tree in self._places:
                had = self.entries(before) if before is not None and before in self._places else []
                same = {entry[:2]: entry.body for entry in had}  # by name and kind: a file may become a folder
                entries = self.entries(tree)
                todo += [(entry.body, same.get(entry[:2])) for entry in entries if entry.kind == trees.FOLDER]
                files = [entry for entry in entries if entry.kind == trees.FILE and same.get(entry[:2]) != entry.body]
                fresh = dict.fromkeys(key for file in files for key in file.chunks if key not in seen)
                yield from fresh
                seen.update(fresh)

    def walk(self, root: bytes) -> Iterator[Tuple[bytes, trees.TreeEntry]]:
        """Paths and entries of all files and links of a tree, as far as it is in the store."""
        todo = [(b"", root)]
        while todo:
            path, tree = todo.pop()
            for entry in self.entries(tree) if tree in self else ():
                if entry.kind == trees.FOLDER:
                    todo.append((path + entry.name + b"/", entry.body))
                else:
                    yield path + entry.name, entry

    def roots_by_use(self) -> List[Tuple[bytes, float]]:
        """The most recently used first."""
        found = []
        for name in os.listdir(self.roots) if os.path.isdir(self.roots) else ():
            with contextlib.suppress(FileNotFoundError, ValueError):
                key = trees.parse_id(name)
                found.append((key, os.stat(os.path.join(self.roots, name)).st_mtime))
        return sorted(found, key=lambda one: one[1], reverse=True)


class PackWriter:
    """Writes a pack. Its contents are in the store after ``finish``."""

    def __init__(self, store: ContentStore) -> None:
        durable.make_folder(store.packs)
        self._store = store
        self._path, self._fd = _new_pack(store.packs)
        self._buffer = bytearray()
        self._at = 0
        self._has: Set[bytes] = set()
        self.bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._has

    def add(self, key: bytes, kind: int, content: Any) -> None:
        if key not in self._store:
            self.move(key, kind, content)

    def move(self, key: bytes, kind: int, content: Any) -> None:
        """Even if the store has it in another pack."""
        if key in self._has:
            return
        self._has.add(key)
        size = len(content)
        padding = -(self._at + _HEAD.size) % _PAGE if size >= _ALIGNED_BYTES else 0
        self._buffer += _HEAD.pack(key, kind, padding, size)
        self._buffer += bytes(padding)
        self._buffer += content
        self._at += _HEAD.size + padding + size
        self.bytes += size
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Contents added so far survive the end of this process."""
        durable.write_all(self._fd, bytes(self._buffer))
        self._buffer.clear()

    def sync(self) -> None:
        """Contents added so far are on the disk."""
        self.flush()
        os.fsync(self._fd)

    def finish(self) -> None:
        """Adds the pack to the store; it survives a power cut once it is synced."""
        if self._at == 0:
            self.discard()
            return
        self.flush()
        os.fchmod(self._fd, 0o400)
        settled = self._path[: -len(_PACKS_ARRIVING)] + PACK
        mark_unsynced(self._store.packs, os.path.basename(settled))
        os.rename(self._path, settled)
        self._close()
        self._store.refresh()

    def leave(self) -> None:
        """As if this process were killed: the next one adds the valid part."""
        with contextlib.suppress(OSError):
            self.flush()
        self._close()

    def discard(self) -> None:
        """Deletes it, above all when the disk is full."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def _read(path: str, place: Location) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, place.size, place.offset)
    finally:
        os.close(fd)


def _new_pack(folder: str) -> Tuple[str, int]:
    """Empty and locked. Another process may delete one before it is locked: then a new one is made."""
    while True:
        path = os.path.join(folder, os.urandom(12).hex() + _PACKS_ARRIVING)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


def records(content: Any) -> Iterator[Tuple[bytes, int, int, int]]:
    """Hash, kind, offset and size of each record of a pack."""
    at, end = 0, len(content)
    while end - at >= _HEAD.size:
        key, kind, padding, size = _HEAD.unpack_from(content, at)
        offset = at + _HEAD.size + padding
        if offset + size > end:
            return
        yield key, kind, offset, size
        at = offset + size


def _whole_bytes(fd: int) -> int:
    """How many bytes of an interrupted pack are valid."""
    if os.fstat(fd).st_size == 0:
        return 0
    whole = 0
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
        for key, kind, offset, size in records(content):
            if kind not in (trees.CONTENT, trees.TREE) or trees.identify(kind, content[offset : offset + size]) != key:
                break
            whole = offset + size
    return whole
