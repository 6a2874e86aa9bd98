"""Receives a folder straight into its files, in any order of its chunks, and goes on where an earlier process stopped.

What is on the disk is noted in a journal, by chunk, after it was synced: whatever is killed, or loses its power, the
journal is true. A file that another complete folder has as well is linked, not sent. The last step gives the folder
its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

from ugro.node import durable, trees, worker
from ugro.node import machine as disk
from ugro.node.clock import clock_s
from ugro.node.files import folders as tidying
from ugro.node.files.contents import WINDOW
from ugro.node.files.folders import DATA, FileAt, Layout, Place
from ugro.node.program import Call, Refused, method
from ugro.node.runs.rundir import agent_of
from ugro.node.trees import BlockReader, StreamError

_SYNC_BYTES = 64 << 20  # so much, or what came in so many seconds, may have to be sent again
_SYNC_S = 2.0
_MOST_OPEN = 32  # files; with more that are new, the whole file system is synced instead of each
_MOST_LACKING = 8000  # named in one answer
_NEW = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Arrival:
    """One process that receives; ``finish`` is its last call."""

    def __init__(self, place: Place, tree: bytes) -> None:
        self._place = place
        self._tree = tree
        self._folder = place.arriving(tree)
        self._data = os.path.join(os.fsencode(self._folder), DATA)
        for folder in (self._folder, self._file("trees")):
            durable.make_folder(folder)
        self._lock = self._locked()
        self._layout = Layout(tree, self._entries)
        self._places: Dict[bytes, List[Tuple[int, int]]] = {}
        self._done: Set[bytes] = set()
        self._fresh: List[bytes] = []  # written, and not synced yet
        self._fresh_bytes = 0
        self._synced_s = clock_s()
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors by the number of the file
        self._touched: Set[int] = set()
        self.bad = 0
        if not self._layout.lacking:
            self._prepare()

    def receive(self, pieces: Iterator[bytes]) -> None:
        reader = BlockReader()
        try:
            for piece in pieces:
                for key, kind, content in reader.feed(piece):
                    self._take(key, kind, content)
            reader.finish()
        except StreamError as error:
            raise Refused("damaged", "the folder was damaged during the transfer: %s" % error) from error
        except OSError as error:
            if not disk.is_full(error):
                raise
            word, text = disk.refusal(error, self._place.folder)
            raise Refused(word, "%s; the folder did not fit" % text) from error
        finally:
            self.bad = reader.bad
            with contextlib.suppress(OSError):
                self._sync()

    def finish(self) -> List[bytes]:
        """What is still lacking; nothing: the folder is complete and has its name."""
        lacking = self.lacking()
        if not lacking:
            self._complete()
        return lacking

    def lacking(self) -> List[bytes]:
        if self._layout.lacking:
            self._layout = Layout(self._tree, self._entries)
            if self._layout.lacking:
                return self._layout.lacking[:_MOST_LACKING]
            self._prepare()
        return [key for key in self._places if key not in self._done][:_MOST_LACKING]

    def close(self) -> None:
        self._close_files()
        os.close(self._lock)

    # --- its parts ------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _locked(self) -> int:
        fd = os.open(self._file("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if durable.lock_within(fd, fcntl.LOCK_EX, 5.0) and os.path.exists(self._file("lock")):
            os.utime(fd)  # not abandoned
            return fd
        os.close(fd)
        raise Refused("busy", "another transfer of the same folder to this node is under way")

    def _entries(self, tree: bytes) -> List[trees.TreeEntry]:
        """Raises KeyError if it did not arrive yet, or not as a whole."""
        try:
            with open(self._file("trees/%s" % tree.hex()), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            raise KeyError(tree) from None
        if trees.identify(trees.TREE, content) != tree:  # the power went off as it was written
            raise KeyError(tree)
        return trees.decode(content)

    def _prepare(self) -> None:
        """Folders, links and empty files; what is here already; and whether there is room for the rest."""
        durable.make_folder(os.fsdecode(self._data))
        for path, _ in self._layout.folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self._data, path), 0o700)
        for path, target in self._layout.links:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, os.path.join(self._data, path))
        here = self._linked()
        self._places = {
            key: wanted
            for key, places in self._layout.places().items()
            if (wanted := [one for one in places if one[0] not in here])
        }
        self._done = self._journalled() & set(self._places)
        wanted_bytes = sum(
            self._layout.chunk_bytes(one)
            for key, places in self._places.items()
            if key not in self._done
            for one in places
        )
        text = disk.shortage(self._place.folder, wanted_bytes, "the folder")
        if text is not None:
            raise Refused(disk.NO_SPACE, text)
        for number, file in enumerate(self._layout.files):
            if number not in here:
                os.close(os.open(os.path.join(self._data, file.path), _NEW, 0o600))

    def _linked(self) -> Set[int]:
        """The numbers of files that another folder has: they are linked from there.

        Written down first: who writes to a link writes to the other folder, too.
        """
        files, sources = self._layout.files, self._sources()
        known = durable.read_json(self._file("linked.json"))
        numbers: Set[int] = set(known["files"]) if known is not None else set(sources)
        if known is None:
            durable.write_json(self._file("linked.json"), {"files": sorted(numbers)})
        found = {
            number
            for number in numbers
            if _is_there(os.path.join(self._data, files[number].path), files[number].size)
            or (number in sources and _link(sources[number], os.path.join(self._data, files[number].path)))
        }
        if found != numbers:
            durable.write_json(self._file("linked.json"), {"files": sorted(found)})
        return found

    def _sources(self) -> Dict[int, bytes]:
        known = self._known_files()
        found = {}
        for number, file in enumerate(self._layout.files):
            source = known.get((file.body, file.mode & 0o111)) if file.size else None
            if source is not None:
                found[number] = source
        return found

    def _known_files(self) -> Dict[Tuple[bytes, int], bytes]:
        wanted = {file.body for file in self._layout.files}
        found: Dict[Tuple[bytes, int], bytes] = {}
        for tree in self._place.trees():
            if not self._place.is_whole(tree):
                continue
            data = os.path.join(os.fsencode(self._place.complete(tree)), DATA)
            for path, _, _, mode, body in (self._place.record(tree) or {}).get("files", ()):
                key = bytes.fromhex(body)
                if key in wanted:
                    found[key, mode & 0o111] = os.path.join(data, path.encode("utf-8", "surrogateescape"))
        return found

    # --- what arrives ---------------------------------------------------------------------------------------------

    def _take(self, key: bytes, kind: int, content: bytes) -> None:
        if kind == trees.TREE:
            with open(self._file("trees/%s" % key.hex()), "wb") as file:
                file.write(content)
            return
        if self._layout.lacking:
            self.lacking()
        if key not in self._places or key in self._done:
            return
        for place in self._places[key]:
            self._write(place, content)
        self._done.add(key)
        self._fresh.append(key)
        self._fresh_bytes += len(content)
        is_late = clock_s() - self._synced_s > _SYNC_S and self._fresh_bytes >= trees.CHUNK
        if self._fresh_bytes >= _SYNC_BYTES or is_late:
            self._sync()

    def _write(self, place: Tuple[int, int], content: bytes) -> None:
        number, offset = place
        view = memoryview(content)
        fd = self._opened(number)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def _opened(self, number: int) -> int:
        fd = self._open.get(number)
        if fd is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            path = os.path.join(self._data, self._layout.files[number].path)
            fd = self._open[number] = os.open(path, _NEW, 0o600)
        self._touched.add(number)
        return fd

    def _sync(self) -> None:
        """First what was written, then the journal that says so."""
        if not self._fresh:
            return
        if len(self._touched) <= len(self._open):
            for number in self._touched:
                os.fsync(self._open[number])
        else:
            _sync_file_system(self._lock)
        fd = os.open(self._file("journal"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            durable.write_all(fd, b"".join(self._fresh))
            os.fsync(fd)
        finally:
            os.close(fd)
        self._fresh, self._fresh_bytes, self._touched = [], 0, set()
        self._synced_s = clock_s()

    def _journalled(self) -> Set[bytes]:
        try:
            with open(self._file("journal"), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return set()
        size = trees.ID_BYTES
        return {content[at : at + size] for at in range(0, len(content) - size + 1, size)}

    # --- the end --------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        self._sync()
        self._close_files()
        files = [self._settled(file) for file in self._layout.files]
        for path, mode in reversed(self._layout.folders):
            os.chmod(os.path.join(self._data, path), (mode | 0o500) & 0o555)
        os.chmod(self._data, 0o555)
        self._place.write_record(self._folder, {"bytes": self._layout.size, "files": files})
        _sync_file_system(self._lock)
        shutil.rmtree(self._file("trees"), ignore_errors=True)
        for name in ("journal", "linked.json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file(name))
        try:
            os.rename(self._folder, self._place.complete(self._tree))
        except OSError:
            if not self._place.is_whole(self._tree):
                raise
        durable.sync_folder(self._place.folder)

    def _settled(self, file: FileAt) -> List[Any]:
        """Read-only: all runs share it."""
        path = os.path.join(self._data, file.path)
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            raise Refused("damaged", "a file has %d bytes instead of %d" % (status.st_size, file.size))
        os.chmod(path, 0o444 | (0o111 if file.mode & 0o111 else 0))
        name = file.path.decode("utf-8", "surrogateescape")
        return [name, file.size, status.st_mtime_ns, file.mode, file.body.hex()]

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _is_there(path: bytes, size: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_size == size
    return False


def _link(source: bytes, target: bytes) -> bool:
    try:
        os.link(source, target)
    except OSError:  # it is gone meanwhile, there are too many links, or none on this file system
        return False
    return True


def _sync_file_system(fd: int) -> None:
    if _libc.syncfs(fd) != 0:
        os.sync()


# --- api --------------------------------------------------------------------------------------------------------------
# `folders.*`: the folders of jobs on this node: looked up, received, cleaned up.


_PIECE = 1 << 20
Answer = Dict[str, Any]


@method("folders.has")
def has(call: Call, *, root: str) -> None:
    """Says whether a folder of a job is complete and unchanged."""
    place, tree = _place(call), trees.parse_id(root)

    def work() -> Answer:
        if place.is_whole(tree):
            place.note_use(tree)
            return {"has": True}
        place.drop_changed(tree)
        return {"has": False}

    worker.do(call, work)


@method("folders.receive")
def receive(call: Call, *, root: str, size: int, limit_bytes: int) -> None:
    """Trees and contents; answers with what is still lacking. The first stream of a folder has its trees alone."""
    place, tree = _place(call), trees.parse_id(root)

    def work(out: int, took: Callable[[int], None]) -> Answer:
        def pieces() -> Iterator[bytes]:
            for piece in iter(lambda: os.read(out, _PIECE), b""):
                yield piece
                took(len(piece))

        if place.is_whole(tree):
            for _ in pieces():
                pass
            return {"bad": 0, "lacking": []}
        arrival = Arrival(place, tree)
        try:
            arrival.receive(pieces())
            lacking = arrival.finish()
        finally:
            arrival.close()
        return {"bad": arrival.bad, "lacking": [key.hex() for key in lacking]}

    worker.receive(call, work, WINDOW)


@method("folders.tidy")
def tidy(call: Call, *, limit_bytes: int, keep: List[str]) -> None:
    """Deletes the folders that were used least recently, and no run uses."""
    place, limit_bytes = _place(call), int(limit_bytes)
    kept = [trees.parse_id(one) for one in keep]
    worker.do(call, lambda: tidying.tidy(place, limit_bytes, kept))


def _place(call: Call) -> Place:
    agent_of(call)  # one that was replaced is refused
    return Place(call.program.root)
