"""Makes a service of a file, options or both: what its replicas run, how many, and where its door is.

Nothing is recorded or started here. What is wrong is one error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.features.services.config import (
    ALL,
    FILE,
    ScaleSection,
    ServiceDraft,
    ServiceSection,
    name_problem,
    read_service,
)
from ugro.features.services.model import (
    ENGINE_COMMAND,
    Autoscale,
    DoorPlace,
    Probe,
    Probes,
    Restarts,
    Revision,
    Service,
    ServiceSpec,
    Update,
)
from ugro.features.services.rules.engines import DEFAULT, Engine, check_words, command_of, engine_named
from ugro.features.services.service.door import DoorPlaces
from ugro.features.services.service.replicas import KEY_VARIABLES
from ugro.features.services.store import ServiceStore, name_taken
from ugro.kernel.access.caller import expect_files, may_read_files, vouch
from ugro.kernel.files.client_files import expect_local
from ugro.kernel.files.model import JobResults, ResultState
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import ANY_GPUS, Job, JobSpec, Launcher, Placement
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import ConfigError, NotAllowed, NotFound, Unsatisfiable, UsageError
from ugro.kernel.support.quantities import PRIVATE_JOB
from ugro.node import foreign

# --- model folder -----------------------------------------------------------------------------------------------------
# Finds the model that a service serves: in the results of a job, or in a folder of this machine. Blocks.


ABOUT = "ugro.json"  # what recipes write beside a model
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_MARKS = (ABOUT, _CONFIG, _ADAPTER)
_DEEPEST = 4
_MOST_FOLDERS = 20_000
_MOST_SHOWN = 5
_LARGEST_ABOUT = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    base: Path | None = None  # of an adapter, if it is a folder of this machine
    base_name: str | None = None  # what its nodes have, or download
    is_adapter: bool = False


def in_results(output: Path, wanted: str | None, job: int) -> ModelFolder:
    """``wanted``: its folder among the results, if the user says which."""
    hint = f"what it has made: ugro results {job}"
    if wanted is not None:
        found = (output / wanted).resolve()
        if not found.is_relative_to(output.resolve()) or not found.exists():
            raise NotFound(f"job {job} has no {wanted} among its results", hint=hint)
        return described(found)
    models = sorted(_models(output), key=lambda path: (len(path.parts), path))
    own = [path for path in models if (path / ABOUT).is_file()] or models
    if not own:
        text = f"job {job} has made no model: no folder with {ABOUT} or {_CONFIG} is among its results"
        raise NotFound(text, hint=f"{hint}; name the folder: --path FOLDER, or give a command: ugro serve -- CMD")
    if len(own) > 1 and (output / "model") not in own:
        names = ", ".join(str(path.relative_to(output)) for path in own[:_MOST_SHOWN])
        raise ConfigError(f"job {job} has {len(own)} models: {names}", hint="say which: --path FOLDER")
    return described(output / "model" if (output / "model") in own else own[0])


def expect_complete(made: JobResults, folder: str, *, is_final: bool) -> None:
    """``folder``: of the model, among the results. Raises NotAllowed if files of it are not here."""
    left = [(file, node.node) for node in made.nodes for file in node.left if _is_in(folder, file.name)]
    if left:
        file, node = left[0]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        text = f"job {made.job}: {file.name}{more} stayed on {node}: {file.reason}"
        raise NotAllowed(text, hint=f"get it: ugro results {made.job} --fetch")
    if is_final and made.state in (ResultState.COMING, ResultState.WAITING, ResultState.UNKNOWN):
        problem = next((f": {node.problem}" for node in made.nodes if node.problem), "")
        text = f"the results of job {made.job} are not complete yet{problem}"
        raise NotAllowed(text, hint=f"see: ugro results {made.job}")


def _is_in(folder: str, name: str) -> bool:
    return folder == "." or name == folder or name.startswith(f"{folder}/")


def described(folder: Path) -> ModelFolder:
    """With the base model of an adapter, if that is known to be a folder of this machine."""
    about = _read(folder / ABOUT) if folder.is_dir() else {}
    base, source = about.get("base"), about.get("base_path")
    if about.get("kind") != "lora":
        return ModelFolder(folder)
    # For others not even looked at: what is said of it would tell which files there are.
    if isinstance(source, str) and may_read_files() and _is_model(Path(source).expanduser()):
        return ModelFolder(folder, base=Path(source).expanduser(), is_adapter=True)
    if not base:
        hint = "train it again, or write the name of its base model into ugro.json"
        raise ConfigError(f"{folder / ABOUT}: the base model of this adapter is not known", hint=hint)
    return ModelFolder(folder, base_name=str(base), is_adapter=True)


def _is_model(folder: Path) -> bool:
    """A node may have written the name of any folder here, and would be sent what is in it."""
    return folder.is_dir() and isinstance(_read(folder / _CONFIG).get("model_type"), str)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = foreign.read(file, _LARGEST_ABOUT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        hint = "train the model again, or remove the file"
        raise ConfigError(f"{path} cannot be read: {error}", hint=hint) from error
    return found if isinstance(found, dict) else {}


def _models(top: Path) -> Iterator[Path]:
    for count, (folder, inner, files) in enumerate(os.walk(top)):
        path = Path(folder)
        if count > _MOST_FOLDERS:
            return
        if len(path.relative_to(top).parts) >= _DEEPEST:
            inner.clear()
        if any(mark in files for mark in _MARKS):
            yield path
            inner.clear()


# --- creation ---------------------------------------------------------------------------------------------------------


_EXAMPLE = "ugro serve JOB, ugro serve ./folder, or: ugro serve -- CMD --port {port}"
_MOST_NODES = 10_000
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """As a client sends it. Options override the file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    submit: Submit  # its fields are those of the replicas' jobs
    text: str | None = None  # of a file
    file: str = FILE  # its name
    model: str | None = None  # a job, or a folder
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of a service file


@dataclass(frozen=True, slots=True)
class _What:
    """What replicas run."""

    engine: Engine | None  # None: a command of the user's
    source: str
    name: str
    fields: Mapping[str, Any]  # of their jobs


@dataclass(frozen=True, slots=True)
class Read:
    """What a request asks for; nothing is chosen yet."""

    draft: ServiceDraft
    what: _What
    revision: Revision


class Creation:
    def __init__(self, services: ServiceStore, jobs: JobService, results: ResultService, doors: DoorPlaces) -> None:
        self._services = services
        self._jobs = jobs
        self._results = results
        self._doors = doors

    async def read(self, request: ServiceRequest) -> Read | Needs:
        """What it asks for. May take long."""
        draft = await asyncio.to_thread(_draft, request)
        what = await self._what(draft, request)
        await self._expect_name(what.name)
        made = await self._revision(what, request)
        if isinstance(made, Needs):
            return made
        await self._jobs.expect_allowed(made.job, request.submit.user, may_end=False)
        return Read(draft, what, made)

    async def _expect_name(self, name: str) -> None:
        if (problem := name_problem(name)) is not None:
            raise problem
        if await self._services.is_taken(name):  # said before that its port is taken
            raise name_taken(name)

    async def prepare(self, request: ServiceRequest, read: Read) -> Service:
        """Returns a service that is not recorded yet. One at a time: what it gets depends on what the others have."""
        draft, what, made = read.draft, read.what, read.revision
        await self._expect_name(what.name)  # another may have got it meanwhile
        spec = _spec(what.name, draft.section, what.engine)
        placement = await self._jobs.place_idle(made.job)  # what can never run is refused now
        everywhere = await self._everywhere(made.job)
        door = await self._doors.choose(draft.section.door, spec, everywhere.nodes)
        return Service(
            id=0,
            key=secrets.token_hex(4),
            user=request.submit.user,
            spec=replace(spec, spreads=not any(share.gpus for share in placement.shares)),
            door=door,
            wanted=_count(draft.section, placement, everywhere),
            revision=1,
            revisions=(made,),
            secret=secrets.token_hex(32) if what.engine is not None and what.engine.is_keyed else "",
            made_at=now(),
            request_key=request.submit.key,
        )

    async def door_address(self, service: Service) -> str:
        """At which the nodes that are there now reach its door. Raises UgroError if they do not."""
        everywhere = await self._everywhere(service.current.job)
        return await self._doors.address_now(service, everywhere.nodes)

    async def next_door(self, service: Service, *, has_failed: bool) -> DoorPlace:
        """For a door whose node was lost. Raises UgroError if there is no place for it now."""
        everywhere = await self._everywhere(service.current.job)
        return await self._doors.move(service, everywhere.nodes, has_failed=has_failed)

    async def next_revision(self, service: Service, request: ServiceRequest) -> Revision | Needs:
        """For an update, without its number. What is not given stays as it was."""
        old, given = service.current, request.submit.fields
        request = _like(old, request)
        what = await self._what(await asyncio.to_thread(_draft, request), request)
        made = await self._revision(what, request)
        if isinstance(made, Needs):
            return made
        job = _kept(made.job, old.job, given)
        await self._jobs.place_idle(job)
        await self._jobs.expect_allowed(job, service.user, may_end=False)
        return replace(made, job=job, request_key=request.submit.key)

    async def _revision(self, what: _What, request: ServiceRequest) -> Revision | Needs:
        job = await self._jobs.read(replace(request.submit, fields={**what.fields, "name": what.name}))
        if isinstance(job, Needs):
            return job
        engine = what.engine
        if engine is None:
            return Revision(1, job, what.source, ENGINE_COMMAND, now())
        if engine.key_variable:
            job = replace(job, env=tuple(sorted({**dict(job.env), KEY_VARIABLES: engine.key_variable}.items())))
        if "gpus_per_node" not in what.fields:
            job = await self._with_gpu(job)
        job = replace(job, sdk=job.sdk or engine.name == DEFAULT)
        note = "" if engine.is_keyed else f"{engine.name}: {engine.note}"
        return Revision(1, job, what.source, engine.name, now(), note=note)

    async def _with_gpu(self, job: JobSpec) -> JobSpec:
        """One for each replica, if a node has any that it may use."""
        wanted = replace(job, resources=replace(job.resources, gpus_per_node=1))
        try:
            await self._jobs.place_idle(wanted)
        except Unsatisfiable:
            return job
        return wanted

    # --- what is served ----------------------------------------------------------------------------------------

    async def _what(self, draft: ServiceDraft, request: ServiceRequest) -> _What:
        section, fields = draft.section, {**draft.fields}
        word = request.model if request.model is not None else section.model
        command = fields.get("command")
        _expect_one_thing(section, word, has_command=command is not None)
        found, source, name = await self._model(word, section.path, request.submit.here)
        if found is not None:
            base = [f"base={found.base}"] if found.base else []
            fields["folder"] = [*_listed(fields.get("folder")), f"model={found.path}", *base]
        if command is not None:
            words = _listed(command)
            if not words:
                raise UsageError("the command is empty", hint=_EXAMPLE)
            check_words(words)
            if found is None and any("{model}" in word for word in words):
                raise UsageError("the command has {model}, and there is none", hint="ugro serve JOB -- CMD {model}")
            return _What(None, source or " ".join(words), _name(fields, name or Path(words[0]).stem), fields)
        engine = engine_named(section.engine or DEFAULT)
        if not _CODE & fields.keys():
            fields["sync"] = False
        fields["command"] = _engine_command(engine, found)
        return _What(engine, source, _name(fields, name), fields)

    async def _model(self, word: str | None, path: str | None, here: Path) -> tuple[ModelFolder | None, str, str]:
        """The folder, where it came from in words, and a name."""
        if word is None:
            return None, "", ""
        if word.startswith((".", "/", "~")) or "/" in word:
            expect_local(f"the folder {word}", "serve a job's model: ugro serve JOB; or run it on the master")
            folder = here / Path(word).expanduser() / (path or "")
            expect_files(folder)
            if not await asyncio.to_thread(folder.exists):
                raise NotFound(f"{folder}: no such file or folder", hint=_EXAMPLE)
            return await asyncio.to_thread(described, folder.resolve()), str(folder), folder.resolve().stem
        job = await self._jobs.find(word)
        if job.spec.private:  # a service, where it came from and what happens to it are for all to see
            return await self._of_job(job, path), PRIVATE_JOB, ""
        return await self._of_job(job, path), f"job {job.id} {job.spec.name}", job.spec.name

    async def _of_job(self, job: Job, path: str | None) -> ModelFolder:
        output = next((part.path for part in await self._results.parts(job) if not part.name), None)
        hint = f"wait for it: ugro wait {job.id}"
        if output is None:
            raise NotFound(f"job {job.id} has not started yet", hint=hint)
        if not job.is_final and path is None:  # it may be writing its model now
            raise NotAllowed(f"job {job.id} is {job.state}: its model is not complete yet", hint=hint)
        made = await self._results.brief(job)
        try:
            found = await asyncio.to_thread(in_results, Path(output), path, job.id)
        except NotFound:
            expect_complete(made, ".", is_final=job.is_final)
            raise
        expect_complete(
            made, os.path.relpath(os.path.realpath(found.path), os.path.realpath(output)), is_final=job.is_final
        )
        vouch(found.path)
        if found.base is not None and may_read_files():  # a job may have named any folder
            vouch(found.base)
        return found

    async def _everywhere(self, job: JobSpec) -> Placement:
        """All nodes that its replicas may use, if they were idle."""
        resources = replace(job.resources, max_nodes=_MOST_NODES)
        if resources.gpus_per_node > 0:
            resources = replace(resources, gpus_per_node=ANY_GPUS)
        return await self._jobs.place_idle(replace(job, resources=resources, launcher=Launcher.DDP))


_RESOURCES = frozenset(
    {"nodes", "gpus_per_node", "gpu_memory", "gpu_model", "cpus", "memory", "label", "only", "any_of"}
)
_ENVIRONMENT = frozenset(
    {"environment", "existing_environment", "requirements", "package", "python", "lock", "project"}
)
_CODE = frozenset({"workdir", "cwd", "sync"})
_OF_MODELS = frozenset({"model", "base"})  # folders
# What an update keeps of a job, unless one of these options is given. The same command runs in the code that it had.
_KEPT: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (_RESOURCES, ("resources",)),
    (_CODE | {"command"}, ("cwd", "snapshot")),
    (frozenset({"setup"}), ("setup",)),
    (frozenset({"priority"}), ("priority",)),
    (frozenset({"preemptible"}), ("is_preemptible",)),
    (frozenset({"stop_signal", "stop_grace"}), ("stop",)),
)


def now() -> str:
    """For people to read."""
    return clock.now().at


def _draft(request: ServiceRequest) -> ServiceDraft:
    return read_service(request.text, request.file, request.options, request.submit.fields)


def _like(old: Revision, request: ServiceRequest) -> ServiceRequest:
    """With the engine or the command of the revision before, unless another is given."""
    fields, options = dict(request.submit.fields), dict(request.options)
    is_command = old.engine == ENGINE_COMMAND
    if is_command and request.model is None and "command" not in fields and options.get("engine") is None:
        raise UsageError("there is nothing new to serve", hint="ugro serve update NAME JOB, or: -- CMD")
    if is_command and options.get("engine") is None and "command" not in fields:
        fields["command"] = list(old.job.argv)
        if not _CODE & fields.keys():
            fields["sync"] = False  # it runs in the code that it had, see _kept
    if not is_command and "command" not in fields:
        options.setdefault("engine", old.engine)
    if is_command == ("engine" in options):
        hint = "start another service: ugro serve --name NAME"
        raise ConfigError("an update cannot change from an engine to a command or back", hint=hint)
    return replace(request, submit=replace(request.submit, fields=fields), options=options)


def _kept(new: JobSpec, old: JobSpec, given: Mapping[str, Any]) -> JobSpec:
    """With what the old one had, where nothing else was given."""
    new = replace(new, env=tuple(sorted({**dict(old.env), **dict(new.env)}.items())))
    for options, fields in _KEPT:
        if not options & given.keys():
            new = replace(new, **{name: getattr(old, name) for name in fields})
    if not _ENVIRONMENT & given.keys() and new.environment is None:
        new = replace(new, environment=old.environment)
    own = {one.name for one in new.folders}
    own |= _OF_MODELS if own & _OF_MODELS else set()
    folders = (*new.folders, *(one for one in old.folders if one.name not in own))
    return replace(new, folders=folders, sdk=new.sdk or old.sdk)


def _expect_one_thing(section: ServiceSection, word: str | None, *, has_command: bool) -> None:
    """To serve: a model or a command."""
    if has_command and section.engine is not None:
        raise UsageError("there is an engine and a command", hint="give one of them")
    if not has_command and word is None:
        raise UsageError("there is nothing to serve", hint=_EXAMPLE)


def _engine_command(engine: Engine, found: ModelFolder | None) -> list[str]:
    is_adapter = found is not None and found.is_adapter
    words = command_of(engine, is_adapter=is_adapter, has_key=engine.is_keyed)
    if found is None or found.base is not None:
        return list(words)
    return [word.replace("{base}", found.base_name or "") for word in words]


def _name(fields: Mapping[str, Any], usual: str) -> str:
    """As given, or made of where it came from."""
    if fields.get("name"):
        return str(fields["name"])
    kept = "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in usual)
    return kept.strip("._-")[:_LONGEST_NAME] or "service"


def _listed(given: Any) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{name}={path}" for name, path in given.items()]
    if isinstance(given, list | tuple):
        return [str(one) for one in given]
    return [] if given is None else [str(given)]


def _spec(name: str, section: ServiceSection, engine: Engine | None) -> ServiceSpec:
    usual, path = Probes(), engine.health if engine is not None else None
    named = [replace(probe, path=path) for probe in (usual.start, usual.ready, usual.live)]
    concurrency = section.concurrency
    if concurrency is None:
        concurrency = engine.concurrency if engine is not None else 0
    return ServiceSpec(
        name=name,
        port=section.port,
        bind=section.bind,
        tls=section.tls_files,
        needs_keys=section.needs_keys,
        probes=section.probes.over(_probes(named)),
        concurrency=concurrency,
        drain_s=section.drain,
        restarts=Restarts(section.restart.max, section.restart.within),
        update=Update(section.update.surge, section.update.timeout, section.update.canary),
        scale=_autoscale(section.replicas),
        retries_posts=section.retry_posts,
        timeout_s=section.timeout,
        door_lost_after_s=section.door_lost_after,
    )


def _probes(three: list[Probe]) -> Probes:
    return Probes(*three)


def _autoscale(replicas: Any) -> Autoscale | None:
    if not isinstance(replicas, ScaleSection):
        return None
    return Autoscale(replicas.min, replicas.max, float(replicas.queue), replicas.latency, replicas.idle)


def _count(section: ServiceSection, placement: Placement, everywhere: Placement) -> int:
    if isinstance(section.replicas, ScaleSection):
        return int(section.replicas.min)
    if section.replicas != ALL:
        return int(section.replicas)
    each = max(1, sum(len(share.gpus) for share in placement.shares))
    return sum(max(1, len(share.gpus) // each) for share in everywhere.shares)
