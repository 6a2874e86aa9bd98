"""Keeps a content store within its limit: the least recently used trees are deleted first.

A running job has its own copy of its code, and a tree that a job is about to start with was used just now.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Dict, Iterable, List, NamedTuple, Set

from ugro.node.files import packs
from ugro.node.files import packs as fsync
from ugro.node.files.packs import ContentStore, PackWriter

RECENT_S = 300.0
_MOST_PACKS = 40
_LEAST_LIVE = 0.7


class Tidied(NamedTuple):
    freed_bytes: int
    kept_bytes: int
    roots: int  # that are left


def tidy(store: ContentStore, limit_bytes: int, keep: Iterable[bytes] = (), recent_s: float = RECENT_S) -> Tidied:
    """``keep``: trees that stay regardless of the limit."""
    with store.using(alone=True):
        store.salvage()
        before = disk_bytes(store)
        wanted = _chosen(store, limit_bytes, set(keep), time.time() - recent_s)
        live = {key for root in wanted for key in store.reach(root)}
        for root, _ in store.roots_by_use():
            if root not in wanted:
                os.unlink(os.path.join(store.roots, root.hex()))
        _rewrite(store, live)
        after = disk_bytes(store)
    return Tidied(max(0, before - after), after, len(wanted))


def tidy_when_due(store: ContentStore, limit_bytes: int, keep: Iterable[bytes] = ()) -> None:
    """After a transfer; looks only at sizes if there is nothing to do."""
    if disk_bytes(store) > limit_bytes or len(os.listdir(store.packs)) > 2 * _MOST_PACKS:
        tidy(store, limit_bytes, keep)


def disk_bytes(store: ContentStore) -> int:
    total = 0
    for name in os.listdir(store.packs) if os.path.isdir(store.packs) else ():
        with contextlib.suppress(FileNotFoundError):
            total += os.path.getsize(os.path.join(store.packs, name))
    return total


def _chosen(store: ContentStore, limit_bytes: int, keep: Set[bytes], recent: float) -> Set[bytes]:
    """The trees that must stay, and as many others as fit, the most recently used first."""
    by_use = store.roots_by_use()
    must = [root for root, used in by_use if root in keep or used >= recent]
    chosen: Set[bytes] = set()
    live: Set[bytes] = set()
    size = 0
    for root in [*must, *(root for root, _ in by_use if root not in must)]:
        more = [key for key in store.reach(root) if key not in live]
        more_bytes = sum(store.locate(key).size for key in more if key in store)
        if root not in must and size + more_bytes > limit_bytes:
            continue
        chosen.add(root)
        live.update(more)
        size += more_bytes
    return chosen


def _rewrite(store: ContentStore, live: Set[bytes]) -> None:
    """Deletes packs that are mostly unused, after moving what is used into a new one."""
    wanted: Dict[str, List[bytes]] = {name: [] for name in os.listdir(store.packs) if name.endswith(packs.PACK)}
    for key in live:
        if key in store:
            wanted[store.locate(key).pack].append(key)
    going = set(_going(store, wanted))
    writer = PackWriter(store)
    try:
        for pack in sorted(going):
            for key in sorted(wanted[pack], key=lambda key: store.locate(key).offset):
                writer.move(key, store.locate(key).kind, store.read(key))
        writer.finish()
    finally:
        writer.discard()
    fsync.sync_packs(store.packs)  # before the originals are deleted
    for pack in going:
        os.unlink(os.path.join(store.packs, pack))
    store.reload()


def _going(store: ContentStore, wanted: Dict[str, List[bytes]]) -> List[str]:
    sizes = {pack: os.path.getsize(os.path.join(store.packs, pack)) for pack in wanted}
    live = {pack: sum(store.locate(key).size for key in keys) for pack, keys in wanted.items()}
    going = [pack for pack in wanted if live[pack] < _LEAST_LIVE * sizes[pack]]
    left = sorted((pack for pack in wanted if pack not in going), key=lambda pack: sizes[pack])
    # Many small packs become one: each of them slows everything down.
    return going + left[: max(0, len(left) - _MOST_PACKS + 1)] if len(left) > _MOST_PACKS else going
