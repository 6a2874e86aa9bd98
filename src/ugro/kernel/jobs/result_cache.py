"""The result cache: finds an earlier job that did the same work, so that the new one need not run.

The same work means the same code, command, variables, set-up, resources and input files. The earlier job's nodes must
still have the same software installed; they are asked. If any of this is unknown, the job is run. What ran in the
account of another person does not count: their packages are none of the submitter's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import ugro
from ugro.features.environments.model import EnvRequest
from ugro.features.environments.rules.naming import apart
from ugro.features.environments.service.installed import Environments
from ugro.features.environments.service.service import PythonEnvService
from ugro.kernel.access.caller import expect_files
from ugro.kernel.access.model import node_of
from ugro.kernel.files.client_files import remote_client
from ugro.kernel.jobs.model import Environment, Job, JobSpec
from ugro.kernel.jobs.moves import About
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.errors import ConfigError, UgroError

_PIECE_BYTES = 1 << 20


class ResultCache:
    def __init__(self, jobs: JobStore, environments: Environments, envs: PythonEnvService | None = None) -> None:
        self._jobs = jobs
        self._envs = envs
        self._environments = environments

    async def look(self, spec: JobSpec, user: str) -> About:
        """Empty for a job that does not use the cache. Raises ConfigError for inputs that cannot be read."""
        if not spec.is_cached:
            return About()
        if spec.snapshot is None:
            return About(notes=("the cache does not apply: the job's code is not sent, so it is unknown",))
        key = await self.key(spec)
        first = await self._jobs.done_before(key, user)
        if first is None:
            return About(cache_key=key, notes=("no earlier job did the same work",))
        if (problem := await self.changed_since(first, user)) is not None:
            return About(cache_key=key, notes=(f"job {first.id} did the same work, but {problem}; the job is run",))
        return About(cache_key=key, cached_from=first.id)

    async def key(self, spec: JobSpec) -> str:
        for name in spec.inputs if remote_client() is None else ():
            expect_files(Path(name))
        hashes = {name: await asyncio.to_thread(_content_hash, name) for name in spec.inputs}
        return hashlib.sha256(json.dumps({**_work(spec), "inputs": hashes}, sort_keys=True).encode()).hexdigest()

    async def changed_since(self, first: Job, user: str) -> str | None:
        """Why its results may differ from what a run of this user's would make now; None if nothing has changed."""
        if first.is_apart_from(user):  # whose login is not opened for somebody else
            return f"it ran in the account of {first.user}"
        ran_with = await self._environments.of(first)
        nodes = first.placement.nodes if first.placement else ()
        if not nodes or set(ran_with) != set(nodes):
            return "its environment was not recorded"
        if (request := first.spec.environment) is not None:
            return await self._other_environment(request, ran_with)
        now = await self._environments.now(nodes, is_fresh=True)
        for node in nodes:
            if node not in now:
                return f"{node_of(node)} cannot be asked what it has installed"
            if now[node].fingerprint != ran_with[node].fingerprint:
                return f"on {node_of(node)} {_change(ran_with[node], now[node])}"
        return None

    async def _other_environment(self, request: EnvRequest, ran_with: Mapping[str, Environment]) -> str | None:
        """An environment never changes under its name. One that is not UGRO's is looked at."""
        if self._envs is None:
            return "its environment is not known"
        try:
            now = await self._envs.now(request, list(ran_with))
        except UgroError as error:
            return f"its environment cannot be compared: {error}"
        for node, before in ran_with.items():
            if now[node].name != before.name:
                return f"on {node_of(node)} its environment was {before.name} and is {now[node].name or 'not resolved'}"
            if request.existing is not None and now[node].fingerprint != before.fingerprint:
                return f"on {node_of(node)} {_change(before, now[node])}"
        return None


def _work(spec: JobSpec) -> dict[str, object]:
    """The parts of a job that determine its results."""
    resources = asdict(spec.resources)
    del resources["sharing"]  # it changes where a job runs, and not what it computes
    return {
        "snapshot": spec.snapshot,
        "argv": spec.argv,
        "launcher": spec.launcher,
        "env": spec.env,
        "cwd": spec.cwd,
        "setup": spec.setup,
        "seed": spec.seed,
        "outputs": spec.outputs,
        "results": asdict(spec.results),
        "checkpoint": asdict(spec.checkpoint),
        "resources": resources,
        **({"environment": _environment(spec.environment)} if spec.environment else {}),
        **({"sdk": ugro.__version__} if spec.sdk else {}),
        **({"folders": [(one.name, one.tree, one.file) for one in spec.folders]} if spec.folders else {}),
    }


def _environment(request: EnvRequest) -> dict[str, object]:
    """What somebody else has chosen is resolved apart, and may be other versions."""
    found = asdict(request.masked)
    if not request.is_foreign:
        del found["whose"]
    del found["user"]
    return {**found, **apart(request)}


def _content_hash(name: str) -> str:
    if (offer := remote_client()) is not None:
        return offer.digest(name.removeprefix(f"{offer.machine}:"))
    digest = hashlib.sha256()
    try:
        with Path(name).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"inputs: {name}: {reason}", hint="name a file on this machine, or leave it out") from error
    return digest.hexdigest()


def _change(before: Environment, now: Environment) -> str:
    for name in ("python", "python_path", "arch", "torch_cuda", "gpu_driver", "node_env"):
        if getattr(before, name) != getattr(now, name):
            return f"{name} was {getattr(before, name)} and is {getattr(now, name)}"
    was, has = dict(before.packages), dict(now.packages)
    for name in sorted({*was, *has}):
        if was.get(name) != has.get(name):
            return f"{name} was {was.get(name, 'not there')} and is {has.get(name, 'not there')}"
    return "something changed"
