"""The difference of two code snapshots: files, and lines of text files. Its size is bounded: people read it."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

from ugro.kernel.files.model import Travel
from ugro.kernel.support.errors import NotFound
from ugro.node import trees
from ugro.node.files.packs import ContentStore

_MOST_FILES = 300
_MOST_BYTES = 200_000  # of one file whose lines are compared
_MOST_LINES = 400  # shown of one file
_MOST_ALL_LINES = 4000
_CONTEXT = 3


@dataclass(frozen=True, slots=True)
class FileDiff:
    path: str
    change: str  # added, removed, changed, mode
    old_bytes: int
    new_bytes: int
    lines: tuple[str, ...] = ()  # of a unified diff, without its header
    remark: str = ""  # why there are no lines, or not all


@dataclass(frozen=True, slots=True)
class CodeDiff:
    files: tuple[FileDiff, ...]
    more: int  # files that differ and are not listed
    same: int


def code_diff(store: ContentStore, old: str, new: str) -> CodeDiff:
    """Blocks."""
    with store.using():
        before, after = (dict(store.walk(_known(store, root))) for root in (old, new))
        names = [name for name in sorted(before | after) if _value(before.get(name)) != _value(after.get(name))]
        same = len(before | after) - len(names)
        found: list[FileDiff] = []
        room = _MOST_ALL_LINES
        for name in names[:_MOST_FILES]:
            found.append(_file(store, name, before.get(name), after.get(name), room))
            room -= len(found[-1].lines)
    return CodeDiff(tuple(found), max(0, len(names) - _MOST_FILES), same)


def _known(store: ContentStore, root: str) -> bytes:
    key = trees.parse_id(root)
    if not store.has_root(key):
        raise NotFound(f"the code {root[:12]} is no longer kept here", hint="it is only known that it differs")
    return key


def _value(entry: trees.TreeEntry | None) -> object:
    return entry and (entry.kind, entry.mode, entry.body)


def _file(
    store: ContentStore, name: bytes, old: trees.TreeEntry | None, new: trees.TreeEntry | None, room: int
) -> FileDiff:
    path = os.fsdecode(name).encode("utf-8", "backslashreplace").decode()
    sizes = (old.size if old else 0, new.size if new else 0)
    if old is None or new is None:
        change = "added" if old is None else "removed"
    else:
        change = "changed" if old.body != new.body or old.kind != new.kind else "mode"
    if change == "mode":
        return FileDiff(path, change, *sizes, remark=f"mode {old.mode:o} → {new.mode:o}" if old and new else "")
    texts = [_text(store, entry) for entry in (old, new)]
    if texts[0] is None or texts[1] is None:
        return FileDiff(path, change, *sizes, remark="too large, or not text")
    # Without the first two lines, which name the files.
    lines = list(difflib.unified_diff(texts[0], texts[1], n=_CONTEXT, lineterm=""))[2:]
    most = max(0, min(_MOST_LINES, room))
    remark = f"{len(lines) - most} more lines" if len(lines) > most else ""
    return FileDiff(path, change, *sizes, tuple(lines[:most]), remark)


def _text(store: ContentStore, entry: trees.TreeEntry | None) -> list[str] | None:
    if entry is None:
        return []
    if entry.kind == trees.LINK:
        return [f"a link to {os.fsdecode(entry.body)}".encode("utf-8", "backslashreplace").decode()]
    if entry.size > _MOST_BYTES:
        return None
    content = b"".join(store.read(chunk) for chunk in entry.chunks)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.splitlines()


# --- the preview of a transfer ----------------------------------------------------------------------------------------
# Says what a transfer would send to a node, path by path, and why.


_MOST_NAMED = 1000


def preview(
    store: ContentStore, root: bytes, base: str | None, lacking: frozenset[bytes]
) -> tuple[tuple[Travel, ...], int, int]:
    """The paths whose contents a node lacks, the largest first; the number of all of them, and of their bytes."""
    had = trees.parse_id(base) if base else None
    with store.using():
        before = dict(store.walk(had)) if had is not None else {}
        found = [
            Travel(os.fsdecode(path).encode("utf-8", "backslashreplace").decode(), size, _why(before.get(path), entry))
            for path, entry in store.walk(root)
            if entry.kind == trees.FILE
            and ((size := _lacking_bytes(store, entry, lacking)) or set(entry.chunks) & lacking)
        ]
    found.sort(key=lambda one: (-one.bytes, one.path))
    return tuple(found[:_MOST_NAMED]), len(found), sum(one.bytes for one in found)


def _why(before: trees.TreeEntry | None, now: trees.TreeEntry) -> str:
    if before is None:
        return "new"
    return "changed" if before.body != now.body else "missing"


def _lacking_bytes(store: ContentStore, entry: trees.TreeEntry, lacking: frozenset[bytes]) -> int:
    return sum(store.locate(key).size for key in set(entry.chunks) & lacking)
