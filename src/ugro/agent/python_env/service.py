"""Python environments of jobs: resolved here, made on each of their nodes, once for all who ask for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ugro.agent.artifacts.environments import variables_hash
from ugro.agent.code.service import Code
from ugro.agent.python_env.files import Files
from ugro.agent.python_env.hosts import Hosts
from ugro.agent.python_env.making import Maker, Wanted, local_errors
from ugro.agent.python_env.progress import UnderWay
from ugro.agent.python_env.resolving import Resolver
from ugro.agent.python_env.tools import Tools
from ugro.agent.python_env.workshop import Workshop
from ugro.agent.support.aio import together
from ugro.agent.support.shared_work import SharedWork
from ugro.agent.support.turns import working_for
from ugro.agent.tracking.cluster import Cluster
from ugro.core.environment import Environment
from ugro.core.errors import EnvFailed, UgroError
from ugro.core.job import Job
from ugro.core.python_env import EnvHost, EnvProgress, EnvRequest, Made
from ugro.core.support.state_dir import StateDir
from ugro.nodes.python_envs import PythonEnvs
from ugro.nodes.runs import Identity
from ugro.policy.python_env.naming import label_of, minor_of, with_override
from ugro.store.database import Store
from ugro.store.python_envs import Resolution

_CONNECT_S = 5.0
T = TypeVar("T")
READY = "ready"  # the last phase of a node
OnProgress = Callable[[str, EnvProgress], None]
Outcome = Made | UgroError


def _nobody(node: str, progress: EnvProgress) -> None:
    pass


class PythonEnvService:
    def __init__(
        self, home: StateDir, store: Store, cluster: Cluster, code: Code, identity: Identity
    ) -> None:
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
        self.on_made: Callable[[str], None] = lambda node: None
        # The nodes that answer, or the user's logins there: an account may have a Python of its own.
        self.reached: Callable[[str], list[str]] = lambda user: [
            node.spec.name for node in cluster.inventory if node.link is not None
        ]

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
        nodes = self.reached(user)
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
        self.on_made(wanted.node)
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
