"""From what a job asks for to exact packages with hashes, on this machine, once for each request and platform.

What was resolved is kept: the same request is the same environment tomorrow, until a user asks for newer packages.

uv runs with the agent's account. To learn what a package without a wheel needs, it would run code of the package: it
may do that for the owner, and for nobody else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ugro.agent.python_env.process import run
from ugro.agent.python_env.tools import Tools, failed, folder_arguments, pages_of
from ugro.agent.python_env.workshop import Workshop
from ugro.agent.support.shared_work import SharedWork
from ugro.agent.support.turns import Turns
from ugro.core.errors import EnvFailed
from ugro.core.python_env import EnvRequest, Platform
from ugro.policy.python_env.naming import environment_name, request_key, uv_platform, without_hash
from ugro.policy.python_env.pinned import with_given_hashes
from ugro.policy.python_env.requirements import BadRequirement, checked, logical_lines
from ugro.policy.python_env.wheels_only import (
    HINT,
    requirements_from_web,
    source_archive,
    unbuilt,
    without_wheel,
)
from ugro.remote.python_env.failures import Mask
from ugro.remote.python_env.indexes import index_variables
from ugro.store.python_envs import PythonEnvStore, Resolution

log = logging.getLogger(__name__)

_RESOLVE_S = 900.0
_AT_ONCE = 4  # each is a process that may take a core and some hundred MB
_OF_ONE_USER = 2
_WHAT = "its packages cannot be resolved"


class Resolver:
    def __init__(self, workshop: Workshop, store: PythonEnvStore, tools: Tools) -> None:
        self._workshop = workshop
        self._store = store
        self._tools = tools
        self._turns = Turns(_AT_ONCE, of_one_user=_OF_ONE_USER)
        self._resolving: SharedWork[str, Resolution] = SharedWork("resolve environment")

    async def resolve(self, request: EnvRequest, platform: Platform, *, upgrade: bool = False) -> Resolution:
        """``request``: without overrides, and not an existing environment. Raises EnvFailed."""
        key = request_key(request, platform)
        if not upgrade and (known := await self._store.resolution(key)) is not None:
            return known
        return await self._resolving.do(key, lambda: self._resolve(key, request, platform))

    async def known(self, request: EnvRequest, platform: Platform) -> Resolution | None:
        """What it was resolved to before; nothing is looked up."""
        return await self._store.resolution(request_key(request, platform))

    async def close(self) -> None:
        await self._resolving.close()

    async def _resolve(self, key: str, request: EnvRequest, platform: Platform) -> Resolution:
        async with self._turns.taken(), self._workshop.work() as folder:
            requirements = await self._pinned(request, platform, folder)
        if (bare := without_hash(requirements)) != []:
            text = f"{bare[0].split()[0]} has no hash by which nodes could check it"
            raise EnvFailed(text, hint="name a release of it that is in a package index", cause="hash")
        found = Resolution(environment_name(requirements, platform), requirements)
        await self._store.keep_resolution(key, found)
        log.info("resolved a Python environment: %s", found.name)
        return found

    async def _pinned(self, request: EnvRequest, platform: Platform, work: Path) -> str:
        if request.lock is not None:
            exported = logical_lines(await self._export(request, work))
            request = replace(request, requirements=_checked(line for _, line in exported), lock=None)
        if not request.requirements:
            return ""
        target = uv_platform(platform)
        if target is None:
            text = f"{_WHAT}: uv does not know the platform {platform.arch}, {platform.libc}"
            raise EnvFailed(text, hint="name an environment that is on the node: existing", cause="not-found")
        if request.is_foreign:
            _expect_wheels((*request.requirements, *request.constraints))
        _write(work / "requirements.in", request.requirements)
        _write(work / "constraints.txt", request.constraints)
        argv = [
            *("pip", "compile", "--no-config", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
            *("--python", sys.executable, "--python-version", platform.python, "--python-platform", target),
            *("--constraints", "constraints.txt", *folder_arguments(request), "requirements.in"),
            # uv has no variables for these.
            *(("--no-index",) if request.no_index else ()),
            # Where each file is known by its hash, it does not matter which index has it.
            *(("--index-strategy", "unsafe-best-match") if _has_hashes(request.requirements) else ()),
            *(("--only-binary", ":all:", "--format", "pylock.toml") if request.is_foreign else ()),
        ]
        resolved = await self._uv(argv, request, work)
        if request.is_foreign:
            resolved = _from_web(resolved, request)
        return with_given_hashes(resolved, request.requirements)

    async def _export(self, request: EnvRequest, work: Path) -> str:
        """The packages of a uv.lock, for all platforms, with hashes."""
        project = work / "project"
        project.mkdir()
        (project / "uv.lock").write_text(request.lock or "")
        (project / "pyproject.toml").write_text(request.project or "")
        argv = [
            *("export", "--frozen", "--no-config", "--quiet", "--no-dev", "--no-emit-project", "--no-header"),
            *("--no-annotate", "--format", "requirements-txt", "--python", sys.executable, "--project", str(project)),
        ]
        return await self._uv(argv, request, project)

    async def _uv(self, argv: Sequence[str], request: EnvRequest, work: Path) -> str:
        uv = await self._tools.uv_here()
        sources = await self._tools.sources_of(request)
        own = {
            # Not kept: what was resolved is. A wheel in a folder would be unpacked into it.
            "UV_CACHE_DIR": str(work / ".uv-cache"),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
            **index_variables("uv", sources.index_url, sources.extra_index_url, pages_of(sources)),
        }
        variables = await self._tools.variables(request, own, work)
        ended = await run([uv, *argv], env=variables, cwd=work, timeout_s=_RESOLVE_S)
        if ended.code != 0:
            error = failed("uv", ended.code, ended.err, Mask(sources.addresses), _WHAT)
            name = unbuilt(ended.err) if request.is_foreign else None
            raise error if name is None else _lacks_wheel(name, error.tail)
        return ended.out


def _checked(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines that uv wrote, from files of the user's: held to the same rules as the user's own."""
    try:
        return tuple(map(checked, lines))
    except BadRequirement as error:
        raise EnvFailed(f"{_WHAT}: {error.message}", hint=error.hint, cause="not-found") from error


def _has_hashes(requirements: Sequence[str]) -> bool:
    return all("--hash" in line for line in requirements)


def _from_web(lock: str, request: EnvRequest) -> str:
    folders = [place for place in request.places if "://" not in place or place.startswith("file://")]
    try:
        resolved = requirements_from_web(lock, [place.removeprefix("file://") for place in folders])
    except BadRequirement as error:
        raise EnvFailed(f"{_WHAT}: {error.message}", hint=error.hint, cause="not-found") from error
    _expect_wheels(line for _, line in logical_lines(resolved))
    return resolved


def _expect_wheels(lines: Iterable[str]) -> None:
    if (name := source_archive(lines)) is not None:
        raise _lacks_wheel(name)


def _lacks_wheel(name: str, tail: tuple[str, ...] = ()) -> EnvFailed:
    return EnvFailed(f"{_WHAT}: {without_wheel(name)}", hint=HINT, cause="not-found", tail=tail)


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
