"""Reads what the script of a job imports from the snapshot of its code. The rules are in ``policy.nodes.imports``."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import PurePosixPath

from ugro.agent.code.snapshot_store import SnapshotStore
from ugro.core.job import Imports, JobSpec, Launcher
from ugro.policy.nodes.imports import imports_of, uses
from ugro.policy.nodes.sdk import MODULE, is_named_in, is_wanted, scripts_in
from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore, Lacking

_MOST_KNOWN = 256
_MOST_SOURCE_BYTES = 512 * 1024
_MOST_FOLDERS = 2000
_Work = tuple[str, Launcher, tuple[str, ...]]  # the snapshot, and what is run of it
_MODULES = (".py", ".pyc", ".pyd", ".so", ".zip", ".egg", ".whl", ".pth")


class ScriptImports:
    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self._known: OrderedDict[tuple[str, str], Imports] = OrderedDict()  # by snapshot and script
        self._wants_sdk: OrderedDict[_Work, bool] = OrderedDict()

    def of(self, snapshot: str, script: str) -> Imports:
        """Blocks."""
        key = (snapshot, str(PurePosixPath(script)))
        known = self._known.get(key)
        if known is None:
            store = self._snapshots.store
            try:
                with store.using():
                    known = imports_of(key[1], StoredTree(store, trees.parse_id(snapshot)))
            except Lacking:  # deleted meanwhile; that is reported when it is sent
                return Imports()
            self._known[key] = known
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return known

    def uses(self, snapshot: str, script: str, module: str) -> bool:
        """Whether the script imports it, itself or by its own modules. Blocks.

        Where its source does not tell: whether any Python file has this word, or there are too many to look at.
        """
        store = self._snapshots.store
        try:
            with store.using():
                tree = StoredTree(store, trees.parse_id(snapshot))
                found = uses(str(PurePosixPath(script)), tree, module)
                return tree.mentions(module.encode()) if found is None else found
        except Lacking:  # deleted meanwhile; that is reported when it is sent
            return True


    def known_sdk(self, spec: JobSpec) -> bool | None:
        """Whether UGRO's own package should go with it, if that takes no look at the code."""
        if spec.launcher is not Launcher.COMMAND:
            return True if spec.snapshot is None else self._wants_sdk.get(_work(spec))
        if is_named_in(spec.argv):
            return True
        if spec.snapshot is None or not any(scripts_in(spec.argv)):
            return False
        return self._wants_sdk.get(_work(spec))

    def sdk(self, spec: JobSpec) -> bool:
        """The same, by a look at the code. Blocks."""
        assert spec.snapshot is not None
        store = self._snapshots.store
        try:
            with store.using():
                found = _wants_sdk(spec, StoredTree(store, trees.parse_id(spec.snapshot)))
        except Lacking:  # deleted meanwhile; that is reported when it is sent
            return False
        self._wants_sdk[_work(spec)] = found
        if len(self._wants_sdk) > _MOST_KNOWN:
            self._wants_sdk.popitem(last=False)
        return found


def _work(spec: JobSpec) -> _Work:
    """What decides it; jobs that differ only in other arguments share the answer."""
    scripts = scripts_in(spec.argv) if spec.launcher is Launcher.COMMAND else spec.argv[:1]
    return spec.snapshot or "", spec.launcher, tuple(scripts)


def _wants_sdk(spec: JobSpec, tree: StoredTree) -> bool:
    if spec.launcher is not Launcher.COMMAND:
        # It costs a training nothing: only what surely does without gets none.
        return is_wanted(str(PurePosixPath(spec.argv[0])), tree) is not False
    own = [script for script in scripts_in(spec.argv) if tree.source(script) is not None]
    found = [is_wanted(script, tree) for script in own]
    return any(found) or (None in found and tree.mentions(MODULE.encode()))


class StoredTree:
    """A snapshot as ``policy.nodes.imports`` looks at it. Links are not followed."""

    def __init__(self, store: ContentStore, root: bytes) -> None:
        self._store = store
        self._root = root
        self._folders: dict[str, dict[str, trees.TreeEntry]] = {}

    def source(self, path: str) -> str | None:
        entry = self._entry(path)
        if entry is None or entry.kind != trees.FILE or entry.size > _MOST_SOURCE_BYTES:
            return None
        try:
            return b"".join(self._store.read(key) for key in entry.chunks).decode()
        except UnicodeDecodeError:
            return None

    def is_folder(self, path: str) -> bool:
        entry = self._entry(path)
        return entry is not None and entry.kind == trees.FOLDER

    def module_names(self) -> frozenset[str] | None:
        found: set[str] = set()
        todo, count = [self._root], 0
        while todo:
            count += 1
            if count > _MOST_FOLDERS:
                return None
            for entry in self._store.entries(todo.pop()):
                name = os.fsdecode(entry.name)
                if entry.kind == trees.FOLDER:
                    todo.append(entry.body)
                if entry.kind != trees.FILE or name.endswith(_MODULES):
                    found.add(name.partition(".")[0])
        return frozenset(found)

    def mentions(self, word: bytes) -> bool:
        todo, count = [self._root], 0
        while todo:
            count += 1
            if count > _MOST_FOLDERS:
                return True
            for entry in self._store.entries(todo.pop()):
                if entry.kind == trees.FOLDER:
                    todo.append(entry.body)
                elif self._is_source(entry) and word in b"".join(map(self._store.read, entry.chunks)):
                    return True
        return False

    def _is_source(self, entry: trees.TreeEntry) -> bool:
        return entry.kind == trees.FILE and entry.name.endswith(b".py") and entry.size <= _MOST_SOURCE_BYTES

    def _entry(self, path: str) -> trees.TreeEntry | None:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            return None
        folder = self._folder(pure.parent)
        return folder.get(pure.name) if folder is not None else None

    def _folder(self, path: PurePosixPath) -> dict[str, trees.TreeEntry] | None:
        known = self._folders.get(str(path))
        if known is not None:
            return known
        tree = self._root
        if path.parts:
            entry = self._entry(str(path))
            if entry is None or entry.kind != trees.FOLDER:
                return None
            tree = entry.body
        entries = {os.fsdecode(one.name): one for one in self._store.entries(tree)}
        self._folders[str(path)] = entries
        return entries
