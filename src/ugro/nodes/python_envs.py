"""The Python environments on one node, over its link: made, looked up, checked, listed, removed. Typed; holds no state.

Everything a node says is bounded and checked here. What ``make`` is given must be on the node before: see ``Recipe``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ugro.core.errors import EnvFailed, RemoteFailure
from ugro.core.python_env import PHASES, EnvHost, EnvOnNode, EnvProgress, EnvsRemoved, EnvsTidied, Made, Recipe
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.streaming import NodeCalls, in_time
from ugro.remote import foreign, wire

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
    prefix = "env."

    async def ready(self, name: str) -> Made | None:
        """The environment of that name if it is there and whole; marks it as used."""
        found = (await self._call("ready", _ANSWER_S, name=name)).get("made")
        return None if found is None else self._made(found, name)

    async def make(self, recipe: Recipe, on_progress: Callable[[EnvProgress], None]) -> Made:
        """Makes it, or waits for another who does, or finds it there. Raises ``EnvFailed``.

        Cancelling, or a lost link, ends the installer on the node; what it has downloaded is kept for the next time.
        """
        outcome = Outcome(on_progress)
        async with self._stream("make", recipe=asdict(recipe)) as (_, stream):
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
            answer = await self._call("check", _CHECK_S, path=path, limit_s=_CHECK_S - _ANSWER_S)
        except RemoteFailure as error:
            raise EnvFailed(error.message, subject=self.name, cause=_cause(error.cause)) from error
        return self._made(answer.get("made"), None)

    async def about(self, urls: Sequence[str] = (), *, with_pythons: bool = True) -> EnvHost:
        """Which interpreters are there, which wheels fit, and which of these addresses (an index) it reaches.

        To look for interpreters takes seconds where a version manager stands in for them.
        """
        answer = await self._call("about", _CHECK_S, urls=list(urls), with_pythons=with_pythons)
        found = self._decoded(EnvHost, answer)
        texts = [found.arch, found.libc, *(path for _, path in found.pythons)]
        if not all(map(_is_text, texts)) or not all(_VERSION.fullmatch(version) for version, _ in found.pythons):
            raise self._invalid("its interpreters")
        if len(found.reaches) != len(urls) or len(found.pythons) > _MOST_ENVS:
            raise self._invalid("what it reaches")
        return found

    async def list(self) -> tuple[EnvOnNode, ...]:
        """The most recently used first."""
        answer = await self._call("list", _TIDY_S)
        found = self._decoded(_Listed, answer).environments[:_MOST_ENVS]
        try:
            return tuple(EnvOnNode(checked(one.made, None), max(0, one.in_use)) for one in found)
        except ValueError as error:
            raise self._invalid(str(error)) from error

    async def remove(self, names: Sequence[str]) -> EnvsRemoved:
        """Never one that a live run uses: the answer says so."""
        found = self._decoded(EnvsRemoved, await self._call("remove", _TIDY_S, names=list(names)))
        if [one.name for one in found.removed] != list(names):
            raise self._invalid("what it removed")
        return found

    async def gc(self, limit_bytes: int, unused_s: float | None = None) -> EnvsTidied:
        """Removes what crashes left, downloads, and the least recently used environments, until the limit is kept.

        ``unused_s``: also every environment that was not used for so long.
        """
        answer = await self._call("gc", _TIDY_S, limit_bytes=limit_bytes, unused_s=unused_s)
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
