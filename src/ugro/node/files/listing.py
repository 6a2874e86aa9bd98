"""The files of a run as a list: collected from disk, encoded as lines, identified by a fingerprint.

The agent uses this module too, and neither side trusts the other: ``parse`` rejects every name that could lead out of
the folder it is joined to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from typing import Iterable, Iterator, List, NamedTuple, Optional

# --- checkpoint names -------------------------------------------------------------------------------------------------
# Which entries of a folder are complete checkpoints, and their order, by name. Node and agent use this module.


PART = "checkpoints"  # what they are called as a part of the files of a run
_MOST_NAME_BYTES = 255
_SUFFIXES = re.compile(r"(\.[A-Za-z][A-Za-z0-9_]*)+$")
_NUMBER = re.compile(r"(?:^|[^0-9.]|(?:^|[^0-9])\.)([0-9]{1,18})$")


def is_complete(name: str) -> bool:
    if name.startswith(".") or name.endswith((".tmp", ".partial")):
        return False
    return name.isprintable() and "/" not in name and 0 < len(os.fsencode(name)) <= _MOST_NAME_BYTES


def number(name: str) -> Optional[int]:
    """The one at the end of the name, before suffixes such as .pt."""
    found = _NUMBER.search(_SUFFIXES.sub("", name))
    return int(found.group(1)) if found else None


# --- listing ----------------------------------------------------------------------------------------------------------


MOST_FILES = 100_000
MOST_DEPTH = 100
MOST_BYTES = 1 << 50
_MOST_PATH_BYTES = 4000
_MOST_PROBLEM = 100


class Unsendable(Exception):
    """A checkpoint contains something that cannot be sent; the text is for the user."""


class RunFile(NamedTuple):
    """A file as its node lists it. The name is relative, its parts separated by /; the name of a folder ends with /."""

    name: bytes
    size: int
    changed_ns: int
    inode: int
    problem: Optional[str] = None  # why it cannot be sent
    is_work: bool = False  # nobody asked for it: the job made it in its working directory

    @property
    def is_folder(self) -> bool:
        return self.name.endswith(b"/")


def below(folder: bytes, prefix: bytes = b"", depth: int = 0, *, is_strict: bool = False) -> Iterator[RunFile]:
    """Everything below a folder, without following links. Unless ``is_strict``, what cannot be read is skipped."""
    skipped = () if is_strict else (OSError,)
    names: List[bytes] = []
    with contextlib.suppress(*skipped):
        names = sorted(os.listdir(folder))
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(*skipped):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                yield described(prefix + name, status)
            else:
                yield RunFile(prefix + name + b"/", 0, 0, status.st_ino)
                if depth < MOST_DEPTH:
                    yield from below(path, prefix + name + b"/", depth + 1, is_strict=is_strict)


def described(name: bytes, status: os.stat_result) -> RunFile:
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
    return RunFile(name, status.st_size, status.st_mtime_ns, status.st_ino, problem)


def files_of(path: str) -> List[RunFile]:
    """All of a file or a folder, with its folders; raises ``Unsendable`` if a part of it cannot be sent."""
    whole = os.fsencode(path)
    status = os.lstat(whole)  # os.path.isdir would follow a link
    is_folder = stat.S_ISDIR(status.st_mode)
    found = below(whole, is_strict=True) if is_folder else iter([described(os.path.basename(whole), status)])
    files = []
    for file in found:
        if file.problem is not None:
            raise Unsendable("%s is %s; only files and folders can be sent" % (shown(file.name), file.problem))
        if not is_name(file.name) or (file.is_folder and file.name.count(b"/") > MOST_DEPTH):
            raise Unsendable("%s is too long or too deep to be sent" % shown(file.name))
        files.append(file)
        if len(files) > MOST_FILES:
            raise Unsendable("it has more than %d files and folders" % MOST_FILES)
    return files


def fingerprint(files: Iterable[RunFile]) -> str:
    """Of names, sizes and times of change: the same for a file and for a folder that contains just this file."""
    digest = hashlib.sha256()
    for file in files:
        name = file.name.rstrip(b"/")
        digest.update(b"%s\0%d %d %d\n" % (name, file.is_folder, file.size, file.changed_ns))
    return digest.hexdigest()[:32]


def encoded(files: Iterable[RunFile]) -> Iterator[bytes]:
    lines: List[str] = []
    for file in files:
        lines.append(json.dumps([text(file.name), *file[1:]]))
        if len(lines) >= 500:
            yield ("\n".join(lines) + "\n").encode("ascii")
            lines.clear()
    if lines:
        yield ("\n".join(lines) + "\n").encode("ascii")


def parse(line: bytes) -> RunFile:
    """Raises ValueError for what cannot be a file below a folder."""
    try:
        name, size, changed_ns, inode, problem, is_work = json.loads(line)
        found = RunFile(name.encode("utf-8", "surrogateescape"), size, changed_ns, inode, problem, is_work is True)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("%.100s: %.100r" % (error, line)) from error
    is_whole = all(type(number) is int for number in found[1:4])
    has_numbers = is_whole and 0 <= size < MOST_BYTES and max(abs(changed_ns), abs(inode)) < 1 << 64
    if not has_numbers or not is_name(found.name) or not (problem is None or isinstance(problem, str)):
        raise ValueError("not a file below a folder: %.100r" % line)
    return found._replace(problem=problem[:_MOST_PROBLEM] if problem else None)


def is_name(name: bytes) -> bool:
    """Whether it stays below every folder it is joined to."""
    parts = (name[:-1] if name.endswith(b"/") else name).split(b"/")
    if b"\0" in name or len(name) > _MOST_PATH_BYTES or len(parts) > MOST_DEPTH + 2:
        return False
    return all(part not in (b"", b".", b"..") and len(part) <= _MOST_NAME_BYTES for part in parts)


def parts_of(name: bytes) -> List[str]:
    if not is_name(name) or name.endswith(b"/"):
        raise ValueError("not the name of a file: %.80r" % name)
    return [os.fsdecode(part) for part in name.split(b"/")]


def folders_above(name: bytes) -> Iterator[bytes]:
    """The folders that a file is in, the outermost first."""
    at = name.find(b"/")
    while at >= 0:
        yield name[:at]
        at = name.find(b"/", at + 1)


def text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def name_of(value: object) -> bytes:
    return str(value).encode("utf-8", "surrogateescape")


def shown(name: bytes) -> str:
    return "%.200r" % os.fsdecode(name)
