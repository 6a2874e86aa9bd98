"""Making one environment on one node: from here if the node cannot download its packages, else by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ugro.agent.code.service import Code
from ugro.agent.python_env.files import Files
from ugro.agent.python_env.hosts import Hosts
from ugro.agent.python_env.progress import Making
from ugro.agent.python_env.tools import Tools
from ugro.core.errors import EnvFailed, RemoteFailure, TimedOut, Unreachable
from ugro.core.python_env import EnvHost, EnvProgress, EnvRequest, Made, Platform, Recipe
from ugro.core.support.secret import without_userinfo
from ugro.nodes.python_envs import PythonEnvs
from ugro.policy.python_env.naming import package_count, platform_of
from ugro.store.python_envs import EnvFiles, Resolution

log = logging.getLogger(__name__)

_PYPI = "https://pypi.org/simple/"
_LOOK_S = 1.0
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
