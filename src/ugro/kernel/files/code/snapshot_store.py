"""Stores snapshots of code folders: read once, hashed by several threads, kept for every job that runs them.

A job runs the code as it was when it was submitted, whatever is edited later: contents are copied. Memory is bounded:
no file larger than a chunk is read as a whole.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from ugro.kernel.files.code.scanner import (
    Changed,
    Choices,
    FoundFile,
    FoundFolder,
    Links,
    Remembered,
    Scan,
    StatCache,
    Unusable,
    exclude,
    failure,
    largest,
    now_ns,
    scan,
    shown,
)
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import format_size
from ugro.node import trees
from ugro.node.files import gc
from ugro.node.files import packs as fsync
from ugro.node.files.packs import ContentStore, Lacking, PackWriter

_TRIES = 3  # if the folder changes while it is read
_BATCH_BYTES = 2 << 20
_BATCH_FILES = 128
_THREADS = min(8, (os.cpu_count() or 1) + 1)
_MOST_REMEMBERED = 200_000  # files and folders of one tree
_FOLDERS_REMEMBERED = 4
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_LATER = "submit it again when nothing writes to it"

Contents = list[tuple[bytes, bytes]]  # hash and content, of what is not stored yet


class Reading:
    """How far the reading of a folder is, for those who wait for it, and who may end it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.total = 0  # that have to be read
        self.is_cancelled = False
        self.expect_room: Callable[[int], None] = lambda size: None  # raises if so much cannot be stored
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        self.expect_room(total)
        self.bytes, self.total = 0, total

    def add(self, size: int) -> None:
        if self.is_cancelled:
            raise NotAllowed("nobody waits for it any more")
        with self._lock:
            self.bytes += size


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Which folder to store, and how."""

    folder: str
    choices: Choices
    max_bytes: int
    is_forced: bool = False
    trusts_times: bool = False
    is_code: bool = True  # else a folder that a job reads beside its code
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that is stored here."""

    id: str
    folder: str
    files: int
    bytes: int
    new_files: int  # that had to be read
    new_bytes: int  # that had to be stored
    seconds: float
    skipped: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.files == 0 and self.id == EMPTY


EMPTY = trees.identify(trees.TREE, b"").hex()


class SnapshotStore:
    """Not async: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = ContentStore(str(folder))
        self._stat_cache = StatCache(folder / "memo.db")
        self._one_at_a_time = threading.Lock()
        self._remembered: dict[str, Remembered] = {}
        self._is_ending = False

    def end(self) -> None:
        """Ends the current snapshot: a thread cannot be cancelled, and may have a million files left."""
        self._is_ending = True

    def _check(self) -> None:
        if self._is_ending:
            raise NotAllowed("the agent is stopping and takes no more code", hint="try again: it is started again")

    def take(self, request: SnapshotRequest) -> StoredSnapshot:
        with self._one_at_a_time:
            for is_last in (*[False] * (_TRIES - 1), True):
                try:
                    with _storing(self._folder):
                        return self._take(request)
                except (Changed, Lacking) as error:
                    if is_last:
                        text = f"{request.folder} changes faster than it can be read: {error}"
                        hint = "leave out what changes all the time: .ugroignore; see docs/sync.md"
                        raise UgroError(text, hint=hint if request.is_code else _LATER) from error
                except Unusable as error:
                    raise error.as_error(request.folder, is_code=request.is_code) from error
        raise AssertionError

    def keep_file(self, name: str, content: bytes, mode: int) -> str:
        """Stores a tree with this file alone, unless it is there; its hash."""
        parts = [content[at : at + trees.CHUNK] for at in range(0, len(content), trees.CHUNK)]
        keyed = [(trees.identify(trees.CONTENT, part), trees.CONTENT, part) for part in parts]
        body = b"".join(key for key, _, _ in keyed)
        tree = trees.encode([trees.TreeEntry(os.fsencode(name), trees.FILE, mode, len(content), body)])
        root = trees.identify(trees.TREE, tree)
        with self._one_at_a_time, _storing(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.store.using():
                if not self.store.has_root(root):
                    self._write([*keyed, (root, trees.TREE, tree)])
                    self.store.complete(root)
        return root.hex()

    def keep_files(self, folder: Path) -> str:
        """Stores a folder of our own without folders in it, however large; the hash of its tree.

        Others store meanwhile. The caller sees to it that nothing is deleted meanwhile.
        """
        with _storing(self._folder), contextlib.ExitStack() as stack:
            with self._one_at_a_time:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(self.store.using())
            writer = PackWriter(self.store)
            stack.callback(writer.discard)  # does nothing after finish
            tree = trees.encode([self._written(path, writer) for path in sorted(folder.iterdir())])
            root = trees.identify(trees.TREE, tree)
            writer.add(root, trees.TREE, tree)
            writer.sync()  # here: the next who stores code syncs all that is not, and would wait for it
            with self._one_at_a_time:
                writer.finish()
                if not self.store.has_root(root):
                    self.store.complete(root)
        return root.hex()

    def with_files(self, root: str | None, files: Mapping[bytes, Path]) -> str:
        """Stores a tree with these files added, which must not be in it; its hash. None: a tree without files.

        Others store meanwhile. The caller sees to it that nothing is deleted meanwhile.
        """
        with _storing(self._folder), contextlib.ExitStack() as stack:
            with self._one_at_a_time:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(self.store.using())
            writer = PackWriter(self.store)
            stack.callback(writer.discard)  # does nothing after finish
            parts = {tuple(name.split(b"/")): path for name, path in files.items()}
            tree = self._added(None if root is None else trees.parse_id(root), parts, writer)
            writer.sync()
            with self._one_at_a_time:
                writer.finish()
                if not self.store.has_root(tree):
                    self.store.complete(tree)
        return tree.hex()

    def _added(self, tree: bytes | None, files: Mapping[tuple[bytes, ...], Path], writer: PackWriter) -> bytes:
        entries = {} if tree is None else {one.name: one for one in self.store.entries(tree)}
        for name in {parts[0] for parts in files}:
            below = {parts[1:]: path for parts, path in files.items() if parts[0] == name}
            if () in below:
                entries[name] = self._written(below[()], writer)._replace(name=name, mode=0o644)
                continue
            before = entries.get(name)
            inner = self._added(None if before is None else before.body, below, writer)
            entries[name] = trees.TreeEntry(name, trees.FOLDER, 0o755 if before is None else before.mode, 0, inner)
        content = trees.encode(list(entries.values()))
        key = trees.identify(trees.TREE, content)
        if key not in self.store:
            writer.add(key, trees.TREE, content)
        return key

    def _written(self, path: Path, writer: PackWriter) -> trees.TreeEntry:
        keys: list[bytes] = []
        size = 0
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            while content := file.read(trees.CHUNK):
                self._check()
                keys.append(trees.identify(trees.CONTENT, content))
                writer.add(keys[-1], trees.CONTENT, content)
                size += len(content)
        return trees.TreeEntry(os.fsencode(path.name), trees.FILE, mode, size, b"".join(keys))

    def _write(self, contents: Iterable[tuple[bytes, int, bytes]]) -> None:
        writer = PackWriter(self.store)
        try:
            for key, kind, content in contents:
                writer.add(key, kind, content)
            writer.finish()
        finally:
            writer.discard()  # does nothing after finish

    def alone(self) -> threading.Lock:
        """For others who add to the store."""
        return self._one_at_a_time

    @contextlib.contextmanager
    def using(self) -> Iterator[ContentStore]:
        """Nothing is deleted meanwhile."""
        with _storing(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.store.using():
                yield self.store

    def settle(self) -> None:
        """When this returns, all snapshots survive a power cut."""
        if os.path.isdir(self.store.packs):
            fsync.sync_packs(self.store.packs)

    def has(self, root: str) -> bool:
        return self.store.has_root(trees.parse_id(root))

    def holds(self, root: str, path: str) -> bool:
        """Whether that path is in it. Links are not followed."""
        tree = trees.parse_id(root)
        # One that was deleted meanwhile is reported when it is sent.
        with self.store.using(), contextlib.suppress(Lacking):
            for name in map(os.fsencode, PurePosixPath(path).parts):
                entry = next((one for one in self.store.entries(tree) if one.name == name), None)
                if entry is None or entry.kind != trees.FOLDER:
                    return entry is not None
                tree = entry.body
        return True

    def candidates(self, root: str, base: str | None) -> list[bytes]:
        """The contents of a tree that a node may lack if it has, or had, the tree ``base``."""
        with self.store.using():
            if not self.has(root):
                raise NotFound(
                    f"the code {root[:12]} is no longer kept here", hint="submit the job again, from its folder"
                )
            known = trees.parse_id(base) if base and self.has(base) else None
            return list(self.store.reach(trees.parse_id(root), known))

    def tidy(self, limit_bytes: int, keep: Iterable[str]) -> gc.Tidied:
        with self._one_at_a_time:
            self._remembered.clear()  # the contents they refer to may be deleted
            return gc.tidy(self.store, limit_bytes, [trees.parse_id(root) for root in keep])

    def _remember(self, folder: str, found: Scan) -> None:
        """Keeps the scans of the last folders: most are stored again and again."""
        if found.entries <= _MOST_REMEMBERED:
            self._remembered[folder] = found.folders
        while len(self._remembered) > _FOLDERS_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def size_bytes(self) -> int:
        return gc.disk_bytes(self.store)

    def _take(self, request: SnapshotRequest) -> StoredSnapshot:
        began = time.monotonic()
        found = scan(request.folder, request.choices, self._remembered.pop(request.folder, None), self._check)
        if found.bytes > request.max_bytes and not request.is_forced:
            raise _too_large(found, request)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.store.using():
            taking = _Snapshotting(self.store, self._stat_cache, request, self._check)
            try:
                root = taking.take(found)
            finally:
                taking.close()
            if not self.store.has_root(root):
                self.store.complete(root)
            self._stat_cache.save()
        self._remember(request.folder, found)
        return StoredSnapshot(
            root.hex(), request.folder, found.files, found.bytes, taking.read_files, taking.kept_bytes,
            time.monotonic() - began, tuple(found.skipped),
        )  # fmt: skip


@contextlib.contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """For errors of the store itself: those of the folder that is read are named where they arise."""
    try:
        yield
    except OSError as error:
        text = f"the code cannot be stored in {folder}: {(error.strerror or str(error)).lower()}"
        raise UgroError(text, hint="make room there, or free some: ugro node gc") from error


class _Snapshotting:
    """One pass over a scanned folder."""

    def __init__(
        self, store: ContentStore, stat_cache: StatCache, request: SnapshotRequest, check: Callable[[], None]
    ) -> None:
        self._check = check
        self._store = store
        self._stat_cache = stat_cache
        self._request = request
        self._root = os.fsencode(os.path.realpath(request.folder))
        self._writer: PackWriter | None = None
        self.read_files = 0
        self.kept_bytes = 0

    def take(self, found: Scan) -> bytes:
        unknown = [file for file in found.root.all_files() if not self._is_known(file)]
        self._request.reading.begin(sum(file.status.st_size for file in unknown))
        self._read_all(unknown)
        root = self._tree(found.root)
        if self._writer is not None:
            self.kept_bytes = self._writer.bytes
            self._writer.finish()
        return root

    def close(self) -> None:
        if self._writer is not None:
            self._writer.discard()

    def _is_known(self, file: FoundFile) -> bool:
        if file.status.st_size == 0:
            file.is_sure = True
            return True
        body = self._stat_cache.find(file.status, trusts_times=self._request.trusts_times)
        if body is None or self._store.lacks(body[at : at + 32] for at in range(0, len(body), 32)):
            return False
        file.body, file.is_sure = body, True
        return True

    # --- reading -----------------------------------------------------------------------------------------------

    def _read_all(self, files: list[FoundFile]) -> None:
        if not files:
            return
        self.read_files = len(files)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="hash") as pool:
            pending: deque[Future[Contents]] = deque()
            try:
                for task in self._tasks(files):
                    self._check()
                    pending.append(pool.submit(task))
                    if len(pending) > 2 * _THREADS:
                        self._keep(pending.popleft().result())
                while pending:
                    self._keep(pending.popleft().result())
            finally:
                for future in pending:
                    future.cancel()

    def _tasks(self, files: Iterable[FoundFile]) -> Iterator[Callable[[], Contents]]:
        batch: list[FoundFile] = []
        size = 0
        for file in files:
            if file.status.st_size > trees.CHUNK:
                yield from self._chunks(file)
                continue
            batch.append(file)
            size += file.status.st_size
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
                yield partial(self._read_small, batch)
                batch, size = [], 0
        if batch:
            yield partial(self._read_small, batch)

    def _read_small(self, files: list[FoundFile]) -> Contents:
        found: Contents = []
        for file in files:
            read_at = now_ns()
            fd = self._open(file)
            try:
                content = os.read(fd, file.status.st_size + 1)
                _expect_same(file, fd, len(content))
            except OSError as error:
                raise failure(file.path, error) from error
            finally:
                os.close(fd)
            self._request.reading.add(len(content))
            file.body = trees.identify(trees.CONTENT, content)
            file.is_sure = self._stat_cache.note(file.status, file.body, read_at)
            if file.body not in self._store:
                found.append((file.body, content))
        return found

    def _chunks(self, file: FoundFile) -> Iterator[Callable[[], Contents]]:
        """Of a large file, in order; the file is checked before the first and after the last."""
        large = _LargeFile(file, self._open(file), now_ns())
        count = -(-file.status.st_size // trees.CHUNK)
        for number in range(count):
            yield partial(self._read_chunk, large, number, count)

    def _read_chunk(self, large: _LargeFile, number: int, count: int) -> Contents:
        content = large.read(number)
        self._request.reading.add(len(content))
        key = trees.identify(trees.CONTENT, content)
        if large.note(number, key, count):
            large.file.is_sure = self._stat_cache.note(large.file.status, large.file.body, large.read_at)
        return [] if key in self._store else [(key, content)]

    def _open(self, file: FoundFile) -> int:
        try:
            return os.open(os.path.join(self._root, file.path), _READ | (0 if file.is_link else os.O_NOFOLLOW))
        except OSError as error:
            raise failure(file.path, error) from error

    def _keep(self, contents: Contents) -> None:
        for key, content in contents:
            self._writing().add(key, trees.CONTENT, content)

    def _writing(self) -> PackWriter:
        if self._writer is None:
            self._writer = PackWriter(self._store)
        return self._writer

    # --- the tree ----------------------------------------------------------------------------------------------

    def _tree(self, folder: FoundFolder) -> bytes:
        subtrees = [self._tree(inner) for _, inner in folder.folders]
        if folder.tree is None or folder.subtrees != subtrees:
            folder.tree, folder.subtrees = self._encoded(folder, subtrees), subtrees
        return folder.tree

    def _encoded(self, folder: FoundFolder, subtrees: list[bytes]) -> bytes:
        entries = [
            trees.TreeEntry(name, trees.FILE, file.status.st_mode & 0o777, file.status.st_size, file.body)
            for name, file in folder.files
        ]
        entries += [trees.TreeEntry(name, trees.LINK, 0, 0, target) for name, target in folder.links]
        below = zip(folder.folders, subtrees, strict=True)
        entries += [trees.TreeEntry(name, trees.FOLDER, inner.mode, 0, tree) for (name, inner), tree in below]
        content = trees.encode(entries)
        key = trees.identify(trees.TREE, content)
        if key not in self._store:
            self._writing().add(key, trees.TREE, content)
        return key


class _LargeFile:
    """Read by several threads, closed by the last."""

    def __init__(self, file: FoundFile, fd: int, read_at: int) -> None:
        self.file = file
        self.read_at = read_at
        self._fd = fd
        self._keys: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, number: int) -> bytes:
        wanted = min(trees.CHUNK, self.file.status.st_size - number * trees.CHUNK)
        try:
            content = os.pread(self._fd, wanted, number * trees.CHUNK)
        except OSError as error:
            raise failure(self.file.path, error) from error
        if len(content) != wanted:
            raise Changed(f"{shown(self.file.path)} became shorter")
        return content

    def note(self, number: int, key: bytes, count: int) -> bool:
        """True for the last chunk, if the file has not changed."""
        with self._lock:
            self._keys[number] = key
            is_last = len(self._keys) == count
        if is_last:
            _expect_same(self.file, self._fd, self.file.status.st_size)
            self.file.body = b"".join(self._keys[index] for index in range(count))
        return is_last


def _expect_same(file: FoundFile, fd: int, read_bytes: int) -> None:
    """Raises if the file changed since the scan: half of what was read may be old and half new."""
    now, seen = os.fstat(fd), file.status
    was = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    if (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns) != was or read_bytes != seen.st_size:
        raise Changed(f"{shown(file.path)} changed while it was read")


def _too_large(found: Scan, request: SnapshotRequest) -> UsageError:
    paths = largest(found, 10)
    lines = "".join(f"\n  {format_size(size):>10}  {shown(path)}" for path, size in paths)
    text = f"{request.folder} has {format_size(found.bytes)} in {found.files:,} files, more than "
    if not request.is_code:
        text += f"sync.folder_limit ({format_size(request.max_bytes)})"
        return UsageError(text, hint="name a smaller folder, or raise the limit in the cluster file")
    text += "sync.max_size"
    return UsageError(
        f"{text} ({format_size(request.max_bytes)}); nothing was sent. The largest:{lines}",
        hint=f"{exclude(paths[0][0], request.folder)}; or send all of it: --force",
    )


# --- how a folder is read ---------------------------------------------------------------------------------------------
# A job names the folder. A client on another machine reads its own in the same way.


_LINK_HINT = "put the file itself there instead of the link, or name the folder that the link leads to"


def folder_request(name: str, path: Path, limit_bytes: int, reading: Reading) -> SnapshotRequest:
    """Raises UsageError if it is neither a folder nor a file. Blocks."""
    is_file = stat.S_ISREG(_kind_of(name, path))
    choices = Choices(
        follows_links=is_file or _is_hub_snapshot(path),
        links_out=Links.ERROR,
        link_hint=_LINK_HINT,
        reads_rules=False,
        only=os.fsencode(path.name) if is_file else None,
    )
    folder = path.parent if is_file else path
    return SnapshotRequest(str(folder), choices, limit_bytes, is_code=False, reading=reading)


def _kind_of(name: str, path: Path) -> int:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"folder {name}: {path}: {why}", hint="name a folder or a file on this machine") from error
    kind = stat.S_IFMT(mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(f"folder {name}: {path} is neither a folder nor a file", hint="name a folder or a file")
    return kind


def _is_hub_snapshot(path: Path) -> bool:
    """In a cache of Hugging Face: its files are links to those that all revisions share."""
    return path.parent.name == "snapshots" and (path.parent.parent / "blobs").is_dir()
