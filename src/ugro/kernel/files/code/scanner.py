"""Finds the files of a folder that are sent, without reading them. Names are bytes, as on the disk.

A folder or file that cannot be read is an error that names it: the job may need it. What is no file, folder or link
is skipped, with a sentence about it.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sqlite3
import stat
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ugro.kernel.files.code.gitignore import IgnoreRules, above, folder_rules
from ugro.kernel.support.errors import UgroError, UsageError
from ugro.node import trees

_OUR_OWN = b".ugro"  # what UGRO keeps on a node, which may be this machine
_MOST_ENTRIES = 1_000_000
_LONGEST_PATH = 3500  # bytes of a folder's path: a node puts its own before it, and Linux ends at 4096
_LONGEST_SHOWN = 300  # characters of a path in a message
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Deleted, or replaced by something else, since it was listed.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE})


class Links(StrEnum):
    """What to do with a symbolic link that leads out of the folder."""

    KEEP = "keep"
    FOLLOW = "follow"
    SKIP = "skip"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Choices:
    exclude: tuple[str, ...] = ()
    follows_links: bool = False
    links_out: Links = Links.KEEP
    skip: frozenset[tuple[int, int]] = frozenset()  # device and inode of files and folders that are not sent
    reads_rules: bool = True  # ignore files have a say
    only: bytes | None = None  # of what is in the folder, this alone
    link_hint: str = "exclude it, or see sync.outside_links in docs/sync.md"


@dataclass(slots=True)
class FoundFile:
    path: bytes  # from the root of the tree
    status: os.stat_result
    is_link: bool = False  # followed: read through a link
    body: bytes = b""
    is_sure: bool = False  # a change would be noticed


@dataclass(slots=True)
class FoundFolder:
    path: bytes  # empty, or with a slash at its end
    mode: int = 0o755
    files: list[tuple[bytes, FoundFile]] = field(default_factory=list)
    folders: list[tuple[bytes, FoundFolder]] = field(default_factory=list)
    links: list[tuple[bytes, bytes]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # one sentence each
    own_bytes: int = 0  # of its files
    # What it looked like, and the resulting tree, which is reused as long as it looks the same.
    look: object = None
    tree: bytes | None = None
    subtrees: list[bytes] = field(default_factory=list)

    def all_files(self) -> Iterator[FoundFile]:
        """Without those of unchanged folders, which are known."""
        todo = [self]
        while todo:
            folder = todo.pop()
            if folder.tree is None:
                yield from (file for _, file in folder.files)
            todo += [inner for _, inner in folder.folders]

    @property
    def can_be_used_again(self) -> bool:
        return self.tree is not None and all(file.is_sure and not file.is_link for _, file in self.files)


Remembered = dict[tuple[int, int], FoundFolder]  # by device and inode


@dataclass(slots=True)
class Scan:
    root: FoundFolder
    folders: Remembered = field(default_factory=dict)
    entries: int = 0
    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)  # one sentence each


@dataclass(frozen=True, slots=True)
class _OpenFolder:
    """A folder that is being scanned."""

    folder: FoundFolder
    fd: int
    rules: IgnoreRules
    within: tuple[tuple[int, int], ...]  # the folders that lead here


def scan(
    folder: str, choices: Choices, before: Remembered | None = None, check: Callable[[], None] = lambda: None
) -> Scan:
    """``before``: the folders of the last scan. ``check`` is called now and then, and raises to end the scan."""
    try:
        fd = os.open(folder, _FOLDER)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "no such directory" if is_missing else (error.strerror or str(error)).lower()
        raise UsageError(f"{folder}: {why}", hint="--workdir names the folder of its code") from error
    try:
        scanner = _Scanner(os.path.realpath(folder), choices, before or {}, check)
    except UgroError:
        os.close(fd)
        raise
    return scanner.scan(fd)


class _Scanner:
    def __init__(self, root: str, choices: Choices, before: Remembered, check: Callable[[], None]) -> None:
        self._check = check
        self._root = os.fsencode(root)
        self._choices = choices
        self._before = before
        try:
            rules = above(root) if choices.reads_rules else []
            top = rules[0][2] if rules else root
            # The root, relative to the folder of the topmost rules.
            self._base = os.fsencode(os.path.relpath(root, top)) + b"/" if rules else b""
            self._ignoring = IgnoreRules.of(choices.exclude, self._base)
            for name, text, place in rules:
                below = os.fsencode(os.path.relpath(place, top))
                self._ignoring = self._ignoring.with_rules(name, text, b"" if below == b"." else below + b"/")
        except OSError as error:
            raise _no_rules(error) from error
        self._result = Scan(FoundFolder(b""))

    def scan(self, fd: int) -> Scan:
        self._result.root = self._look(b"", fd, self._ignoring, ())
        return self._result

    def _look(self, path: bytes, fd: int, rules: IgnoreRules, within: tuple[tuple[int, int], ...]) -> FoundFolder:
        """Closes the descriptor."""
        try:
            self._check()
            status = os.fstat(fd)
            here = (status.st_dev, status.st_ino)
            self._expect_end(path, here, within)
            entries = _listed(fd)
            rules = self._rules(path, fd, rules, entries)
            look = [path, status.st_mode, rules, self._choices]
            look += [
                (name, one.st_mode, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino)
                for name, one in entries.items()
            ]
            folder = self._same(here, look)
            if folder is None:
                folder = FoundFolder(path, status.st_mode & 0o777, look=look)
                self._fill(_OpenFolder(folder, fd, rules, (*within, here)), entries)
            else:
                for number, (name, inner) in enumerate(folder.folders):
                    below = _opened(inner.path, name, fd, os.O_NOFOLLOW)
                    folder.folders[number] = (name, self._look(inner.path, below, rules, (*within, here)))
            self._count(folder, len(entries))
            self._result.folders[here] = folder
        except OSError as error:
            raise failure(path, error) from error
        finally:
            os.close(fd)
        return folder

    def _expect_end(self, path: bytes, here: tuple[int, int], within: tuple[tuple[int, int], ...]) -> None:
        if here in within:
            raise Unusable(path, f"{shown(path)} leads back to itself by a link", UsageError)
        if len(within) > trees.MOST_DEPTH:
            raise Unusable(path, f"{shown(path)} is more than {trees.MOST_DEPTH} folders deep", UsageError)
        if len(path) > _LONGEST_PATH:
            raise Unusable(path, f"the path {shown(path)} is too long: {len(path):,} bytes", UsageError)

    def _rules(self, path: bytes, fd: int, rules: IgnoreRules, names: Container[str]) -> IgnoreRules:
        if not self._choices.reads_rules:
            return rules
        try:
            return folder_rules(names, fd, rules, self._base + path)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise _no_rules(OSError(error.errno, error.strerror, path + error.filename)) from error
            raise failure(path + error.filename, error) from error

    def _same(self, here: tuple[int, int], look: object) -> FoundFolder | None:
        known = self._before.get(here)
        return known if known is not None and known.can_be_used_again and known.look == look else None

    def _fill(self, place: _OpenFolder, entries: dict[str, os.stat_result]) -> None:
        folder = place.folder
        base = self._base + folder.path
        for text, status in entries.items():
            name = os.fsencode(text)
            kind = stat.S_IFMT(status.st_mode)
            if name == _OUR_OWN or place.rules.ignores(base, name, is_folder=kind == stat.S_IFDIR):
                continue
            if self._choices.only not in (None, name) or (status.st_dev, status.st_ino) in self._choices.skip:
                continue
            if kind == stat.S_IFREG:
                self._file(folder, name, FoundFile(folder.path + name, status))
            elif kind == stat.S_IFDIR:
                self._folder(place, name, os.O_NOFOLLOW)
            elif kind == stat.S_IFLNK:
                self._link(place, name)
            else:
                folder.skipped.append(f"{shown(folder.path + name)} is neither a file nor a folder")

    def _file(self, folder: FoundFolder, name: bytes, file: FoundFile) -> None:
        folder.files.append((name, file))
        folder.own_bytes += file.status.st_size

    def _folder(self, place: _OpenFolder, name: bytes, flags: int) -> None:
        path = place.folder.path + name + b"/"
        inner = self._look(path, _opened(path, name, place.fd, flags), place.rules, place.within)
        place.folder.folders.append((name, inner))

    def _count(self, folder: FoundFolder, entries: int) -> None:
        self._result.files += len(folder.files) + len(folder.links)
        self._result.bytes += folder.own_bytes
        self._result.skipped += folder.skipped
        self._result.entries += entries
        if self._result.entries > _MOST_ENTRIES:
            raise UgroError(
                f"more than {_MOST_ENTRIES:,} files and folders",
                hint="is this the right folder? --workdir DIR; --no-sync sends nothing; .ugroignore leaves things out",
            )

    # --- links -------------------------------------------------------------------------------------------------

    def _link(self, place: _OpenFolder, name: bytes) -> None:
        path = place.folder.path
        target = target_of(path + name, name, place.fd)
        inside = self._inside(path, target)
        policy = Links.FOLLOW if self._choices.follows_links else self._choices.links_out
        if not self._choices.follows_links and (inside is not None or policy is Links.KEEP):
            place.folder.links.append((name, target if inside is None else inside))
        elif policy is Links.FOLLOW:
            self._follow(place, name)
        elif policy is Links.SKIP:
            place.folder.skipped.append(f"{shown(path + name)} leads out of the folder")
        else:
            raise UsageError(
                f"{shown(path + name)} leads out of the folder, to {shown(target)}",
                hint=self._choices.link_hint,
            )

    def _inside(self, folder: bytes, target: bytes) -> bytes | None:
        """The target as a path that works wherever the tree is; None if it leads out of it."""
        place = os.path.join(self._root, folder)
        whole = os.path.normpath(os.path.join(place, target))
        if whole != self._root and not whole.startswith(self._root + b"/"):
            return None
        return os.path.relpath(whole, place) if os.path.isabs(target) else target

    def _follow(self, place: _OpenFolder, name: bytes) -> None:
        place.folder.look = None  # the target of a link changes unnoticed
        try:
            status = os.stat(name, dir_fd=place.fd)
        except OSError:
            place.folder.skipped.append(f"{shown(place.folder.path + name)} leads nowhere")
            return
        if stat.S_ISDIR(status.st_mode):
            self._folder(place, name, 0)
        elif stat.S_ISREG(status.st_mode):
            self._file(place.folder, name, FoundFile(place.folder.path + name, status, is_link=True))
        else:
            place.folder.skipped.append(f"{shown(place.folder.path + name)} leads to neither a file nor a folder")


def _listed(folder: int) -> dict[str, os.stat_result]:
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found[entry.name] = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted since it was listed
                continue
    return found


def _opened(path: bytes, name: bytes, folder: int, flags: int) -> int:
    try:
        return os.open(name, _FOLDER | flags, dir_fd=folder)
    except OSError as error:
        raise failure(path, error) from error


def target_of(path: bytes, name: bytes, folder: int) -> bytes:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.EINVAL:  # it is no link any more
            raise Changed(f"{shown(path)} changed") from error
        raise failure(path, error) from error


class Changed(Exception):
    """Something was deleted during the scan, which is to be repeated."""


class Unusable(Exception):
    """A path that cannot be sent. The caller knows how the folder was named, and makes an error of it."""

    def __init__(self, path: bytes, text: str, kind: type[UgroError] = UgroError) -> None:
        super().__init__(text)
        self._path, self._text, self._kind = path, text, kind

    def as_error(self, folder: str, *, is_code: bool = True) -> UgroError:
        if not is_code:
            return self._kind(f"{folder}: {self._text}", hint="make it readable, or remove it there")
        return self._kind(self._text, hint=exclude(self._path, folder))


def failure(path: bytes, error: OSError) -> Changed | Unusable:
    """Why a path could not be read: it changed meanwhile, or it cannot be read at all."""
    if error.errno in _GONE:
        return Changed(f"{shown(path)} changed")
    return Unusable(path, f"{shown(path)} cannot be read: {(error.strerror or str(error)).lower()}")


def _no_rules(error: OSError) -> UgroError:
    """Without them, files would be sent that are to stay here."""
    path = os.fsencode(error.filename or ".gitignore")
    text = f"{shown(path)} cannot be read: {(error.strerror or str(error)).lower()}"
    to_do = "shorten it" if error.errno == errno.EFBIG else "make it readable"
    return UgroError(text, hint=f"{to_do}: its rules decide what is sent")


# --- what is large ----------------------------------------------------------------------------------------------------


def largest(scan: Scan, count: int) -> list[tuple[bytes, int]]:
    """Paths and their bytes: whole folders, unless one part makes up most of a folder."""
    found: list[tuple[bytes, int]] = []
    todo = [scan.root]
    sizes = _sizes(scan.root)
    while todo:
        folder = todo.pop()
        found += [(folder.path + name, file.status.st_size) for name, file in folder.files]
        for _, inner in folder.folders:
            parts = [file.status.st_size for _, file in inner.files] + [sizes[one.path] for _, one in inner.folders]
            if parts and max(parts) > 0.5 * sizes[inner.path]:
                todo.append(inner)
            else:
                found.append((inner.path, sizes[inner.path]))
    return sorted(found, key=lambda one: -one[1])[:count]


def _sizes(root: FoundFolder) -> dict[bytes, int]:
    order: list[FoundFolder] = [root]
    for folder in order:
        order += [inner for _, inner in folder.folders]
    sizes: dict[bytes, int] = {}
    for folder in reversed(order):
        sizes[folder.path] = sum(file.status.st_size for _, file in folder.files) + sum(
            sizes[inner.path] for _, inner in folder.folders
        )
    return sizes


def shown(path: bytes) -> str:
    """On one line, whatever characters it has."""
    text = os.fsdecode(path) or "./"
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[: _LONGEST_SHOWN // 2]}…{text[-_LONGEST_SHOWN // 2 :]}"
    return text if text.isprintable() else repr(text)


def exclude(path: bytes, folder: str) -> str:
    """A command that leaves the path out, if it can be written as one."""
    text = os.fsdecode(path)
    if not text or len(text) > _LONGEST_SHOWN or not text.isprintable() or text.endswith(" "):
        return "leave it out: .ugroignore; see docs/sync.md"
    pattern = re.sub(r"([*?\[\\])", r"\\\1", f"/{text}").replace("'", "'\\''")
    file = shlex.quote(os.path.join(folder, ".ugroignore"))
    # Some shells' echo takes a backslash for the beginning of something else.
    write = "printf '%s\\n'" if "\\" in pattern else "echo"
    return f"leave it out: {write} '{pattern}' >> {file}"


# --- hashes of files that were read before ----------------------------------------------------------------------------
# An unchanged file is not read again. It is identified by device, inode, size and the times of its last changes. A file
# that changed so shortly before it was read that a second change could carry the same time is not cached.


# The resolution of times on a disk, and on those that store whole seconds only.
_TICK_NS = 20_000_000
_COARSE_NS = 2_000_000_000
_SECOND_NS = 1_000_000_000
_MOST = 500_000
_MAKE = """CREATE TABLE IF NOT EXISTS files (
    device INTEGER, inode INTEGER, size INTEGER, modified INTEGER, changed INTEGER, body BLOB,
    PRIMARY KEY (device, inode)) WITHOUT ROWID"""

Known = tuple[int, int, int, bytes]  # size, modified, changed, body


class StatCache:
    """Not thread-safe. If it is lost, files are read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, int], Known] | None = None
        self._fresh: set[tuple[int, int]] = set()

    def find(self, status: os.stat_result, *, trusts_times: bool) -> bytes | None:
        """The hashes of its chunks. ``trusts_times``: size and modification time are enough."""
        known = self._all().get((status.st_dev, status.st_ino))
        if known is None or known[0] != status.st_size or known[1] != status.st_mtime_ns:
            return None
        return known[3] if trusts_times or known[2] == status.st_ctime_ns else None

    def note(self, status: os.stat_result, body: bytes, read_at_ns: int) -> bool:
        """False: it was not cached. ``read_at_ns``: the time before the first byte was read."""
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        if changed > read_at_ns - (_TICK_NS if changed % _SECOND_NS else _COARSE_NS):
            return False
        key = (status.st_dev, status.st_ino)
        self._all()[key] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, body)
        self._fresh.add(key)
        return True

    def save(self) -> None:
        if not self._fresh:
            return
        known = self._all()
        if len(known) > _MOST:  # most of them of files that no longer exist
            known = self._known = {key: known[key] for key in self._fresh}
            self._path.unlink(missing_ok=True)
        rows = [(*map(_signed, key), *known[key]) for key in self._fresh if max(known[key][:3]) < 1 << 63]
        self._fresh = set()
        try:
            with self._open() as db:
                db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.close()
        except sqlite3.Error:
            self._path.unlink(missing_ok=True)

    def _all(self) -> dict[tuple[int, int], Known]:
        if self._known is None:
            self._known = self._load()
        return self._known

    def _load(self) -> dict[tuple[int, int], Known]:
        try:
            db = self._open()
            rows = db.execute("SELECT device, inode, size, modified, changed, body FROM files").fetchall()
            db.close()
        except sqlite3.Error:
            self._path.unlink(missing_ok=True)
            return {}
        return {(_unsigned(row[0]), _unsigned(row[1])): row[2:] for row in rows}

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=5.0)
        db.execute("PRAGMA synchronous = OFF")  # losing it costs only time
        db.execute(_MAKE)
        return db


def now_ns() -> int:
    return time.time_ns()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number
