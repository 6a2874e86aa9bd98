"""The code and the folders of this machine, sent to the store of a master: only contents that it lacks.

They are read as the agent reads those of its own machine, by the same scanner, and copied into a store here first:
what is sent is what was read, and an unchanged file is not read again.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ugro.agent.code.folder_request import folder_request
from ugro.agent.code.scanner import Choices, Links
from ugro.agent.code.snapshot_store import EMPTY, Reading, SnapshotRequest, SnapshotStore
from ugro.client.http import AgentGone
from ugro.core.code import Snapshot
from ugro.core.errors import UgroError, UsageError
from ugro.core.folder import Folder
from ugro.core.support.quantity import format_size
from ugro.core.support.state_dir import StateDir
from ugro.remote.cas.stream import BLOCK, block, record

CODE, FOLDERS = "code", "folders"
_LIMITS = {CODE: 2 << 30, FOLDERS: 4 << 30}  # bytes that are kept here after they were sent
_FEW = 64  # contents that are sent without asking
_MOST_KNOWN = 16
_IDS_AT_ONCE = 100_000  # of 32 bytes: a body on a team's socket has 4 MiB at most
_TRIES = 8
_CHUNK = 64 * 1024

Ask = Callable[[str, str, Any], Any]
Upload = Callable[[str, Iterator[bytes]], Any]


@dataclass(slots=True)
class Wire:
    """How to reach the agent. ``say``: how far it is."""

    ask: Ask
    upload: Upload
    say: Callable[[str], None]


class Trees:
    """Of one client: what was read before is remembered."""

    def __init__(self, home: StateDir, wire: Wire) -> None:
        self._home = home
        self._wire = wire
        self._stores: dict[str, SnapshotStore] = {}

    def code(self, folder: str, params: Mapping[str, Any]) -> Snapshot:
        """Read by the rules of the master's cluster. Stored there when this returns."""
        left_out = [self._home.path, *(Path(one) for one in params["without"])]
        about = [os.stat(path) for path in left_out if path.exists()]
        choices = Choices(
            tuple(map(str, params["exclude"])),
            bool(params["follows_links"]),
            Links(params["links_out"]),
            frozenset((one.st_dev, one.st_ino) for one in about),
        )
        request = SnapshotRequest(
            folder, choices, int(params["max_bytes"]), bool(params["force"]), bool(params["trusts_times"])
        )
        taken = self._store(CODE).take(request)
        self._send(CODE, taken.id)
        return Snapshot(taken.id, folder, taken.files, taken.bytes, taken.skipped)

    def folder(self, name: str, path: Path, params: Mapping[str, Any]) -> Folder:
        request = folder_request(name, path, int(params["max_bytes"]), Reading())
        taken = self._store(FOLDERS).take(request)
        if taken.skipped:
            raise UsageError(f"folder {name}: {taken.skipped[0]}", hint="remove it there, or name another folder")
        self._send(FOLDERS, taken.id)
        only = request.choices.only
        return Folder(name, str(path), taken.id, os.fsdecode(only) if only else "", taken.files, taken.bytes)

    def _store(self, which: str) -> SnapshotStore:
        if which not in self._stores:
            self._stores[which] = SnapshotStore(self._home.path / "remote" / which)
        return self._stores[which]

    # --- sending -----------------------------------------------------------------------------------------------

    def _send(self, which: str, root: str) -> None:
        snapshots = self._store(which)
        if root == EMPTY:
            return
        recent = [key.hex() for key, _ in snapshots.store.roots_by_use()[: _MOST_KNOWN + 1]]
        known = {"store": which, "root": root, "known": [one for one in recent if one != root][:_MOST_KNOWN]}
        answer = self._wire.ask("POST", "/v1/remote/known", known)
        if not answer["has"]:
            self._send_contents(which, root, answer["base"])
        if snapshots.size_bytes() > _LIMITS[which]:
            snapshots.tidy(_LIMITS[which], [])

    def _send_contents(self, which: str, root: str, base: str | None) -> None:
        snapshots = self._store(which)
        ids = snapshots.candidates(root, base)
        for is_first in (True, *[False] * (_TRIES - 1)):
            try:
                if not is_first or len(ids) > _FEW:
                    ids = self._missing(which, ids if is_first else snapshots.candidates(root, None))
                if not self._upload(which, root, ids):
                    return
            except AgentGone:
                continue  # what has arrived is kept there
        raise UgroError("the code could not be sent", hint="try again; if it stays so: ugro agent logs on the master")

    def _missing(self, which: str, ids: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for at in range(0, len(ids), _IDS_AT_ONCE):
            some = ids[at : at + _IDS_AT_ONCE]
            whole = b"".join(some)
            pieces = (whole[first : first + _CHUNK] for first in range(0, len(whole), _CHUNK))
            answer = self._wire.upload(f"/v1/remote/missing?{urlencode({'store': which})}", pieces)
            bits = base64.b64decode(str(answer["missing"]))
            found += [key for count, key in enumerate(some) if bits[count >> 3] >> (count & 7) & 1]
        return found

    def _upload(self, which: str, root: str, ids: Sequence[bytes]) -> bool:
        """Whether something is still missing."""
        store = self._store(which).store
        size = sum(store.locate(key).size for key in ids)
        query = urlencode({"store": which, "root": root, "bytes": size})
        answer = self._wire.upload(f"/v1/remote/trees?{query}", self._pieces(which, ids, size))
        return bool(answer["lacking"])

    def _pieces(self, which: str, ids: Sequence[bytes], size: int) -> Iterator[bytes]:
        store, sent = self._store(which).store, 0
        todo = sorted(ids, key=lambda key: store.locate(key)[:2], reverse=True)  # in the order on the disk
        while todo:
            parts: list[bytes] = []
            filled = 0
            while todo and filled < BLOCK:
                key = todo.pop()
                place = store.locate(key)
                parts += record(key, place.kind, store.read(key))
                filled += place.size
            content = block(b"".join(parts), compressed=True)
            for at in range(0, len(content), _CHUNK):
                yield content[at : at + _CHUNK]
            sent += filled
            self._wire.say(f"sending {which}: {format_size(sent)} of {format_size(size)}")
