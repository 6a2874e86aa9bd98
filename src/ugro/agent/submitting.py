"""From what a client hands in to a job's spec: file and options read, names resolved, its place checked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ugro.agent.cluster import Cluster
from ugro.agent.snapshot import Snapshots
from ugro.config.channels import LOG
from ugro.config.jobfile import Draft, Request, draft_job
from ugro.core.errors import ConfigError, NotFound, Unsatisfiable
from ugro.core.job import JobSpec, Launcher
from ugro.core.node import NodeSpec
from ugro.store.jobs import JobStore

_LAB = "ugro.lab.enter"


@dataclass(frozen=True, slots=True)
class Submit:
    user: str
    key: str
    file: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    here: Path = Path("/")  # where the client is
    env: Mapping[str, str] | None = None  # None: it has not been asked for any variable yet


@dataclass(frozen=True, slots=True)
class Needs:
    """Variables whose values the client has to add: nothing else of its environment is any of our business."""

    variables: tuple[str, ...]


class Submitting:
    def __init__(self, jobs: JobStore, snapshots: Snapshots, cluster: Cluster) -> None:
        self._jobs = jobs
        self._snapshots = snapshots
        self._cluster = cluster

    async def spec(self, submit: Submit) -> JobSpec | Needs:
        # A file may lie on a disk that is slow, or gone.
        draft = await asyncio.to_thread(_draft, submit) if submit.file else _draft(submit)
        if submit.env is None and draft.wanted_variables:
            return Needs(draft.wanted_variables)
        ids = {name: await self._id(name) for name in draft.named_jobs}
        request = draft.request(submit.env or {}, lambda name: _found(ids, name))
        self._check_channels(request.spec.notify)
        return self._with_cwd(request, submit.here)

    async def check_fit(self, specs: Sequence[JobSpec]) -> None:
        """Raises Unsatisfiable for what this cluster could never run, whoever uses it now."""
        # Of many alike one speaks for all.
        for spec in {(spec.resources, spec.launcher): spec for spec in specs}.values():
            if (misfit := await self._snapshots.misfit(spec)) is not None:
                raise Unsatisfiable(misfit.reason, hint=misfit.hint)

    def _check_channels(self, names: Sequence[str]) -> None:
        known = (LOG, *self._cluster.config.channels)
        for name in names:
            if name not in known:
                hint = f"there is: {', '.join(known)}; the cluster file's channels name them"
                raise ConfigError(f"notify: there is no channel {name!r}", hint=hint)

    async def _id(self, name: str) -> int | None:
        try:
            return (await self._jobs.find(name)).id
        except NotFound:
            return None

    def _with_cwd(self, request: Request, here: Path) -> JobSpec:
        spec = request.spec
        if spec.cwd is not None:
            return spec
        if all(_is_here(node.spec) for node in self._cluster.inventory):
            folder = here / request.workdir
            if not folder.is_dir():
                raise ConfigError(f"{folder}: no such directory", hint="--workdir names where its code is")
            return replace(spec, cwd=str(folder))
        program = spec.argv[0]
        is_script = spec.launcher is not Launcher.COMMAND
        if not program.startswith(("/", "~")) and (is_script or "/" in program):
            raise ConfigError(
                f"{program}: where is it on the nodes?",
                hint=f"give its directory there (--cwd DIR), or a whole path such as /data/{Path(program).name}",
            )
        return spec


def _draft(submit: Submit) -> Draft:
    return draft_job(submit.file, fields=submit.fields)


def _found(ids: Mapping[str, int | None], name: str) -> int:
    if (number := ids.get(name)) is None:
        raise NotFound(f"there is no job {name!r}", hint="see: ugro status")
    return number


def _is_here(node: NodeSpec) -> bool:
    """Whether it has this machine's files."""
    return node.transport == "local" or (isinstance(node.transport, tuple) and _LAB in node.transport)
