"""Turns a submitted job file and options into a job's spec: reads, resolves names, checks that it can run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import stat
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ugro.features.alerts.config import LOG
from ugro.features.discovery.config import DiscoverySection
from ugro.features.environments.config import EnvironmentSection, variables_in
from ugro.features.environments.model import EnvRequest
from ugro.features.environments.service.reading import environment_of, refuse_files, with_old_passwords, with_variables
from ugro.features.environments.service.service import PythonEnvService
from ugro.features.planning.forecasts import Forecasts
from ugro.features.planning.model import DeviceNeed, Prediction
from ugro.features.remote_access.service import as_sent
from ugro.kernel.access.caller import expect_files, expect_visible, may_read_files, viewer
from ugro.kernel.config.section import nearest
from ugro.kernel.files.client_files import Offer, remote_client
from ugro.kernel.files.code.folders import read_slowly
from ugro.kernel.files.code.scanner import Links
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.code.snapshot_store import EMPTY
from ugro.kernel.files.model import Snapshot
from ugro.kernel.jobs.config.file import Draft, draft_job, edited_job, parse_job
from ugro.kernel.jobs.config.options import read_form
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import ALL_NODES, After, Imports, Job, JobSpec, Launcher, Placement
from ugro.kernel.jobs.moves import About
from ugro.kernel.jobs.operations import FolderRead, FolderReading
from ugro.kernel.jobs.operations import Submit as Submit
from ugro.kernel.jobs.result_cache import ResultCache
from ugro.kernel.jobs.script import OwnScript, Words, expect_no_script_elsewhere, own_script, with_script, words_of
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import ConfigError, NotAllowed, NotFound, Unsatisfiable
from ugro.kernel.support.quantities import is_number
from ugro.train.rules.failures import lack_of_ranks

# --- which job a word means -------------------------------------------------------------------------------------------
# Only jobs that the caller may see are found.


class VisibleJobs:
    def __init__(self, store: Store) -> None:
        self._jobs = store.jobs
        self._visibility = store.visibility

    async def find(self, word: str, without: Collection[int] = ()) -> Job:
        """By number, by name (the newest of that name), or ``last``. Raises NotFound."""
        if (who := viewer()) is None:
            return await self._jobs.find(word, without)
        if is_number(word):
            return expect_visible(await self._jobs.find(word), word)
        return await self._visibility.find(word, who, without)


# --- from a request to a spec -----------------------------------------------------------------------------------------


_PYTHONS_PATHS = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE")
_NEEDED = {Launcher.TORCHRUN: ("torch",), Launcher.RAY: ("ray",)}  # modules, by what starts the processes
_LAB = "ugro.lab.enter"
_MANY = 1000  # words or variables
# Keys that say which code and data of this machine a job uses.
_OF_THE_CODE = ("workdir", "cwd", "sync", "inputs", "folders")
Taken = dict[tuple[Path, ...], Snapshot]  # by folder, and what of it is left out


@dataclass(frozen=True, slots=True)
class Needs:
    """Variables whose values the client must send; the rest of its environment is never asked for."""

    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Helpers:
    """What else takes part in a submission."""

    code: Code | None = None
    cache: ResultCache | None = None
    forecasts: Forecasts | None = None
    envs: PythonEnvService | None = None  # makes the environments of its jobs


class SubmissionReader:
    def __init__(self, store: Store, scheduler_input: SchedulerInput, cluster: Cluster, helpers: Helpers) -> None:
        self._envs = helpers.envs
        self._visible = VisibleJobs(store)
        self._cache = helpers.cache
        self._forecasts = helpers.forecasts
        self._scheduler_input = scheduler_input
        self._cluster = cluster
        self._code = helpers.code

    async def spec(self, submit: Submit, taken: Taken | None = None) -> JobSpec | Needs:
        """``taken``: code snapshots shared by jobs that are submitted together."""
        # In a thread, because the file may be on a slow disk, or because there is much to look at.
        is_slow = submit.file is not None or _is_large(submit.fields)
        draft = await asyncio.to_thread(_draft, submit) if is_slow else _draft(submit)
        called = await self._place_script(draft, submit)
        environment = await self._environment(draft, submit)
        wanted = (*draft.wanted_variables, *(variables_in(environment) if environment else ()))
        if submit.env is None and wanted:
            return Needs(wanted)
        spec = called.called_in(await self._resolved(draft, submit.env or {}))
        if environment is not None:
            spec = replace(spec, environment=with_variables(environment, submit.env or {}))
        snapshot = await self._snapshot(draft, submit, {} if taken is None else taken)
        if snapshot is None:
            spec = self._with_cwd(spec, draft, submit)
        else:
            spec = _within(spec, snapshot)
            if (script := _script(spec)) is not None:
                await asyncio.to_thread(self._expect_sent, script, snapshot)
            spec = await self._with_imports(spec)
        spec = await self._with_sdk(spec)
        spec = await self._with_folders(spec, draft, submit)
        if not spec.inputs:
            return spec
        whose = "" if (offer := remote_client()) is None else f"{offer.machine}:"  # never taken for a path of ours
        inputs = [f"{whose}{submit.here / draft.workdir / name}" for name in spec.inputs]
        return replace(spec, inputs=tuple(inputs))

    async def environment(self, submit: Submit) -> EnvRequest | Needs | None:
        """The Python environment that such a job would have; the submission need not say what to run."""
        nothing = {} if submit.file else {"command": ["true"]}
        draft = await asyncio.to_thread(_draft, replace(submit, fields={**nothing, **submit.fields}))
        await self._place_script(draft, submit)
        request = await self._environment(draft, submit)
        wanted = variables_in(request) if request else ()
        if submit.env is None and wanted:
            return Needs(wanted)
        return with_variables(request, submit.env or {})

    async def _environment(self, draft: Draft, submit: Submit) -> EnvRequest | None:
        config = self._cluster.config
        if not (draft.section.environment.given_keys or config.environment.given_keys):
            return None  # most jobs: no thread for them
        return await asyncio.to_thread(environment_of, draft, submit.here, config)

    async def _with_imports(self, spec: JobSpec) -> JobSpec:
        """With what its script imports; and who lacks that is known when this returns."""
        script = spec.argv[0]
        if self._code is None or spec.snapshot is None or spec.launcher is Launcher.COMMAND or script.startswith("-"):
            return spec
        found = await self._code.imports(spec.snapshot, script)
        names = {*found.names, *_NEEDED.get(spec.launcher, ())}
        has_own_path = any(name in _PYTHONS_PATHS for name, _ in spec.env)
        found = Imports(tuple(sorted(names)), found.is_certain and not has_own_path)
        spec = replace(spec, imports=found)
        await self._scheduler_input.learn_imports(spec)
        return spec

    async def _with_sdk(self, spec: JobSpec) -> JobSpec:
        if self._code is None or not await self._code.imports_sdk(spec):
            return spec
        return replace(spec, sdk=True)

    async def _with_folders(self, spec: JobSpec, draft: Draft, submit: Submit) -> JobSpec:
        if not draft.section.folders or self._code is None:
            return spec
        found = [await self._code.folders.take(*one) for one in draft.folders(submit.here).items()]
        return replace(spec, folders=tuple(found))

    async def read_folders(self, submit: Submit) -> AsyncGenerator[list[FolderReading | FolderRead]]:
        """Reads the folders of a job that is about to be submitted, and says how far it is; then they are known."""
        draft = await asyncio.to_thread(_draft, submit)
        for name, path in draft.folders(submit.here).items():
            if self._code is not None:
                async with contextlib.aclosing(read_slowly(self._code.folders, name, path)) as steps:
                    async for step in steps:
                        yield [step]

    async def predict(self, spec: JobSpec, placement: Placement | None) -> Prediction | None:
        """What trials say that it will do there; None if they were not made."""
        if self._forecasts is None or placement is None:
            return None
        return await self._forecasts.predict(spec, placement)

    async def memory(self, spec: JobSpec, placement: Placement | None) -> tuple[DeviceNeed, ...]:
        """What its devices would need in each way to spread its model, as far as trials say."""
        if self._forecasts is None or placement is None or spec.launcher is Launcher.COMMAND:
            return ()
        return await self._forecasts.memory(spec, placement)

    async def note_predictions(self, jobs: Sequence[Job]) -> None:
        """Remembers what is predicted of these jobs, which have just been submitted."""
        for job in jobs:
            if self._forecasts is not None:
                await self._forecasts.note(job)

    async def uses(self, spec: JobSpec, module: str) -> bool:
        """Whether its script imports this module; True if no code is sent, or nobody can tell."""
        if self._code is None or spec.snapshot is None:
            return True
        return await self._code.uses(spec.snapshot, spec.argv[0], module)

    async def with_script(self, spec: JobSpec) -> JobSpec:
        """A spec that now runs another script of its code: with what that imports. Raises ConfigError."""
        await asyncio.to_thread(self._expect_script_in, spec, spec.snapshot, "the code that is sent")
        return await self._with_sdk(await self._with_imports(spec))

    async def derived(self, old: Job, text: str, fields: Mapping[str, str]) -> JobSpec:
        """A job like ``old``, with its code, from its edited job file. Variables without a value keep their old one."""
        draft = await asyncio.to_thread(lambda: edited_job(text, read_form(fields)))
        reason = f"cannot be changed here: the new job has the code of job {old.id}"
        draft.refuse_changes(JobSection.of_spec(old.spec), _OF_THE_CODE, reason)
        hint = "write its value, or remove the variable"
        draft.refuse_lack((name for name, _ in old.spec.env), f"it has no value, and job {old.id} has none", hint)
        spec = await self._resolved(draft, dict(old.spec.env))
        spec = replace(spec, environment=await self._derived_environment(draft, old))
        self.expect_same_code(old)
        await asyncio.to_thread(self._expect_script_in, spec, old.spec.snapshot, f"the code of job {old.id}")
        spec = replace(spec, snapshot=old.spec.snapshot, folders=old.spec.folders)
        return await self._with_sdk(await self._with_imports(spec))

    async def _derived_environment(self, draft: Draft, old: Job) -> EnvRequest | None:
        """From its own text alone. Addresses without passwords keep those of the old job."""
        refuse_files(draft)
        alone = replace(self._cluster.config, environment=EnvironmentSection())
        before = old.spec.environment or EnvRequest()
        request = await asyncio.to_thread(environment_of, draft, Path("/"), alone, before)
        return with_variables(with_old_passwords(request, old.spec.environment), {})

    def progress(self, job: Job) -> str | None:
        """What is done before it can start on its nodes, in words."""
        sending = self._code.progress(job) if self._code is not None else None
        if sending is not None or self._envs is None or job.spec.environment is None or job.placement is None:
            return sending
        return self._envs.progress(job.placement.nodes)

    async def upgraded(self, spec: JobSpec, user: str) -> JobSpec:
        """Resolves its environment again if it asks for that: once, not for each of its attempts. Raises EnvFailed."""
        if spec.environment is None or not spec.environment.upgrade or self._envs is None:
            return spec
        await self._envs.upgrade(spec.environment, user)
        return replace(spec, environment=replace(spec.environment, upgrade=False))

    async def about(self, spec: JobSpec, submit: Submit) -> About:
        """Where its code came from, and whether an earlier job did the same work."""
        if self._cache is None or not spec.is_cached:
            return About(origin=submit.origin)
        return replace(await self._cache.look(spec, submit.user), origin=submit.origin)

    def expect_code(self, job: Job) -> None:
        """Raises NotAllowed if the code that it ran is not here any more."""
        snapshot = job.spec.snapshot
        if snapshot is None or (self._code is not None and not self._code.has(snapshot)):
            what = "ran what was there: no code was sent with it" if snapshot is None else "ran code that is gone"
            raise NotAllowed(f"job {job.id} {what}", hint=f"with its settings only: ugro retry {job.id}")
        self._expect_folders(job.spec, f"job {job.id}")

    def expect_stored(self, spec: JobSpec) -> None:
        """Raises NotAllowed if its code is not here any more."""
        if spec.snapshot is not None and self._code is not None and not self._code.has(spec.snapshot):
            raise NotAllowed(f"the code of {spec.name} is not stored any more", hint="start it again from its folder")
        self._expect_folders(spec, spec.name)

    def _expect_folders(self, spec: JobSpec, whose: str) -> None:
        if self._code is not None and not self._code.folders.has(spec.folders):
            named = ", ".join(one.source for one in spec.folders)
            raise NotAllowed(f"a folder of {whose} is not stored any more: {named}", hint="submit it again")

    def expect_same_code(self, job: Job) -> None:
        """Raises NotAllowed if code was sent with it and is not here any more."""
        if job.spec.snapshot is not None:
            self.expect_code(job)

    async def compared(self, job: Job, user: str) -> str:
        """Whether its nodes still have the same software installed, as this user's jobs see it, in words."""
        changed = await self._cache.changed_since(job, user) if self._cache is not None else None
        return f"since job {job.id}: {changed}" if changed else f"its environment is the same as for job {job.id}"

    async def check_fit(self, specs: Sequence[JobSpec]) -> None:
        """Raises Unsatisfiable for jobs that could never run on this cluster, even if it were idle."""
        await self._scheduler_input.refresh_gpus(specs)
        # Jobs with the same resources are checked once.
        for spec in {(spec.resources, spec.launcher): spec for spec in specs}.values():
            if (misfit := await self._scheduler_input.misfit(spec)) is not None:
                looks = self._cluster.config.section(DiscoverySection).has_sources
                raise Unsatisfiable(misfit.reason, hint=misfit.hint or ("see: ugro node discover" if looks else None))
        for spec in (one for one in specs if one.elastic.min_ranks is not None):
            most = await self._scheduler_input.most_ranks(spec)
            lack = None if most is None else lack_of_ranks(spec.elastic.min_ranks, most)
            if lack is not None:
                raise Unsatisfiable(lack[0], hint=lack[1])

    async def _resolved(self, draft: Draft, env: Mapping[str, str]) -> JobSpec:
        """With ids for names of jobs; raises ConfigError if a job or channel that it names does not exist."""
        ids = {name: await self._id(name) for name in draft.named_jobs}
        spec = draft.spec(env, lambda name: _found(ids, name))
        self._check_channels(spec.notify)
        await self._check_jobs(spec.after)
        return await self._with_all_nodes(spec)

    async def _with_all_nodes(self, spec: JobSpec) -> JobSpec:
        """With the number of nodes that ``all`` means now."""
        wanted, ways = spec.resources, spec.resources.any_of
        if all(one.min_nodes != ALL_NODES for one in (wanted, *ways)):
            return spec
        counted = [await self._scheduler_input.with_all_nodes(spec, one) for one in (wanted, *ways)]
        return replace(spec, resources=replace(counted[0], any_of=tuple(counted[1:])))

    def _check_channels(self, names: Sequence[str]) -> None:
        known = (LOG, *self._cluster.config.channels)
        for name in names:
            if name not in known:
                hint = f"there is: {', '.join(known)}; the cluster file's channels name them"
                raise ConfigError(f"notify: there is no channel {name!r}", hint=hint)

    async def _check_jobs(self, after: After) -> None:
        """An id that does not exist yet would later belong to an unrelated job."""
        for number in (*after.ok, *after.any):
            if await self._id(str(number)) is None:
                raise ConfigError(f"after: there is no job {number}", hint="see: ugro status")

    async def _place_script(self, draft: Draft, submit: Submit) -> _Called:
        """Finds its script, and notes in the draft which folder is sent with one outside of the current folder."""
        section, offer, sync = draft.section, remote_client(), self._cluster.config.sync
        command = section.command
        words = Words(
            words_of(command) if command is not None else (str(section.script), *section.args),
            is_command=command is not None,
            is_workdir_given=section.workdir is not None,
            follows_links=sync.outside_links == Links.FOLLOW,
        )
        here = str(submit.here / draft.workdir)
        if self._code is None or not section.sync or section.cwd is not None:
            return _Called()
        if words.at is None:
            if command is not None and offer is None and may_read_files():
                await asyncio.to_thread(expect_no_script_elsewhere, here, command)
            return _Called()
        if offer is not None:
            found = _offered_script(offer, here, words) if words.names_elsewhere else None
        else:
            found = await asyncio.to_thread(own_script, here, words) if may_read_files() else None
        if found is None:
            return _Called()
        if found.folder != here:
            draft.script_folder = Path(found.folder)
        return _Called(words.at, found.script)

    async def _snapshot(self, draft: Draft, submit: Submit, taken: Taken) -> Snapshot | None:
        """None when no code is sent."""
        if self._code is None or not draft.section.sync or draft.section.cwd is not None:
            return None
        folder = submit.here / draft.workdir
        if draft.section.workdir is None and self._code.why_left_alone(folder) is not None:
            return None
        others = tuple(draft.folders(submit.here).values())  # they go beside the code, not with it
        key = (folder, *others)
        if key not in taken:
            taken[key] = await self._code.take(folder, force=submit.force, without=others)
        return taken[key]

    def _expect_sent(self, script: str, snapshot: Snapshot) -> None:
        if remote_client() is not None:  # its folder is not on this machine
            self._expect_script_there(script, snapshot)
            return
        _expect_script(script, Path(snapshot.folder))
        kind = stat.S_IFMT(os.lstat(Path(snapshot.folder, script)).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ConfigError(f"{script} is neither a file nor a folder", hint="name a Python file")
        if self._code is not None and not self._code.holds(snapshot.id, script):
            raise ConfigError(
                f"{script} is not sent: a .gitignore, a .ugroignore or sync.exclude_patterns excludes it",
                hint=f"to include it, add the line !{script} to .ugroignore",
            )

    def _expect_script_there(self, script: str, snapshot: Snapshot) -> None:
        if self._code is not None and not self._code.holds(snapshot.id, script):
            raise ConfigError(
                f"{script} is not among the files of {snapshot.folder} that are sent",
                hint="name it as seen from there; .gitignore, .ugroignore and sync.exclude_patterns leave files out",
            )

    def _expect_script_in(self, spec: JobSpec, snapshot: str | None, whose: str) -> None:
        script = _script(spec)
        if script is None or snapshot is None or self._code is None:
            return
        if not self._code.holds(snapshot, script):
            raise ConfigError(f"script: {script} is not in {whose}")

    async def _id(self, name: str) -> int | None:
        try:
            return (await self._visible.find(name)).id
        except NotFound:
            return None

    def _with_cwd(self, spec: JobSpec, draft: Draft, submit: Submit) -> JobSpec:
        if spec.cwd is not None:
            return spec
        folder = submit.here / draft.workdir
        is_here = remote_client() is None
        may_grow = self._cluster.config.section(DiscoverySection).adds_nodes
        if is_here and not may_grow and all(_is_here(node.spec) for node in self._cluster.inventory):
            if may_read_files():  # others must not learn what is there
                _expect_there(folder, _script(spec))
            return replace(spec, cwd=str(folder))
        if draft.script_folder is not None:
            self._refuse_left_alone(folder, draft.section.script or shlex.join(spec.argv))
        if draft.section.sync and is_here and may_read_files():
            self._expect_nothing_of(folder, spec.argv)
        program = spec.argv[0]
        is_script = spec.launcher is not Launcher.COMMAND
        if not program.startswith(("/", "~")) and (is_script or "/" in program):
            raise ConfigError(
                f"{program}: where is it on the nodes?",
                hint=f"give its directory there (--cwd DIR), or a whole path such as /data/{Path(program).name}",
            )
        return spec

    def _expect_nothing_of(self, folder: Path, argv: Sequence[str]) -> None:
        """Of a folder that is not sent: a job that names one of its files would only fail on the node."""
        relative = (word for word in argv if not word.startswith(("/", "~")))
        own = next((word for word in relative if os.path.isfile(os.path.join(folder, word))), None)
        if own is not None:
            self._refuse_left_alone(folder, own)

    def _refuse_left_alone(self, folder: Path, own: str) -> None:
        place = self._code.why_left_alone(folder) if self._code is not None else None
        if place is not None:
            raise ConfigError(
                f"{own} is not sent to the nodes: {folder} is {place}, and is never sent as a whole",
                hint="move it to a folder of its own and submit there, or name one to send: --workdir DIR; "
                "if the nodes have it: --cwd DIR",
            )


@dataclass(frozen=True, slots=True)
class _Called:
    """What a job's script is called in the folder that is sent, and which of its words that is."""

    at: int = 0
    script: str | None = None  # None: as it was given

    def called_in(self, spec: JobSpec) -> JobSpec:
        if self.script is None:
            return spec
        return replace(spec, argv=with_script(spec.argv, self.at, self.script))


def _offered_script(offer: Offer, here: str, words: Words) -> OwnScript | None:
    """Of a client on another machine, which alone can say where its script is."""
    assert words.at is not None, "it has a script"
    params = {"here": here, "argv": list(words.argv), "is_command": words.is_command}
    params |= {"is_workdir_given": words.is_workdir_given, "follows_links": words.follows_links}
    found = offer.script(os.path.join(here, words.argv[words.at]), params)
    return None if found is None else as_sent(OwnScript, found)


def _within(spec: JobSpec, snapshot: Snapshot) -> JobSpec:
    """A script given by an absolute path inside the folder is run from the snapshot, too."""
    argv = spec.argv
    if spec.launcher is not Launcher.COMMAND and argv[0].startswith("/"):
        with contextlib.suppress(ValueError):
            argv = (str(Path(argv[0]).relative_to(snapshot.folder)), *argv[1:])
    sent = None if snapshot.id == EMPTY else snapshot.id
    return spec if (argv, sent) == (spec.argv, spec.snapshot) else replace(spec, argv=argv, snapshot=sent)


def _script(spec: JobSpec) -> str | None:
    """None if it need not exist here: a set-up may create it, and an absolute path is one on the nodes."""
    script = spec.argv[0]
    if spec.launcher is Launcher.COMMAND or spec.setup is not None or script.startswith(("/", "~", "-")):
        return None
    return script


def _expect_there(folder: Path, script: str | None) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such directory", hint="--workdir names where its code is")
    if script is not None:
        _expect_script(script, folder)


def _expect_script(script: str, folder: Path) -> None:
    """Checked at submission instead of after hours in the queue."""
    if not os.path.lexists(folder / script):
        raise ConfigError(f"{script}: no such file in {folder}", hint=_similar(script, folder))


def _similar(script: str, folder: Path) -> str:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder / Path(script).parent)
    if (near := nearest(Path(script).name, names)) is not None:
        return f"did you mean {Path(script).with_name(near)}?"
    return "name it as seen from there; --workdir DIR names another folder"


def _draft(submit: Submit) -> Draft:
    if submit.file is not None and (offer := remote_client()) is not None:
        text = offer.text(str(submit.file))
        return parse_job(text, submit.file, fields=submit.fields, as_options=submit.as_options)
    if submit.file is not None:
        expect_files(submit.file)
    return draft_job(submit.file, fields=submit.fields, as_options=submit.as_options)


def _is_large(fields: Mapping[str, Any]) -> bool:
    return any(len(value) > _MANY for value in fields.values() if isinstance(value, str | Sequence | Mapping))


def _found(ids: Mapping[str, int | None], name: str) -> int:
    if (number := ids.get(name)) is None:
        raise NotFound(f"there is no job {name!r}", hint="see: ugro status")
    return number


def _is_here(node: NodeSpec) -> bool:
    """Whether it runs on this machine and has its files."""
    return node.transport == "local" or (isinstance(node.transport, tuple) and _LAB in node.transport)
