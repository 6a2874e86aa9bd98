"""What the ignore files of a job's code, and the configuration, say about the files that the job makes.

The ignore files are those that were sent: what is edited here later, or what the job writes on the node, has no say.
Rules of folders above the one that was sent do not apply: then a file is rather collected than not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ugro.agent.code.gitignore import FILES, IgnoreRules
from ugro.agent.code.snapshot_store import SnapshotStore
from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore, Lacking
from ugro.remote.trees import TreeEntry

_Folder = tuple[IgnoreRules, dict[bytes, TreeEntry]]


class ResultRules:
    """Of one tree of code. Not async: call it in a thread."""

    def __init__(self, store: SnapshotStore, root: str | None, patterns: Iterable[str]) -> None:
        self._store = store.store
        self._top = IgnoreRules.of(patterns, b"")
        self._root = trees.parse_id(root) if root is not None and store.has(root) else None
        self._folders: dict[bytes, _Folder] = {}
        self._named: dict[bytes, str | None] = {b"": None}

    def named_by(self, name: bytes) -> str | None:
        """Whose rule ignores a file, or a folder that it is in."""
        folder, _, last = name.rpartition(b"/")
        source = self._folder_named_by(folder)
        if source is None:
            source = self._rules(folder)[0].named_by(_prefix(folder), last, is_folder=False)
        return source

    def _folder_named_by(self, folder: bytes) -> str | None:
        if folder not in self._named:
            above, _, last = folder.rpartition(b"/")
            source = self._folder_named_by(above)
            if source is None:
                source = self._rules(above)[0].named_by(_prefix(above), last, is_folder=True)
            self._named[folder] = source
        return self._named[folder]

    def _rules(self, folder: bytes) -> _Folder:
        """Those that apply in a folder, and what is in it of the code."""
        if folder not in self._folders:
            self._folders[folder] = self._read(folder)
        return self._folders[folder]

    def _read(self, folder: bytes) -> _Folder:
        rules, tree = self._top, self._root
        if folder:
            above, _, last = folder.rpartition(b"/")
            rules, entries = self._rules(above)
            entry = entries.get(last)
            tree = entry.body if entry is not None and entry.kind == trees.FOLDER else None
        entries = _entries(self._store, tree)
        for name in FILES:
            if (file := entries.get(name)) is not None and file.kind == trees.FILE:
                with contextlib.suppress(OSError):  # too many patterns: code that was scanned here has no such file
                    rules = rules.with_rules(name, _content(self._store, file), _prefix(folder))
        return rules, entries


def _prefix(folder: bytes) -> bytes:
    return folder + b"/" if folder else b""


def _entries(store: ContentStore, tree: bytes | None) -> dict[bytes, TreeEntry]:
    """None of a tree that is no longer kept here."""
    if tree is None:
        return {}
    try:
        with store.using():
            return {entry.name: entry for entry in store.entries(tree)}
    except Lacking:
        return {}


def _content(store: ContentStore, file: TreeEntry) -> bytes:
    try:
        with store.using():
            return b"".join(store.read(chunk) for chunk in file.chunks)
    except Lacking:
        return b""
