"""Makes a sweep of a file or a command line: what it searches, its budget, and the spec that its jobs share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePath
from random import Random
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.features.sweeps import study_worker
from ugro.features.sweeps.model import Budget, Settings
from ugro.features.sweeps.rules.reading import (
    check_keys,
    expanded,
    positive,
    read,
    template,
    variables,
    wanted_variables,
    with_variables,
)
from ugro.features.sweeps.rules.spec import (
    ARGS,
    SCRIPT,
    Kind,
    Options,
    SweepSpec,
    flags_of,
    grid_size,
    options_of,
    random_place,
    scripts_of,
    split_arguments,
)
from ugro.features.sweeps.rules.spec import settings as settings_at
from ugro.features.sweeps.service.sampler import require
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.config.document import read_document
from ugro.kernel.config.kinds import BadValueError
from ugro.kernel.config.section import Key, config_error, made
from ugro.kernel.jobs.config.kinds import FILE_LIMITS, MOST_BYTES, MOST_WORDS, USE_A_FILE, why_too_large
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, JobSpec, Launcher
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import ConfigError, UsageError
from ugro.kernel.support.quantities import format_size, parse_duration

# --- job options ------------------------------------------------------------------------------------------------------
# Options of a job that the values of a sweep's parameters set. The schema of job files says which there are.


_ENV = "env"
# They name files or other jobs, which are read once for all trials, or they say where all trials run.
_OF_ALL = ("after", "command", "cwd", "environment", "folders", "inputs", "launcher", "name", "resources")
_COUNTED = ("priority", "time_limit", "stop")


def settable() -> dict[str, Key]:
    """The keys of a job file that may differ between trials."""
    known = {one.name for one in fields(JobSpec)}
    keys = JobSection.known_keys().items()
    own = {name: one for name, one in keys if (one.attribute or name) in known and name not in _OF_ALL}
    return {name: JobSection.known_keys()[name] for name in (SCRIPT, ARGS)} | own


def check_options(options: Options, base: JobSpec) -> None:
    """Raises ConfigError, which names the key."""
    keys = settable()
    for parameter, values in options.items():
        for value, given in values.items():
            for name, one in given.items():
                at = f"ugro.options.{parameter}.{value}.{name}"
                if name not in keys:
                    raise ConfigError(f"{at}: cannot differ between trials", hint=f"there is: {', '.join(keys)}")
                if name in (SCRIPT, ARGS) and base.launcher is Launcher.COMMAND:
                    raise ConfigError(f"{at}: the sweep runs a command", hint="program: train.py")
                _parsed(keys[name], one, at)


def as_counted(base: JobSpec, options: Options) -> list[JobSpec]:
    """The jobs of its trials, as far as quotas tell them apart."""
    found = [base]
    for values in options.values():
        given = [{name: one[name] for name in _COUNTED if name in one} for one in values.values()]
        made = [with_options(spec, one) for spec in found for one in given]
        found = list({(one.priority, one.time_limit_s, one.stop): one for one in made}.values()) or found
    return found


def with_options(spec: JobSpec, given: Mapping[str, Any]) -> JobSpec:
    """``given`` has been checked."""
    keys, changes = settable(), dict[str, Any]()
    script, *words = spec.argv
    changes["argv"] = (given.get(SCRIPT, script), *words, *given.get(ARGS, ()))
    for name, value in given.items():
        if name == _ENV:
            changes[_ENV] = tuple(sorted({**dict(spec.env), **value}.items()))
        elif name not in (SCRIPT, ARGS):
            changes[keys[name].attribute or name] = made(_parsed(keys[name], value, name))
    return replace(spec, **changes)


def _parsed(key: Key, value: Any, at: str) -> Any:
    try:
        if key.name == _ENV and isinstance(value, dict) and None in value.values():
            raise BadValueError("every variable needs a value here")
        return key.kind.parse(value)
    except BadValueError as error:
        raise ConfigError(f"{at}: {error.message}", hint=error.hint) from None


# --- creation ---------------------------------------------------------------------------------------------------------


_ARGS = "${args}"
_LONGEST_NAME = 64
_MOST_PER_GPU = 16
_EXAMPLE_FILE = "for example: {program: train.py, method: grid, parameters: {lr: {values: [0.1, 0.01]}}}"
_EXAMPLE = 'ugro sweep train.py --lr "1e-3,1e-4", or: ugro sweep -f sweep.yaml'


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """As a client sends it. Options override the file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    submit: Submit
    text: str | None = None  # of a file
    file: str = "sweep.yaml"  # its name
    method: str | None = None
    metric: str | None = None
    goal: str | None = None
    target: float | None = None
    prune: str | None = None
    budget: Budget = field(default_factory=Budget)
    study: bool = False  # the script has an Optuna study of its own


async def prepare(request: SweepRequest, jobs: JobService) -> NewSweep | Needs:
    """Reads and checks everything; records nothing."""
    if request.study:
        return await _prepare_study(request, jobs)
    submit = request.submit
    # In a thread: it may have hundreds of values.
    tree, spec, words = await asyncio.to_thread(_creation_parsed, request)
    require(spec.method, spec.pruning.kind if spec.pruning else "")
    fields = _job_fields(request, spec, words)
    wanted = wanted_variables([*fields.get("args", []), *fields.get("command", [])])
    if wanted and submit.env is None:
        return Needs(wanted)
    for key in ("args", "command"):
        fields[key] = with_variables(fields.get(key, []), submit.env or {})
    fields = {key: value for key, value in fields.items() if value != []}
    base = await jobs.read(replace(submit, fields=fields))
    if isinstance(base, Needs):
        return Needs((*wanted, *base.variables))
    budget = _budget(request, spec)
    base = sharing_one(base, budget)
    check_options(spec.options, base)
    await asyncio.to_thread(_expect_startable, base, spec)
    await jobs.place_idle(base)  # what can never run is refused now
    for one in as_counted(base, spec.options):
        await jobs.expect_allowed(one, submit.user)
    for script in scripts_of(spec.options):
        await jobs.with_script(replace(base, argv=(script, *base.argv[1:])))
    name = (spec.name if submit.fields.get("name") is None else base.name) or base.name
    return NewSweep(submit.key, _short(name), submit.user, json.dumps(tree), dumps(base), budget)


async def _prepare_study(request: SweepRequest, jobs: JobService) -> NewSweep | Needs:
    submit = request.submit
    named = {name: getattr(request, name) for name in ("method", "metric", "goal", "target", "prune", "text")}
    named["no_improvement"] = request.budget.no_improvement
    if given := [name.replace("_", "-") for name, value in named.items() if value is not None]:
        what = "a sweep file" if given[0] == "text" else f"--{given[0]}"
        raise UsageError(f"{what} and --study exclude each other", hint="the script itself says what it searches")
    if not submit.fields.get("script"):
        raise UsageError("--study needs a script", hint="ugro sweep --study search.py")
    _check_shares(request.budget.trials_per_gpu)
    base = await jobs.read(submit)
    if isinstance(base, Needs):
        return base
    name = _short(base.name)
    env = {**dict(base.env), "UGRO_STUDY": name}
    base = replace(base, argv=("-m", study_worker.MODULE, *base.argv), sdk=True, env=tuple(sorted(env.items())))
    base = sharing_one(base, request.budget)
    await jobs.place_idle(base)
    await jobs.expect_allowed(base, submit.user)
    tree = {"method": "study", "parameters": {"worker": {"min": 1, "max": 1_000_000}}}
    return NewSweep(submit.key, name, submit.user, json.dumps(tree), dumps(base), request.budget)


def sharing_one(base: JobSpec, budget: Budget) -> JobSpec:
    """With one GPU, if several trials are to share each. Raises UsageError if that cannot be."""
    if budget.trials_per_gpu == 1:
        return base
    wanted = base.resources
    if wanted.any_of or wanted.max_nodes > 1 or wanted.gpus_per_node not in (1, ALL_GPUS, ANY_GPUS):
        raise UsageError("trials that share a GPU have one on one node", hint="leave --nodes and --gpus-per-node out")
    if base.is_preemptible:  # a job that needs the GPU would have to end all of them
        raise UsageError("trials that share a GPU cannot be preemptible", hint="leave one of both out")
    return replace(base, resources=replace(wanted, gpus_per_node=1))


def trial_spec(base: JobSpec, name: str, settings: Settings, options: Options) -> JobSpec:
    """The job of a trial: the same for the same settings, whenever it is made."""
    env = {**dict(base.env), **variables(settings)}
    argv = tuple(expanded(base.argv, flags_of(options, settings)))
    made = replace(base, name=_short(name), argv=argv, env=tuple(sorted(env.items())))
    return with_options(made, options_of(options, settings))


async def trial_job(base: JobSpec, name: str, trial: Settings, options: Options, jobs: JobService) -> JobSpec:
    """The same, with what its script imports if that is another one."""
    made = trial_spec(base, name, trial, options)
    return made if made.argv[:1] == base.argv[:1] else await jobs.with_script(made)


def _short(name: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return kept[:_LONGEST_NAME].strip("._-") or "sweep"


def _creation_parsed(request: SweepRequest) -> tuple[dict[str, Any], SweepSpec, list[str]]:
    given_words = request.submit.fields.get("args") or []
    if len(given_words) > MOST_WORDS or sum(map(len, map(str, given_words))) > MOST_BYTES:
        limit = f"at most {MOST_WORDS} words of {format_size(MOST_BYTES)} together"
        raise UsageError(f"ARGS: expected {limit}", hint="write a range, or a sweep file: ugro sweep -f sweep.yaml")
    words, given = split_arguments(given_words)
    tree = _with_options(_tree(request), given, request)
    return tree, _read(tree, request), words


def _expect_startable(base: JobSpec, spec: SweepSpec) -> None:
    """Raises UsageError if a trial with the longest values could not be started."""
    place = random_place(spec.parameters, Random(0))
    for one in spec.parameters:
        if one.axis.kind is Kind.CHOICE:
            lengths = [len(str(value)) for value in one.values]
            place[one.name] = lengths.index(max(lengths))
    found = why_too_large(trial_spec(base, base.name, settings_at(spec.parameters, place), spec.options))
    if found is not None:
        raise UsageError(f"a trial is too large: {found[1]}", hint=USE_A_FILE)


def _tree(request: SweepRequest) -> dict[str, Any]:
    if request.text is None:
        return {}
    document = read_document(request.text, request.file, FILE_LIMITS, example=_EXAMPLE_FILE)
    if document.problems:
        raise config_error(request.file, document.problems)
    if not isinstance(document.tree, dict):
        raise ConfigError(f"{request.file}:1: expected a map of keys to values", hint="method: random …")
    with _of_file(request):  # before anything is missed that is only mistyped
        check_keys(document.tree)
    if document.tree.get("method") == "study":
        raise ConfigError(f"{request.file}: method: 'study' is not supported", hint="ugro sweep --study SCRIPT")
    if request.method is None and document.tree.get("method") is None:
        raise ConfigError(f"{request.file}: method: missing", hint="method: grid, random or bayes")
    return document.tree


def _read(tree: dict[str, Any], request: SweepRequest) -> SweepSpec:
    with _of_file(request):
        return read(tree)


@contextlib.contextmanager
def _of_file(request: SweepRequest) -> Iterator[None]:
    """Errors name the file, if there is one."""
    try:
        yield
    except ConfigError as error:
        if request.text is None:
            raise
        raise ConfigError(f"{request.file}: {error.message}", hint=error.hint) from None


def _with_options(tree: dict[str, Any], given: Mapping[str, Any], request: SweepRequest) -> dict[str, Any]:
    tree = {**tree}
    if given:
        tree["parameters"] = {**_part(tree, "parameters", request), **given}
    if not tree.get("parameters"):
        raise UsageError("nothing to search: no option of the script has several values", hint=_EXAMPLE)
    named = {"name": request.metric, "goal": request.goal, "target": request.target}
    if metric := {key: value for key, value in named.items() if value is not None}:
        tree["metric"] = {**_part(tree, "metric", request), **metric}
    if request.prune is not None and request.prune != "none":
        tree["early_terminate"] = {"type": request.prune} | ({"min_iter": 3} if request.prune == "hyperband" else {})
    elif request.prune == "none":
        tree.pop("early_terminate", None)
    if (method := request.method or tree.get("method") or _usual_method(tree, request)) is not None:
        tree["method"] = method
    return tree


def _part(tree: Mapping[str, Any], key: str, request: SweepRequest) -> Mapping[str, Any]:
    """Of a file, to which options add something."""
    found = tree.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{request.file}: {key}: expected a map of keys to values, got {found!r:.60}")
    return found


def _usual_method(tree: Mapping[str, Any], request: SweepRequest) -> str:
    """A grid if that is what was written: values, and no fewer trials than it has points."""
    looked = read({"parameters": tree["parameters"], "method": "random"})
    size = grid_size(looked.parameters)
    most = request.budget.trials
    if size is not None and (most is None or most >= size):
        return "grid"
    return "bayes" if tree.get("metric") else "random"


def _job_fields(request: SweepRequest, spec: SweepSpec, words: list[str]) -> dict[str, Any]:
    given = {key: value for key, value in request.submit.fields.items() if key not in ("script", "args")}
    program = request.submit.fields.get("script") or spec.program
    is_script, command = template(spec.command, program)
    name = PurePath(program).stem if program else "sweep"
    fields = {"name": name, **spec.fields, **given}
    if not is_script:
        if words:
            raise UsageError(f"{words[0]}: the file's command says what is run", hint="add it to command")
        return {**fields, "command": command}
    known = command if request.text is not None else [_ARGS]
    return {**fields, "script": program, "args": [*words, *known]}


def _budget(request: SweepRequest, spec: SweepSpec) -> Budget:
    """Options first, then what the file says under ``ugro``."""
    limits, budget = spec.limits, request.budget
    hours = limits.get("gpu_hours")
    try:
        of_file = Budget(
            trials=spec.run_cap,
            time_s=None if limits.get("time") is None else parse_duration(limits["time"]),
            gpu_s=None if hours is None else 3600 * positive("ugro.gpu_hours", hours),
            no_improvement=_count(limits, "no_improvement"),
            parallel=_count(limits, "max_parallel"),
            max_failed=_count(limits, "max_failed"),
            trials_per_gpu=_count(limits, "trials_per_gpu") or 1,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"ugro: {error}") from None
    names = ("trials", "time_s", "gpu_s", "no_improvement", "parallel", "max_failed")
    per_gpu = budget.trials_per_gpu if budget.trials_per_gpu > 1 else of_file.trials_per_gpu
    _check_shares(per_gpu)
    if budget.gpu_s is not None:
        positive("--gpu-hours", budget.gpu_s)
    found = Budget(*(getattr(budget if getattr(budget, name) is not None else of_file, name) for name in names))
    return replace(found, trials_per_gpu=per_gpu)


def _check_shares(per_gpu: int) -> None:
    if not 1 <= per_gpu <= _MOST_PER_GPU:
        raise UsageError(f"{per_gpu} trials cannot share a GPU", hint=f"1 to {_MOST_PER_GPU} can")


def _count(limits: Mapping[str, Any], key: str) -> int | None:
    value = limits.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"ugro.{key}: expected a whole number of 1 or more, got {value!r:.60}")
    return value
