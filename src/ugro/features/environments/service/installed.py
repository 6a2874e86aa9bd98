"""What jobs ran with, what their scripts import, and which modules nodes have. ``rules.imports`` decides."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from weakref import WeakKeyDictionary

from ugro.features.environments.rules.imports import (
    MODULE,
    imports_of,
    is_named_in,
    is_wanted,
    scripts_in,
    still_missing,
    uses,
)
from ugro.features.environments.store import EnvironmentStore
from ugro.kernel.files.code.snapshot_store import SnapshotStore
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Environment, Imports, Job, JobSpec, Launcher
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Node
from ugro.kernel.links.rules import Unknown
from ugro.kernel.support.aio import together
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.node import system, trees
from ugro.node.check import modules
from ugro.node.files.packs import ContentStore, Lacking
from ugro.node.messages import Modules

# --- environments -----------------------------------------------------------------------------------------------------
# What is installed on the nodes of a job, recorded with its attempt.
#
# To list the packages takes a node a second of one core: it is asked once at a time, and all who wait get the answer.


log = logging.getLogger(__name__)

# Environment variables that the ranks of a job get on a node beside their own, such as the folder to resume from.
ExtraEnv = Callable[[Job, str], Awaitable[Mapping[str, str]]]
_ANSWER_S = 30.0
_AGE_S = 300.0
_FAILED_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What a node answered; None: nothing."""

    link: Link
    environment: Environment | None
    asked_at: float

    def is_usable(self, link: Link, since: float) -> bool:
        """Whether it was asked over this link, at that time or later."""
        return self.link is link and self.asked_at >= since


class Environments:
    def __init__(self, store: EnvironmentStore, watch: RunTracker) -> None:
        self._store = store
        self._watch = watch
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def record(self, job: Job) -> None:
        """Once for each attempt and node."""
        nodes = job.placement.nodes if job.placement else ()
        recorded = await self._store.of(job.id, job.attempt)
        found = await self.now([node for node in nodes if node not in recorded], is_fresh=False)
        if found:
            await self._store.record(job.id, job.attempt, found)

    def recording(self, ask: ExtraEnv) -> ExtraEnv:
        """As ``ask``; records the environment first if the result of the job may be reused."""

        async def asked(job: Job, node: str) -> Mapping[str, str]:
            if job.spec.is_cached and job.spec.environment is None:  # else it was recorded when it was made
                found = await self.now([node], is_fresh=True)
                await self._store.record(job.id, job.attempt, found)
            return await ask(job, node)

        return asked

    async def of(self, job: Job) -> dict[str, Environment]:
        """By node, of its newest attempt."""
        return await self._store.of(job.id, job.attempt)

    async def now(self, nodes: Iterable[str], *, is_fresh: bool) -> dict[str, Environment]:
        """Of nodes that answer. ``is_fresh``: asked now, and not some minutes ago."""
        names = list(nodes)
        found = await together(self._ask(node, is_fresh) for node in names)
        return {node: one for node, one in zip(names, found, strict=True) if one is not None}

    async def _ask(self, node: str, is_fresh: bool) -> Environment | None:
        wanted_at = time.monotonic()
        async with self._asking.setdefault(node, asyncio.Lock()):
            try:
                runs = self._watch.runs(node)
                link = await runs.node.ready(runs.connect_s, patiently=True)
                return (await self._answer(node, link, wanted_at, is_fresh)).environment
            except (Unreachable, TimedOut, NotFound) as error:
                log.info("the environment of the node is unknown: %s", error, extra={"node": node})
                return None

    async def _answer(self, node: str, link: Link, wanted_at: float, is_fresh: bool) -> _Known:
        """What the node was asked while we waited for our turn is also fresh."""
        known = self._known.get(node)
        if known is not None:
            age_s = _AGE_S if known.environment is not None else _FAILED_AGE_S
            if known.is_usable(link, wanted_at if is_fresh else wanted_at - age_s):
                return known
        asked_at = time.monotonic()
        try:
            found = await _asked(link)
        except (TimedOut, RemoteFailure) as error:
            log.info("the environment of the node is unknown: %s", error, extra={"node": node})
            found = None
        known = self._known[node] = _Known(link, found, asked_at)
        return known


async def _asked(link: Link) -> Environment:
    found = await node_checks.answer(link, system.environment, _ANSWER_S)
    assert link.machine is not None  # the link is open
    return Environment(
        found.python,
        link.machine.python_path,
        link.machine.arch,
        tuple(sorted(found.packages)),
        found.torch_cuda,
        found.gpu_driver,
        variables_hash(link.spec),
    )


def variables_hash(spec: NodeSpec) -> str | None:
    return hashlib.sha256(dumps(sorted(spec.env)).encode()).hexdigest()[:16] if spec.env else None


# --- script imports ---------------------------------------------------------------------------------------------------


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
    """A snapshot as ``rules.imports`` looks at it. Links are not followed."""

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


# --- node modules -----------------------------------------------------------------------------------------------------
# Which modules the nodes' Pythons lack, of those that scripts of jobs import. Asked in the background, and cached.


_NODE_MODULES_ANSWER_S = 20.0
_NODE_MODULES_AGE_S = 30.0
_LEARN_S = 5.0
_MOST_NAMES = 200
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _NodeModulesKnown:
    """What a node answered; valid for the link it was asked over, until its folders change."""

    link: Link
    names: frozenset[str]  # that it was asked for
    missing: frozenset[str]
    folders: tuple[tuple[str, int], ...]
    asked_at: float


class NodeModules:
    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        self.on_news = on_news
        self._wanted: dict[str, None] = {}  # the newest last
        self._known: WeakKeyDictionary[Node, _NodeModulesKnown] = WeakKeyDictionary()
        self._asking: WeakKeyDictionary[Node, asyncio.Lock] = WeakKeyDictionary()

    def want(self, names: Iterable[str]) -> None:
        """Asks about these, too, from now on."""
        for name in names:
            self._wanted.pop(name, None)
            self._wanted[name] = None
        for name in list(self._wanted)[:-_MOST_NAMES]:
            del self._wanted[name]

    def lacking(self, node: Node) -> frozenset[str]:
        """Known to be missing there, for jobs with which UGRO's own package goes. What was not asked is unknown."""
        known = self._known.get(node)
        if known is None or node.machine is None:
            return _NOTHING
        return still_missing(known.missing, node.machine.python)

    def forget(self, node: Node) -> None:
        """Something was installed there."""
        known = self._known.get(node)
        if known is not None:
            self._known[node] = replace(known, folders=(), asked_at=float("-inf"))

    async def learn(self, names: Iterable[str], nodes: Iterable[Node]) -> None:
        """Returns when every node that can be asked has answered about ``names``, or after a few seconds."""
        wanted = frozenset(names)
        if not wanted:
            return
        self.want(wanted)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_S):
                await self.refresh(nodes)

    async def refresh(self, nodes: Iterable[Node], *, max_age_s: float = _NODE_MODULES_AGE_S) -> None:
        """Asks the nodes about which something is not known, or not known any more."""
        if self._wanted:
            await together(self._ask(node, max_age_s) for node in nodes if node.link is not None)

    async def _ask(self, node: Node, max_age_s: float) -> None:
        lock = self._asking.setdefault(node, asyncio.Lock())
        async with lock:
            link, known = node.link, self._known.get(node)
            if link is None or (known is not None and self._is_fresh(known, link, max_age_s)):
                return
            names = list(self._wanted)
            is_known = known is not None and known.link is link and known.names.issuperset(names)
            folders = known.folders if known is not None and is_known else ()
            began = time.monotonic()
            found = await _node_modules_asked(link, names, folders)
            if found is None:
                return
            if found.is_same and known is not None:
                self._known[node] = replace(known, asked_at=began)
                return
            missing = frozenset(found.missing).intersection(names)
            self._known[node] = _NodeModulesKnown(link, frozenset(names), missing, found.folders, began)
            if known is None or known.missing != missing:
                self.on_news()

    def _is_fresh(self, known: _NodeModulesKnown, link: Link, max_age_s: float) -> bool:
        is_complete = known.link is link and known.names.issuperset(self._wanted)
        return is_complete and time.monotonic() - known.asked_at < max_age_s


async def _node_modules_asked(link: Link, names: list[str], folders: tuple[tuple[str, int], ...]) -> Modules | None:
    try:
        found = await node_checks.check(link, modules, _NODE_MODULES_ANSWER_S, names=names, folders=folders)
    except UgroError as error:  # the link was lost; it is asked again over the next one
        found = Unknown(str(error))
    if not isinstance(found, Unknown):
        return found
    log.info("cannot tell which modules it has: %s", found.text, extra={"node": link.spec.name})
    return None
