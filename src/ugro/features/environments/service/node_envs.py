"""The Python environments on one node, over its link: made, looked up, checked, listed, removed. Typed; holds no state.

Everything a node says is bounded and checked here. What ``make`` is given must be on the node before: see ``Recipe``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ugro.features.environments.config import EnvironmentsSection
from ugro.features.environments.model import (
    PHASES,
    SHORT,
    EnvHost,
    EnvListing,
    EnvOnNode,
    EnvProgress,
    EnvRemoval,
    EnvRemoved,
    EnvsRemoved,
    EnvsTidied,
    KeptEnvironment,
    Made,
    Recipe,
    Unasked,
)
from ugro.features.environments.node import making
from ugro.features.environments.operations import (
    EnvRemovals,
    GetEnvironment,
    ListEnvironments,
    OneEnvironment,
    RemoveEnvironment,
    RemoveUnusedEnvironments,
)
from ugro.features.environments.rules.naming import by_environment, meant
from ugro.kernel.access.model import Caller
from ugro.kernel.files.node_files import in_time
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity, Node, NodeCalls
from ugro.kernel.operations.request import answers
from ugro.kernel.support.aio import KeyedTasks, together
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import EnvFailed, RemoteFailure, UgroError, Unreachable
from ugro.node import foreign, wire

T = TypeVar("T")

_ANSWER_S = 30.0
_CHECK_S = 120.0  # an interpreter on a file server, with many packages
_TIDY_S = 600.0
_STALL_S = 900.0  # unpacking, or writing all of it to a slow disk, says nothing meanwhile
_WHAT = "making a Python environment"
_MOST_LINE_BYTES = wire.MAX_PAYLOAD  # of the list of packages at the end; progress is far shorter
_MOST_COMPLAINT_BYTES = 4096
_MOST_TAIL = 50
_MOST_TEXT = 1000
_MOST_PATH = 4096
_MOST_PACKAGES = 5000
_MOST_ENVS = 1000
_MOST_NUMBER = 1 << 50
_VERSION = re.compile(r"\d{1,3}(\.\d{1,5}){1,3}[a-z0-9+]{0,20}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|")
_CAUSES = frozenset(
    {
        *("not-found", "no-space", "no-network", "no-access", "hash", "python-missing", "no-contents"),
        *("unsafe-folder", "killed", "server-failed"),
    }
)


class PythonEnvs(NodeCalls):
    async def ready(self, name: str) -> Made | None:
        """The environment of that name if it is there and whole; marks it as used."""
        found = (await self._call(making.ready, _ANSWER_S, name=name)).get("made")
        return None if found is None else self._made(found, name)

    async def make(self, recipe: Recipe, on_progress: Callable[[EnvProgress], None]) -> Made:
        """Makes it, or waits for another who does, or finds it there. Raises ``EnvFailed``.

        Cancelling, or a lost link, ends the installer on the node; what it has downloaded is kept for the next time.
        """
        outcome = Outcome(on_progress)
        async with self._stream(making.make, recipe=asdict(recipe)) as (_, stream):
            pieces = aiter(stream)
            while (piece := await in_time(anext(pieces, None), self.name, _WHAT, _STALL_S)) is not None:
                try:
                    outcome.feed(*piece)
                except ValueError as error:
                    raise self._invalid(str(error)) from error
            ended = await stream.result()
        if outcome.made is not None:
            return self._made(outcome.made, recipe.name)
        raise self._failed(outcome, was_killed=ended.get("signal") is not None)

    async def check(self, path: str) -> Made:
        """An environment that somebody else made: its folder, or its Python; ``~`` is the node's. Raises ``EnvFailed``.

        The name of the answer is the folder's path on the node.
        """
        try:
            answer = await self._call(making.check, _CHECK_S, path=path, limit_s=_CHECK_S - _ANSWER_S)
        except RemoteFailure as error:
            raise EnvFailed(error.message, subject=self.name, cause=_cause(error.cause)) from error
        return self._made(answer.get("made"), None)

    async def about(self, urls: Sequence[str] = (), *, with_pythons: bool = True) -> EnvHost:
        """Which interpreters are there, which wheels fit, and which of these addresses (an index) it reaches.

        To look for interpreters takes seconds where a version manager stands in for them.
        """
        answer = await self._call(making.about, _CHECK_S, urls=list(urls), with_pythons=with_pythons)
        found = self._decoded(EnvHost, answer)
        texts = [found.arch, found.libc, *(path for _, path in found.pythons)]
        if not all(map(_is_text, texts)) or not all(_VERSION.fullmatch(version) for version, _ in found.pythons):
            raise self._invalid("its interpreters")
        if len(found.reaches) != len(urls) or len(found.pythons) > _MOST_ENVS:
            raise self._invalid("what it reaches")
        return found

    async def list(self) -> tuple[EnvOnNode, ...]:
        """The most recently used first."""
        answer = await self._call(making.list_all, _TIDY_S)
        found = self._decoded(_Listed, answer).environments[:_MOST_ENVS]
        try:
            return tuple(EnvOnNode(checked(one.made, None), max(0, one.in_use)) for one in found)
        except ValueError as error:
            raise self._invalid(str(error)) from error

    async def remove(self, names: Sequence[str]) -> EnvsRemoved:
        """Never one that a live run uses: the answer says so."""
        found = self._decoded(EnvsRemoved, await self._call(making.remove, _TIDY_S, names=list(names)))
        if [one.name for one in found.removed] != list(names):
            raise self._invalid("what it removed")
        return found

    async def gc(self, limit_bytes: int, unused_s: float | None = None) -> EnvsTidied:
        """Removes what crashes left, downloads, and the least recently used environments, until the limit is kept.

        ``unused_s``: also every environment that was not used for so long.
        """
        answer = await self._call(making.gc, _TIDY_S, limit_bytes=limit_bytes, unused_s=unused_s)
        return self._decoded(EnvsTidied, answer)

    # --- what a node says ----------------------------------------------------------------------------------------

    def _failed(self, outcome: Outcome, *, was_killed: bool) -> EnvFailed:
        if outcome.failed is None:
            said = outcome.complaint.decode("utf-8", "replace").splitlines()
            text = "the installer was killed" if was_killed else "the installer ended without a result"
            tail = tuple(map(_clean, said[-_MOST_TAIL:]))
            return EnvFailed(text, subject=self.name, cause="killed" if was_killed else "crashed", tail=tail)
        failed = outcome.failed
        tail = tuple(map(_clean, failed.tail[-_MOST_TAIL:]))
        return EnvFailed(_clean(failed.message), subject=self.name, cause=_cause(failed.kind), tail=tail)

    def _made(self, said: Any, name: str | None) -> Made:
        try:
            return checked(self._decoded(Made, said), name)
        except ValueError as error:
            raise self._invalid(str(error)) from error

    def _decoded(self, cls: type[T], said: Any) -> T:
        try:
            return decode(cls, said)
        except DecodeError as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, what: str) -> RemoteFailure:
        return RemoteFailure(f"invalid answer about environments: {what}", subject=self.name, cause="damaged")


@dataclass(frozen=True, slots=True)
class _Failed:
    kind: str
    message: str
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Listed:
    environments: tuple[EnvOnNode, ...]


def checked(made: Made, name: str | None) -> Made:
    """``name``: what was asked for. Raises ValueError for what no environment is."""
    texts = [made.name, made.python, made.torch_cuda or "", made.nccl or ""]
    texts += [text for pair in made.packages for text in pair]
    if name not in (None, made.name) or not made.python.startswith("/") or not all(map(_is_text, texts)):
        raise ValueError(f"its name or path: {made.name!r:.60}")
    if not _VERSION.fullmatch(made.version):
        raise ValueError(f"its version: {made.version!r:.60}")
    if not _TIME.fullmatch(made.made_at) or not _TIME.fullmatch(made.used_at):
        raise ValueError(f"its times: {made.made_at!r:.60}")
    if not 0 <= made.size < _MOST_NUMBER or len(made.packages) > _MOST_PACKAGES:
        raise ValueError(f"its size: {made.size}")
    return made


@dataclass(slots=True)
class Outcome:
    """What the lines of a call say: how far it is, and at last how it ended."""

    on_progress: Callable[[EnvProgress], None]
    made: Any = None
    failed: _Failed | None = None
    complaint: bytes = b""
    _unread: bytes = field(default=b"", init=False)

    def feed(self, kind: int, payload: bytes) -> None:
        if kind != wire.OUT:
            self.complaint = (self.complaint + payload)[-_MOST_COMPLAINT_BYTES:]
            return
        *lines, self._unread = (self._unread + payload).split(b"\n")
        if len(self._unread) > _MOST_LINE_BYTES:
            raise ValueError("a line that does not end")
        for line in lines:
            self._hear(foreign.parsed(line, _MOST_LINE_BYTES + wire.MAX_PAYLOAD))

    def _hear(self, said: Any) -> None:
        if not isinstance(said, dict):
            raise ValueError("a line that is no object")
        if "made" in said:
            self.made = said["made"]
        elif "failed" in said:
            self.failed = decode(_Failed, said["failed"])
        else:
            self.on_progress(_progress(decode(EnvProgress, said)))


def _progress(said: EnvProgress) -> EnvProgress:
    numbers = (said.done, said.total, said.bytes)
    if said.phase not in PHASES or not all(0 <= number < _MOST_NUMBER for number in numbers):
        raise ValueError(f"progress: {said.phase!r:.40}")
    return EnvProgress(said.phase, min(said.done, said.total), said.total, said.bytes, _clean(said.line))


def _cause(kind: str) -> str:
    return kind if kind in _CAUSES else "crashed"


def _is_text(text: str) -> bool:
    return len(text) < _MOST_PATH and (text.isprintable() or not text)


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_MOST_TEXT]).rstrip()


# --- kept environments ------------------------------------------------------------------------------------------------
# `ugro env`: asks nodes for the Python environments that they keep, and removes them.


log = logging.getLogger(__name__)

_SEEN_S = 30.0  # how long a page may show the same answer
_PAGE_S = 1.0
_PROBLEMS = {
    "in-use": "a running job uses it",
    "busy": "it is being made",
    "not-found": "it was removed meanwhile",
}


class KeptEnvironments:
    def __init__(self, cluster: Cluster, identity: Identity) -> None:
        self._cluster = cluster
        self._identity = identity
        self._tidying = KeyedTasks(lambda: None)
        self._seen: WeakKeyDictionary[Node, tuple[float, tuple[KeptEnvironment, ...]]] = WeakKeyDictionary()

    @answers(ListEnvironments)
    async def list_environments(self, asked: ListEnvironments, caller: Caller) -> EnvListing:
        return await self.listing(self._cluster.inventory.select(asked.node))

    @answers(GetEnvironment)
    async def get_environment(self, asked: GetEnvironment, caller: Caller) -> OneEnvironment:
        return OneEnvironment(meant(asked.word, (await self.listing(list(self._cluster.inventory))).environments))

    @answers(RemoveUnusedEnvironments)
    async def remove_unused(self, asked: RemoveUnusedEnvironments, caller: Caller) -> EnvRemovals:
        nodes = self._cluster.inventory.select(asked.nodes)
        return EnvRemovals(tuple(await self.gc(nodes, asked.unused_s, everything=asked.everything)))

    async def listing(self, nodes: Sequence[Node]) -> EnvListing:
        asked = await together(self._listed(node) for node in nodes)
        found = {node.spec.name: one for node, one in zip(nodes, asked, strict=True) if isinstance(one, tuple)}
        return EnvListing(by_environment(found), tuple(one for one in asked if isinstance(one, Unasked)))

    async def names(self) -> set[str]:
        """On the nodes that can be asked now, in whatever account."""
        listing = await self.listing(self._cluster.inventory.linked)
        return {one.name for one in listing.environments}

    async def seen(self, node: Node) -> tuple[KeptEnvironment, ...] | None:
        """For a page: asked some seconds ago, or now. None if the node does not answer at once."""
        asked_at, known = self._seen.get(node, (float("-inf"), None))
        if node.link is None or time.monotonic() - asked_at < _SEEN_S:
            return known
        try:
            async with asyncio.timeout(_PAGE_S):
                listing = await self.listing([node])
        except TimeoutError:
            return known
        if not listing.unasked:
            known = listing.environments
            self._seen[node] = (time.monotonic(), known)
        return known

    @answers(RemoveEnvironment)
    async def remove(self, asked: RemoveEnvironment, caller: Caller) -> EnvRemovals:
        nodes = self._cluster.inventory.select(asked.node)
        listing = await self.listing(nodes)
        found = meant(asked.word, listing.environments)
        holders = {one.node for one in found.nodes}
        having = [node for node in nodes if node.spec.name in holders]
        removed = await together(self._each(node, lambda envs: _remove(envs, found.name)) for node in having)
        return EnvRemovals((*removed, *(_unasked(one) for one in listing.unasked)))

    async def gc(
        self, nodes: Sequence[Node], unused_s: float | None = None, *, everything: bool = False
    ) -> list[EnvRemoval]:
        """``everything``: also what was used just now; a node itself leaves that to a job that may be starting."""
        limit = self._cluster.config.section(EnvironmentsSection).max_size

        async def tidy(envs: PythonEnvs) -> EnvRemoval:
            names = [one.name for one in await envs.list() if not one.in_use] if everything else []
            removed = await envs.remove(names) if names else EnvsRemoved(())
            gone = [one.name for one in removed.removed if one.problem is None]
            tidied = await envs.gc(limit, unused_s)
            freed = removed.freed_bytes + tidied.freed_bytes
            is_deleting = removed.is_deleting or tidied.is_deleting
            return EnvRemoval(envs.name, (*gone, *tidied.removed), freed, tidied.kept_bytes, is_deleting)

        return await together(self._each(node, tidy) for node in nodes)

    def tidy_soon(self, name: str) -> None:
        """A node has one more environment: keeps them within the limit, without anybody waiting for it."""
        self._tidying.do(("tidy environments on", name), lambda: self._tidy(name))

    async def _tidy(self, name: str) -> None:
        if (node := self._cluster.inventory.find(name)) is None:
            return
        [done] = await self.gc([node])
        if done.removed:
            names = ", ".join(one[:SHORT] for one in done.removed)
            log.info("removed unused environments: %s", names, extra={"node": name})
        if done.error:
            log.warning("environments may take more than environments.max_size: %s", done.error, extra={"node": name})

    async def close(self) -> None:
        await self._tidying.close()

    async def _listed(self, node: Node) -> tuple[EnvOnNode, ...] | Unasked:
        try:
            return await self._envs(node).list()
        except UgroError as error:
            return Unasked(node.spec.name, error.message, error.hint, isinstance(error, Unreachable))

    async def _each(
        self, node: Node, work: Callable[[PythonEnvs], Coroutine[Any, Any, EnvRemoval]]
    ) -> EnvRemoval:
        try:
            return await work(self._envs(node))
        except UgroError as error:
            return _unasked(Unasked(node.spec.name, error.message, error.hint, isinstance(error, Unreachable)))

    def _envs(self, node: Node) -> PythonEnvs:
        node.wake()  # somebody waits for the answer
        # A node that is connecting for the first time gets the time a connection may take.
        return PythonEnvs(node, self._identity, 2 * self._cluster.config.ssh.connect_timeout)


async def _remove(envs: PythonEnvs, name: str) -> EnvRemoval:
    found = await envs.remove([name])
    [removed] = found.removed
    if removed.problem is not None:
        return EnvRemoval(envs.name, error=_why(removed))
    return EnvRemoval(envs.name, (name,), found.freed_bytes, is_deleting=found.is_deleting)


def _why(removed: EnvRemoved) -> str:
    return f"not removed: {_PROBLEMS.get(removed.problem or '', 'the node refuses')}"


def _unasked(one: Unasked) -> EnvRemoval:
    return EnvRemoval(one.node, error=one.error, hint=one.hint, is_unreachable=one.is_unreachable)
