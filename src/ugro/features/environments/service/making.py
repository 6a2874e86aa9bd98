"""Making one environment on one node: from here if the node cannot download its packages, else by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ugro.features.environments.model import Blob, EnvHost, EnvProgress, EnvRequest, Made, Platform, Recipe
from ugro.features.environments.node.failures import Mask, index_variables
from ugro.features.environments.rules.naming import (
    common_python,
    files_key,
    package_count,
    phase_in_words,
    platform_of,
    pythons_of,
    wheel_platforms,
)
from ugro.features.environments.service.node_envs import PythonEnvs
from ugro.features.environments.service.tools import (
    Tools,
    UvFile,
    Workshop,
    blob_of,
    failed,
    folder_arguments,
    pages_of,
    run,
)
from ugro.features.environments.store import EnvFiles, PythonEnvStore, Resolution
from ugro.kernel.files.code.service import Code
from ugro.kernel.links.link import Link
from ugro.kernel.support.aio import SharedWork
from ugro.kernel.support.errors import EnvFailed, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.quantities import format_size
from ugro.kernel.support.secrets import without_userinfo

# --- files ------------------------------------------------------------------------------------------------------------
# The files that a node needs to make an environment: uv, and the wheels if it cannot download them itself.
#
# They are kept as a tree in the content store, and are sent as code is: only what a node lacks, resumed after a cut.


_DOWNLOAD_S = 4 * 3600.0
_LOOK_S = 1.0
_WHAT = "the packages cannot be downloaded"
_NO_WHEEL = "a node without access to the index needs wheels: is there one for its platform?"
OnBytes = Callable[[int], None]


class Files:
    def __init__(self, workshop: Workshop, store: PythonEnvStore, tools: Tools, code: Code) -> None:
        self._workshop = workshop
        self._store = store
        self._tools = tools
        self._code = code
        self._gathering: SharedWork[str, EnvFiles] = SharedWork("gather wheels")

    async def installer(self, platform: Platform) -> EnvFiles:
        """Returns uv alone."""
        uv = await self._tools.uv_for(platform)
        return EnvFiles(await self._code.take_files(uv.folder), uv.blob)

    async def everything(
        self, request: EnvRequest, resolution: Resolution, platform: Platform, on_bytes: OnBytes
    ) -> EnvFiles:
        """uv and all wheels, for a node that cannot download them."""
        key = files_key(request, platform, resolution.name)
        known = await self._store.files(key)
        if known is not None and self._code.has(known.tree):
            return known
        return await self._gathering.do(key, lambda: self._gather(key, request, resolution, platform, on_bytes))

    async def close(self) -> None:
        await self._gathering.close()

    async def _gather(
        self, key: str, request: EnvRequest, resolution: Resolution, platform: Platform, on_bytes: OnBytes
    ) -> EnvFiles:
        uv = await self._tools.uv_for(platform)
        async with self._workshop.work() as folder:
            wheels = folder / "wheels"
            wheels.mkdir(mode=0o700)
            await self._download(request, resolution, platform, wheels, on_bytes)
            blobs = await asyncio.to_thread(_put_together, wheels, uv)
            found = EnvFiles(await self._code.keep_files(wheels), uv.blob, blobs)
        await self._store.keep_files(key, found)
        return found

    async def _download(
        self, request: EnvRequest, resolution: Resolution, platform: Platform, target: Path, on_bytes: OnBytes
    ) -> None:
        if not resolution.requirements.strip():
            return
        pinned = target.parent / "requirements.txt"
        pinned.write_text(resolution.requirements)
        sources = await self._tools.sources_of(request)
        argv = [
            *await self._tools.pip(),
            *("download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--python-version", platform.python, "--implementation", "cp"),
            *(word for tag in wheel_platforms(platform) for word in ("--platform", tag)),
            *("--progress-bar", "off", "--dest", str(target), *folder_arguments(sources), "-r", str(pinned)),
        ]
        none = {"PIP_NO_INDEX": "1"} if sources.no_index else {}
        indexes = index_variables("pip", sources.index_url, sources.extra_index_url, pages_of(sources))
        env = await self._tools.variables(request, {**indexes, **none}, target.parent)
        async with _watching(target.parent, on_bytes):
            ended = await run(argv, env={**env, "TMPDIR": str(target.parent)}, cwd=target, timeout_s=_DOWNLOAD_S)
        if ended.code != 0:
            error = failed("pip", ended.code, ended.err, Mask(sources.addresses), _WHAT)
            hint = _NO_WHEEL if error.cause == "not-found" else None
            raise EnvFailed(error.message, hint=hint, cause=error.cause, tail=error.tail)


def _put_together(wheels: Path, uv: UvFile | None) -> tuple[Blob, ...]:
    """Puts uv beside the wheels; returns the wheels."""
    blobs = tuple(blob_of(path) for path in sorted(wheels.iterdir()))
    if uv is not None:
        source, target = uv.folder / uv.blob.name, wheels / uv.blob.name
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    return blobs


@contextlib.asynccontextmanager
async def _watching(folder: Path, on_bytes: OnBytes) -> AsyncIterator[None]:
    async def watch() -> None:
        before = -1
        while True:
            size = await asyncio.to_thread(_size, folder)
            if size != before:
                on_bytes(size)
                before = size
            await asyncio.sleep(_LOOK_S)

    task = asyncio.create_task(watch(), name="watch a download")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


# --- hosts ------------------------------------------------------------------------------------------------------------
# What nodes are, as far as environments depend on it, and whether they reach an index. Asked once for each link.


@dataclass(frozen=True, slots=True)
class _Known:
    link: Link | None
    host: EnvHost
    reaches: dict[str, bool]


class Hosts:
    def __init__(self, envs: Callable[[str], PythonEnvs]) -> None:
        self._envs = envs
        self._known: dict[str, _Known] = {}

    async def of(self, node: str) -> EnvHost:
        return (await self._asked(node, ())).host

    async def reaches(self, node: str, addresses: tuple[str, ...]) -> bool:
        """Whether it reaches all of them; they hold no passwords."""
        known = await self._asked(node, addresses)
        return all(known.reaches[address] for address in addresses)

    def common_python(self, hosts: Mapping[str, EnvHost]) -> str:
        """The version for all of them. Raises EnvFailed, and asks them again the next time: one may be installed."""
        found = common_python(hosts)
        if found is None:
            self.forget(hosts)
            text = f"the nodes have no version of Python in common: {pythons_of(hosts)}"
            hint = 'name one in the job file: environment: {python: "3.11"}'
            raise EnvFailed(text, hint=hint, cause="python-missing")
        return found

    def forget(self, nodes: Iterable[str]) -> None:
        """Something was not as it was known: they are asked again."""
        for node in nodes:
            self._known.pop(node, None)

    async def _asked(self, node: str, addresses: tuple[str, ...]) -> _Known:
        envs = self._envs(node)
        known = self._known.get(node)
        if known is not None and (known.link is None or known.link is not envs.node.link):
            known = None
        new = tuple(address for address in addresses if known is None or address not in known.reaches)
        if known is not None and not new:
            return known
        found = await envs.about(new, with_pythons=known is None)
        host, before = (known.host, known.reaches) if known is not None else (replace(found, reaches=()), {})
        reaches = {**before, **dict(zip(new, found.reaches, strict=True))}
        known = self._known[node] = _Known(envs.node.link, host, reaches)
        return known


# --- progress ---------------------------------------------------------------------------------------------------------
# How far environments are that are being made, for all who wait for them or ask.


_MOST_BREAKS = 10
Key = tuple[str, str]  # a node and the name of an environment; empty: it is being resolved
Listener = Callable[[EnvProgress], None]


@dataclass(slots=True)
class Making:
    """One environment on one node, for all who wait for it."""

    progress: EnvProgress = field(default_factory=lambda: EnvProgress("resolving"))
    moved_at: float = field(default_factory=time.monotonic)
    listeners: list[Listener] = field(default_factory=list)

    def tell(self, progress: EnvProgress) -> None:
        self.progress, self.moved_at = progress, time.monotonic()
        for listen in self.listeners:
            listen(progress)


class UnderWay:
    def __init__(self) -> None:
        self._makings: dict[Key, Making] = {}
        self._moved: dict[str, float] = {}  # by node, when a making that broke off last made progress
        self._breaks: dict[Key, int] = {}  # since one was finished

    @contextlib.contextmanager
    def following(self, key: Key, listener: Listener) -> Iterator[Making]:
        """``listener`` hears how far it is now, which another may have begun long ago, and all that follows."""
        making = self._makings.setdefault(key, Making())
        making.listeners.append(listener)
        listener(making.progress)
        try:
            yield making
            self._breaks.pop(key, None)
        except UgroError:
            self._note_break(key, making)
            raise
        finally:
            making.listeners.remove(listener)
            if not making.listeners:
                self._makings.pop(key, None)

    def _note_break(self, key: Key, making: Making) -> None:
        """Not without end: a node that fails whenever an installer starts there makes no progress."""
        node, name = key
        self._breaks[key] = self._breaks.get(key, 0) + 1
        if name and self._breaks[key] <= _MOST_BREAKS:
            self._moved[node] = making.moved_at

    def in_words(self, nodes: Sequence[str]) -> str | None:
        """A sentence, while environments are made on some of these nodes."""
        found = {node: one.progress for (node, _), one in self._makings.items() if node in nodes}
        if not found:
            return None
        node, progress = min(found.items(), key=lambda item: item[1].done / (item[1].total or 1))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"making the Python environment on {node}{more}: {_in_words(progress)}"

    def moved_at(self, nodes: Sequence[str]) -> float:
        """When something last went on there, by the monotonic clock; 0: nothing ever did.

        Also of what broke off: a link that is lost for a moment must not look as if nothing had been done until then.
        """
        now = (one.moved_at for (node, _), one in self._makings.items() if node in nodes)
        return max((*now, *(self._moved.get(node, 0.0) for node in nodes)), default=0.0)


def _in_words(progress: EnvProgress) -> str:
    if progress.phase == "installing" and progress.total:
        return f"{progress.done} of {progress.total} packages"
    if progress.phase in ("downloading", "sending") and progress.bytes:
        return f"{phase_in_words(progress.phase)}, {format_size(progress.bytes)}"
    return phase_in_words(progress.phase)


# --- making -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_PYPI = "https://pypi.org/simple/"
# It may be possible from here.
_NOT_DOWNLOADED = frozenset({"no-network", "server-failed"})
OnNode = Callable[[str], PythonEnvs]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one node is to get."""

    node: str
    host: EnvHost
    request: EnvRequest  # with the override for the node's label, and without others
    label: str
    python: str

    @property
    def platform(self) -> Platform:
        return platform_of(self.host, self.python)


class Maker:
    def __init__(self, on: OnNode, hosts: Hosts, tools: Tools, files: Files, code: Code) -> None:
        self._on = on
        self._tools = tools
        self._hosts = hosts
        self._files = files
        self._code = code

    async def make(self, wanted: Wanted, resolution: Resolution, making: Making) -> Made:
        with local_errors():
            return await self._try(wanted, resolution, making, await self._needs_wheels(wanted))

    async def _try(self, wanted: Wanted, resolution: Resolution, making: Making, is_sent: bool) -> Made:
        try:
            return await self._make_with(wanted, resolution, making, is_sent)
        except EnvFailed as error:
            if error.cause == "no-contents":  # they were deleted there meanwhile
                return await self._make_with(wanted, resolution, making, is_sent)
            if error.cause not in _NOT_DOWNLOADED or is_sent:
                raise
            log.info("the node cannot download the packages: %s", error, extra={"node": wanted.node})
            self._hosts.forget([wanted.node])
            return await self._send_instead(wanted, resolution, making, error)

    async def _send_instead(self, wanted: Wanted, resolution: Resolution, making: Making, first: EnvFailed) -> Made:
        """If that does not do either, what passes is the reason: the next try is with the node's own downloads."""
        try:
            return await self._make_with(wanted, resolution, making, True)
        except EnvFailed as error:
            if first.cause == "server-failed" and error.cause in ("not-found", "python-missing"):
                raise first from error
            raise

    async def _make_with(self, wanted: Wanted, resolution: Resolution, making: Making, is_sent: bool) -> Made:
        total = package_count(resolution.requirements)
        files = await self._gathered(wanted, resolution, making, is_sent)
        making.tell(EnvProgress("sending", 0, total, sum(one.size for one in files.wheels)))
        self._code.forget(files.tree, wanted.node)
        await self._bring(files.tree, wanted.node, making)
        recipe = await self._recipe(wanted, resolution, files, is_sent)
        log.info("making Python environment %s", resolution.name, extra={"node": wanted.node})
        made = await self._on(wanted.node).make(recipe, making.tell)
        log.info("made Python environment %s", resolution.name, extra={"node": wanted.node})
        return made

    async def _gathered(self, wanted: Wanted, resolution: Resolution, making: Making, is_sent: bool) -> EnvFiles:
        """Returns uv, with all packages if they are sent."""
        if not is_sent:
            return await self._files.installer(wanted.platform)
        total = package_count(resolution.requirements)
        making.tell(EnvProgress("downloading", 0, total))

        def on_bytes(size: int) -> None:
            making.tell(EnvProgress("downloading", 0, total, size))

        return await self._files.everything(wanted.request, resolution, wanted.platform, on_bytes)

    async def _bring(self, tree: str, node: str, making: Making) -> None:
        """Sends what the node lacks. A transfer that moves counts as progress."""
        task = asyncio.create_task(self._code.bring(tree, [node]), name=f"send an environment's files to {node}")
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK_S)
                if (sent := self._code.sent_bytes(tree, node)) is not None:
                    making.tell(replace(making.progress, bytes=sent))
            await task
        finally:
            task.cancel()

    async def _recipe(self, wanted: Wanted, resolution: Resolution, files: EnvFiles, is_sent: bool) -> Recipe:
        sources = EnvRequest() if is_sent else await self._tools.sources_of(wanted.request)
        return Recipe(
            resolution.name,
            wanted.platform,
            resolution.requirements,
            files.installer,
            files.tree,
            files.wheels,
            sources.index_url,
            sources.extra_index_url,
            sources.find_links,
            wanted.label,
        )

    async def _needs_wheels(self, wanted: Wanted) -> bool:
        """Whether its packages must come from here: it was asked for, or the node does not reach where they are.

        Or the node's account is somebody else's, and would get a login of the owner to reach them.
        """
        if wanted.request.offline or wanted.request.no_index or wanted.request.is_local:
            return True
        if await self._tools.lends_login(wanted.request):
            return True
        sources = await self._tools.sources_of(wanted.request)
        places = sources.places if sources.index_url else (_PYPI, *sources.places)
        addresses = tuple(dict.fromkeys(map(without_userinfo, places)))
        try:
            return not await self._hosts.reaches(wanted.node, addresses)
        except (RemoteFailure, TimedOut, Unreachable) as error:
            log.info("cannot tell whether it reaches the index: %s", error, extra={"node": wanted.node})
            return True


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """What goes wrong with files and programs of this machine."""
    try:
        yield
    except OSError as error:
        cause = "no-space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "crashed"
        text = f"on this machine: {(error.strerror or str(error)).lower()}"
        raise EnvFailed(f"{text}: {error.filename}" if error.filename else text, cause=cause) from error
