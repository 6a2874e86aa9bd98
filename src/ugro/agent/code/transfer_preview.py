"""What would travel to a node, path by path, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ugro.core.code import Travel
from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore

_MOST_NAMED = 1000


def travels(
    store: ContentStore, root: bytes, base: str | None, lacking: frozenset[bytes]
) -> tuple[tuple[Travel, ...], int, int]:
    """The paths whose contents a node lacks, the largest first; and how many and how much that is in all."""
    had = trees.parse_id(base) if base else None
    with store.using():
        before = dict(_files(store, had)) if had is not None and had in store else {}
        found = [
            Travel(os.fsdecode(path).encode("utf-8", "backslashreplace").decode(), size, _why(before.get(path), entry))
            for path, entry in _files(store, root)
            if (size := _lacking_bytes(store, entry, lacking)) or set(entry.chunks) & lacking
        ]
    found.sort(key=lambda one: (-one.bytes, one.path))
    return tuple(found[:_MOST_NAMED]), len(found), sum(one.bytes for one in found)


def _why(before: trees.Entry | None, now: trees.Entry) -> str:
    if before is None:
        return "new"
    return "changed" if before.body != now.body else "missing"


def _lacking_bytes(store: ContentStore, entry: trees.Entry, lacking: frozenset[bytes]) -> int:
    return sum(store.place(key).size for key in set(entry.chunks) & lacking)


def _files(store: ContentStore, root: bytes) -> Iterator[tuple[bytes, trees.Entry]]:
    todo = [(b"", root)]
    while todo:
        path, tree = todo.pop()
        if tree not in store:
            continue
        for entry in store.entries(tree):
            if entry.kind == trees.FOLDER:
                todo.append((path + entry.name + b"/", entry.body))
            elif entry.kind == trees.FILE:
                yield path + entry.name, entry
