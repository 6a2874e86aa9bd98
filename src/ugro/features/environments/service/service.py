"""Python environments of jobs: resolved here, made on each of their nodes, once for all who ask for the same."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ugro.features.environments.model import EnvHost, EnvProgress, EnvRequest, Made, Platform
from ugro.features.environments.node.failures import Mask, index_variables
from ugro.features.environments.rules.naming import (
    environment_name,
    label_of,
    minor_of,
    request_key,
    uv_platform,
    with_override,
    without_hash,
)
from ugro.features.environments.rules.requirements import (
    HINT,
    BadRequirement,
    checked,
    logical_lines,
    requirements_from_web,
    source_archive,
    unbuilt,
    with_given_hashes,
    without_wheel,
)
from ugro.features.environments.service.installed import variables_hash
from ugro.features.environments.service.making import Files, Hosts, Maker, UnderWay, Wanted, local_errors
from ugro.features.environments.service.node_envs import PythonEnvs
from ugro.features.environments.service.tools import Tools, Workshop, failed, folder_arguments, pages_of, run
from ugro.features.environments.store import PythonEnvStore, Resolution
from ugro.kernel.access.caller import caller
from ugro.kernel.files.code.service import Code
from ugro.kernel.jobs.model import Environment, Job
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import SharedWork, together
from ugro.kernel.support.errors import EnvFailed, UgroError
from ugro.kernel.support.state_dir import StateDir

# --- turns ------------------------------------------------------------------------------------------------------------
# Costly work in turns: so much at once, and less of it for one user, so that nobody takes all of it.


_FOR: ContextVar[str] = ContextVar("for whom", default="")


@contextmanager
def working_for(user: str) -> Iterator[None]:
    """What the agent does by itself here, and what it starts for that, is for this user."""
    before = _FOR.set(user)
    try:
        yield
    finally:
        _FOR.reset(before)


class Turns:
    def __init__(self, most: int, *, of_one_user: int) -> None:
        self._most = most
        self._of_one_user = of_one_user
        self._taken: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """By the caller, or the user for whom the agent works."""
        asks = caller()
        user = asks.user if asks is not None else _FOR.get()
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(user))
            self._taken[user] += 1
        try:
            yield
        finally:
            self._taken[user] -= 1
            self._taken += Counter()  # without those who have none
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self, user: str) -> bool:
        return self._taken.total() < self._most and self._taken[user] < self._of_one_user


# --- resolving --------------------------------------------------------------------------------------------------------
# From what a job asks for to exact packages with hashes, on this machine, once for each request and platform.
#
# What was resolved is kept: the same request is the same environment tomorrow, until a user asks for newer packages.
#
# uv runs with the agent's account. To learn what a package without a wheel needs, it would run code of the package: it
# may do that for the owner, and for nobody else.


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


# --- service ----------------------------------------------------------------------------------------------------------


_CONNECT_S = 5.0
T = TypeVar("T")
READY = "ready"  # the last phase of a node
OnProgress = Callable[[str, EnvProgress], None]
Outcome = Made | UgroError


def _nobody(node: str, progress: EnvProgress) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Around:
    """What others know and do about environments."""

    reached: Callable[[str], list[str]]  # the nodes that answer, or the user's logins there, which may differ
    on_made: Callable[[str], None] = lambda node: None


class PythonEnvService:
    def __init__(
        self, home: StateDir, store: Store, cluster: Cluster, code: Code, identity: Identity,
        around: Around | None = None,
    ) -> None:  # fmt: skip
        workshop = Workshop(home.python)
        self._records = store.environments
        self._cluster = cluster
        self._identity = identity
        self._tools = Tools(workshop)
        self._resolver = Resolver(workshop, store.python_envs, self._tools)
        self._files = Files(workshop, store.python_envs, self._tools, code)
        self.hosts = Hosts(self.on)
        self._maker = Maker(self.on, self.hosts, self._tools, self._files, code)
        self._work: SharedWork[tuple[str, str], Made] = SharedWork("make environment")
        self._under_way = UnderWay()
        self._around = around if around is not None else Around(lambda user: _linked(cluster))

    def on(self, node: str) -> PythonEnvs:
        return PythonEnvs(self._cluster.inventory.get(node), self._identity, _CONNECT_S)

    async def close(self) -> None:
        for one in (self._work, self._files, self._resolver, self._tools):
            await one.close()

    # --- for jobs, and ahead of time ----------------------------------------------------------------------------

    async def ensure(
        self, request: EnvRequest, nodes: Sequence[str], on_progress: OnProgress = _nobody, *, upgrade: bool = False
    ) -> dict[str, Made]:
        """When this returns, every node has it. Raises EnvFailed, or Unreachable and others of a node."""
        try:
            wanted = await self.wanted(request, nodes)
            found = await together(self._resolved(one, on_progress, upgrade) for one in wanted)
            pairs = zip(wanted, found, strict=True)
            made = await together(self._ensure_on(one, resolution, on_progress) for one, resolution in pairs)
        except EnvFailed as error:
            if error.cause == "python-missing":  # somebody may install one: it is looked for again
                self.hosts.forget(nodes)
            raise
        return {one.node: each for one, each in zip(wanted, made, strict=True)}

    async def ensure_each(
        self, request: EnvRequest, nodes: Sequence[str], on_progress: OnProgress = _nobody, *, upgrade: bool = False
    ) -> dict[str, Outcome]:
        """The same, with what went wrong on each node: one that is down does not hold up the others."""
        hosts = await asyncio.gather(*(_or_error(self.hosts.of(node)) for node in nodes))
        outcomes: dict[str, Outcome] = {}
        there: dict[str, EnvHost] = {}
        for node, one in zip(nodes, hosts, strict=True):
            if isinstance(one, UgroError):
                outcomes[node] = one
            else:
                there[node] = one
        # Not asked a second time: a link that was lost meanwhile would fail all of them.
        wanted = self._wanted_on(request, there) if there else []
        found = await asyncio.gather(*(_or_error(self._resolved(one, on_progress, upgrade)) for one in wanted))
        outcomes |= {one.node: each for one, each in zip(wanted, found, strict=True) if isinstance(each, UgroError)}
        work = {
            one.node: _or_error(self._ready_on(one, each, on_progress))
            for one, each in zip(wanted, found, strict=True)
            if not isinstance(each, UgroError)
        }
        outcomes |= dict(zip(work, await asyncio.gather(*work.values()), strict=True))
        return {node: outcomes[node] for node in nodes}

    async def ensure_for(self, job: Job) -> dict[str, Made]:
        """On the nodes of its attempt, whose record then says so; none if the job has no environment."""
        request = job.spec.environment
        if request is None or job.placement is None:
            return {}
        with working_for(job.user):
            made = await self.ensure(request, job.placement.nodes)
        found = {node: await self._recorded(node, one) for node, one in made.items()}
        await self._records.record(job.id, job.attempt, found)
        return made

    async def upgrade(self, request: EnvRequest, user: str) -> None:
        """Resolves it again for every node that answers. Raises EnvFailed."""
        nodes = self._around.reached(user)
        if request.existing is not None or not nodes:
            return
        await together(self._resolved(one, _nobody, upgrade=True) for one in await self.wanted(request, nodes))

    async def now(self, request: EnvRequest, nodes: Sequence[str]) -> dict[str, Environment]:
        """What a job would find on nodes that answer; with no packages for one that has not been resolved."""
        found: dict[str, Environment] = {}
        for one in await self.wanted(request, nodes):
            if request.existing is not None:
                found[one.node] = await self._recorded(one.node, await self._existing(one))
            else:
                known = await self._resolver.known(one.request, one.platform)
                found[one.node] = Environment("", "", one.host.arch, name=known.name if known else None)
        return found

    async def _recorded(self, node: str, made: Made) -> Environment:
        spec = self._cluster.inventory.get(node).spec
        return Environment(
            made.version,
            made.python,
            (await self.hosts.of(node)).arch,
            tuple(sorted(made.packages)),
            made.torch_cuda,
            node_env=variables_hash(spec),
            name=made.name,
        )

    async def wanted(self, request: EnvRequest, nodes: Sequence[str]) -> list[Wanted]:
        """What each node is to get: its Python and the override for its labels. Raises EnvFailed."""
        hosts = await together(self.hosts.of(node) for node in nodes)
        return self._wanted_on(request, dict(zip(nodes, hosts, strict=True)))

    def _wanted_on(self, request: EnvRequest, hosts: Mapping[str, EnvHost]) -> list[Wanted]:
        python = request.python
        if python is None and request.existing is None:
            python = self.hosts.common_python(hosts)
        return [self._wanted(request, node, host, python or "") for node, host in hosts.items()]

    def _wanted(self, request: EnvRequest, node: str, host: EnvHost, python: str) -> Wanted:
        label = label_of(request, self._cluster.inventory.get(node).spec.labels)
        return Wanted(node, host, with_override(request, label), label, python)

    async def _resolved(self, wanted: Wanted, on_progress: OnProgress, upgrade: bool) -> Resolution | None:
        """None: it is there, and is only checked. Asked for all nodes at once, so equal ones get the same."""
        if wanted.request.existing is not None:
            return None
        with local_errors(), self._under_way.following((wanted.node, ""), _listener(wanted.node, on_progress)):
            return await self._resolver.resolve(wanted.request, wanted.platform, upgrade=upgrade)

    # --- what is going on ---------------------------------------------------------------------------------------

    def progress(self, nodes: Sequence[str]) -> str | None:
        """A sentence, while environments are made on some of these nodes."""
        return self._under_way.in_words(nodes)

    def moved_at(self, nodes: Sequence[str]) -> float:
        """When something last went on there, by the monotonic clock; 0: nothing ever did."""
        return self._under_way.moved_at(nodes)

    # --- one environment on one node ----------------------------------------------------------------------------

    async def _ensure_on(self, wanted: Wanted, resolution: Resolution | None, on_progress: OnProgress) -> Made:
        if resolution is None:
            return await self._existing(wanted)
        if (made := await self.on(wanted.node).ready(resolution.name)) is not None:
            return made
        key = (wanted.node, resolution.name)
        with self._under_way.following(key, _listener(wanted.node, on_progress)) as making:
            made = await self._work.do(key, lambda: self._maker.make(wanted, resolution, making))
        self._around.on_made(wanted.node)
        return made

    async def _ready_on(self, wanted: Wanted, resolution: Resolution | None, on_progress: OnProgress) -> Made:
        made = await self._ensure_on(wanted, resolution, on_progress)
        on_progress(wanted.node, EnvProgress(READY))
        return made

    async def _existing(self, wanted: Wanted) -> Made:
        assert wanted.request.existing is not None
        made = await self.on(wanted.node).check(wanted.request.existing)
        if wanted.request.python is not None and minor_of(made.version) != wanted.request.python:
            text = f"{wanted.request.existing} has Python {minor_of(made.version)}, not {wanted.request.python}"
            raise EnvFailed(text, subject=wanted.node, cause="python-missing")
        return made


async def _or_error(work: Coroutine[Any, Any, T]) -> T | UgroError:
    try:
        return await work
    except UgroError as error:
        return error


def _listener(node: str, on_progress: OnProgress) -> Callable[[EnvProgress], None]:
    return lambda progress: on_progress(node, progress)


def _linked(cluster: Cluster) -> list[str]:
    return [node.spec.name for node in cluster.inventory if node.link is not None]
