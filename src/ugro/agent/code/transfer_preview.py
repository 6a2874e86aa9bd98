"""What a transfer would send to a node, path by path, and why."""

from __future__ import annotations

import os

from ugro.core.code import Travel
from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore

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
