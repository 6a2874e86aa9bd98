"""`contents.*`: the code of jobs on this node, addressed by hash: looked up, received, cleaned up.

All agents that use this folder share it: a content is what its hash says, no matter who sent it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import shutil
from typing import Any, Callable, Dict, Iterator, List, Optional

from ugro.node import machine as disk
from ugro.node import trees, worker
from ugro.node.files import checkout, gc
from ugro.node.files import packs as fsync
from ugro.node.files.packs import LOCK_S, ContentStore, Lacking, PackWriter
from ugro.node.program import Call, Refused, method
from ugro.node.runs.rundir import RunDir, agent_of
from ugro.node.trees import BlockReader, StreamError

WINDOW = 4 << 20  # unacknowledged: less would leave a link with a long delay idle
MOST_PUT = 128 * 1024
_SEEN_AT_ONCE = 512 << 20
_SYNC_S = 1.0
_PIECE = 1 << 20
_MOST_LACKING = 8000  # named in one answer

Answer = Dict[str, Any]


@functools.lru_cache(maxsize=None)
def store_in(root: str) -> ContentStore:
    """The store of a node; ``root`` is the folder that contains all files of UGRO there."""
    return ContentStore(os.path.join(os.path.realpath(root), ".ugro", "contents"))


@method("contents.has")
def has(call: Call, *, root: str) -> None:
    """Says whether a code tree is complete."""
    store = _store(call)
    call.finish({"has": store.has_root(trees.parse_id(root))})


@method("contents.missing")
def missing(call: Call) -> None:
    """Receives hashes; answers with one bit for each: 1 if its content is missing."""
    store = _loaded(_store(call))
    worker.receive(call, lambda out, took: {"missing": _missing(store, out, took)})


@method("contents.receive")
def receive(call: Call, *, root: str, size: int, limit_bytes: int) -> None:
    """Takes contents as a stream."""
    receiving = _Receiver(_loaded(_store(call)), root, size, limit_bytes)
    worker.receive(call, receiving.receive, WINDOW)
    _sync_when_done(call, receiving)


@method("contents.put")
def put(call: Call, *, root: str, size: int, limit_bytes: int, block: str) -> None:
    """As ``receive``, for so little that a separate process would take longer; busy if it might take long."""
    store = _store(call)
    content = base64.b64decode(block, validate=True)
    if len(content) > MOST_PUT or store.unseen_bytes() > _SEEN_AT_ONCE:
        raise Refused("busy", "this may take long; use receive")
    receiving = _Receiver(store, root, size, limit_bytes)
    try:
        call.finish(receiving.put(content))
    finally:
        store.close()  # a fork must not inherit its descriptors
    _sync_when_done(call, receiving)


@method("contents.tidy", is_routine=True)
def tidy(call: Call, *, limit_bytes: int) -> None:
    """Deletes the contents that were used least recently."""
    store, limit_bytes = _store(call), int(limit_bytes)

    def work() -> Answer:
        done = gc.tidy(store, limit_bytes)
        return {"freed_bytes": done.freed_bytes, "kept_bytes": done.kept_bytes, "trees": done.roots}

    worker.do(call, work)


# --- for runs ---------------------------------------------------------------------------------------------------


def check_out(run: RunDir, root: bytes, folder: Optional[str] = None, wait_s: float = LOCK_S) -> None:
    """Writes the tree into the working directory of the run, or into another folder."""
    with _found(run, root, wait_s) as store:
        checkout.check_out(store, root, folder or run.file("work"))


def fill(run: RunDir, root: bytes, folder: str, most_entries: int) -> bool:
    """The same into an empty folder that is not the run's yet; False, and emptied again, if it would take long."""
    is_filled = False
    try:
        with _found(run, root, wait_s=0) as store:
            checkout.fill(store, root, folder, most_entries)
        is_filled = True
    except checkout.TooLarge:
        pass
    except Refused as refusal:
        if refusal.kind != "busy":
            raise
    finally:
        if not is_filled:
            empty(folder)
    return is_filled


def empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


@contextlib.contextmanager
def reading(run: RunDir, root: Optional[bytes], wait_s: float = LOCK_S) -> Iterator[Optional[ContentStore]]:
    """The store with that tree in it; None if there is no tree, or it was deleted. Refused while it is cleaned up."""
    if root is None:
        yield None
        return
    store = store_in(run.agent.root)
    with store.using(wait_s=wait_s):
        yield store if store.has_root(root) else None


@contextlib.contextmanager
def _found(run: RunDir, root: bytes, wait_s: float = LOCK_S) -> Iterator[ContentStore]:
    store = store_in(run.agent.root)
    try:
        with store.using(wait_s=wait_s):
            if not store.has_root(root):
                raise Lacking([root])
            yield store
    except Lacking as error:
        store.disown(root)  # else the agent hears that the code is there, and sends it never again
        raise Refused("no-code", "the code of %s is not on this node" % run.name) from error
    except OSError as error:
        if not disk.is_full(error):
            raise
        kind, text = disk.refusal(error, run.agent.root)
        raise Refused(kind, "%s; there is no room for the code of %s" % (text, run.name)) from error


# --- helpers ----------------------------------------------------------------------------------------------------


def _store(call: Call) -> ContentStore:
    agent_of(call)  # one that was replaced is refused
    return store_in(call.program.root)


def _sync_when_done(call: Call, receiving: _Receiver) -> None:
    """Later, so that nobody waits for it."""

    def sync() -> None:
        if call.is_done:
            fsync.sync_in_background(receiving.store.packs, receiving.tidy)
        else:
            call.program.after(_SYNC_S, sync)

    call.program.after(_SYNC_S, sync)


def _loaded(store: ContentStore) -> ContentStore:
    """Loads the index before a fork, so that the new process has it, too; if that would take long, it is left to it."""
    if store.unseen_bytes() <= _SEEN_AT_ONCE:
        store.refresh()
        store.close()  # a fork must not inherit its descriptors
    return store


def _missing(store: ContentStore, out: int, took: Callable[[int], None]) -> str:
    with store.using():
        store.salvage()
        bits = bytearray()
        rest = b""
        count = 0
        for piece in iter(lambda: os.read(out, _PIECE), b""):
            ids = rest + piece
            whole = len(ids) - len(ids) % trees.ID_BYTES
            for at in range(0, whole, trees.ID_BYTES):
                if count % 8 == 0:
                    bits.append(0)
                bits[-1] |= (ids[at : at + trees.ID_BYTES] not in store) << count % 8
                count += 1
            rest = ids[whole:]
            took(len(piece))
    return base64.b64encode(bytes(bits)).decode()


class _Receiver:
    def __init__(self, store: ContentStore, root: str, size: int, limit_bytes: int) -> None:
        self.store = store
        self._root = trees.parse_id(root)
        self._bytes = int(size)
        self._limit_bytes = int(limit_bytes)

    def receive(self, out: int, took: Callable[[int], None]) -> Answer:
        def pieces() -> Iterator[bytes]:
            for piece in iter(lambda: os.read(out, _PIECE), b""):
                yield piece
                took(len(piece))

        with self.store.using():
            return self._receive(pieces())

    def put(self, content: bytes) -> Answer:
        with self.store.using(wait_s=0):
            return self._receive(iter([content]))

    def tidy(self) -> None:
        gc.tidy_when_due(self.store, self._limit_bytes, [self._root])

    def _receive(self, pieces: Iterator[bytes]) -> Answer:
        self.store.expect_room(self._bytes)
        unblocker, writer = BlockReader(), PackWriter(self.store)
        try:
            self._take(unblocker, writer, pieces)
            lacking = self._settle(writer)
        except StreamError as error:
            writer.leave()  # perhaps the link broke, and this process is about to be killed
            raise Refused("damaged", "the code was damaged during the transfer: %s" % error) from error
        except OSError as error:
            if not disk.is_full(error):
                raise
            kind, text = disk.refusal(error, self.store.packs)
            raise Refused(kind, "%s; the code did not fit" % text) from error
        finally:
            writer.discard()  # does nothing after finish; frees space if the disk is full
        named = [key.hex() for key in lacking[:_MOST_LACKING]]
        return {"bad": unblocker.bad, "lacking": named}

    @staticmethod
    def _take(unblocker: BlockReader, writer: PackWriter, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            for key, kind, content in unblocker.feed(piece):
                writer.add(key, kind, content)
        unblocker.finish()

    def _settle(self, writer: PackWriter) -> List[bytes]:
        writer.finish()
        try:
            self.store.complete(self._root)
        except Lacking as error:
            return error.ids
        return []
