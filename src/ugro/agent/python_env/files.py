"""The files that a node needs to make an environment: uv, and the wheels if it cannot download them itself.

They are kept as a tree in the content store, and are sent as code is: only what a node lacks, resumed after a cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ugro.agent.code.service import Code
from ugro.agent.python_env.process import run
from ugro.agent.python_env.tools import Tools, UvFile, blob_of, failed, folder_arguments, pages_of
from ugro.agent.python_env.workshop import Workshop
from ugro.agent.support.shared_work import SharedWork
from ugro.core.errors import EnvFailed
from ugro.core.python_env import Blob, EnvRequest, Platform
from ugro.policy.python_env.naming import files_key, wheel_platforms
from ugro.remote.python_env.failures import Mask
from ugro.remote.python_env.indexes import index_variables
from ugro.store.python_envs import EnvFiles, PythonEnvStore, Resolution

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
