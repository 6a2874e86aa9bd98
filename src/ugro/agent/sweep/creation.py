"""Makes a sweep of a file or a command line: what it searches, its budget, and the spec that its jobs share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.agent.jobs.service import JobService
from ugro.agent.jobs.submission import Needs, Submit
from ugro.agent.sweep.sampler import require
from ugro.config.document import read_document
from ugro.config.problems import config_error
from ugro.core.errors import ConfigError, UsageError
from ugro.core.job import JobSpec
from ugro.core.support.codec import dumps
from ugro.core.support.quantity import parse_duration
from ugro.core.sweep import Budget, Settings
from ugro.policy.sweep.macros import expanded, template, variables, wanted_variables, with_variables
from ugro.policy.sweep.ranges import split_arguments
from ugro.policy.sweep.reading import read
from ugro.policy.sweep.space import grid_size
from ugro.policy.sweep.spec import SweepSpec
from ugro.store.sweeps import NewSweep

_ARGS = "${args}"
_LONGEST_NAME = 64
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


async def prepare(request: SweepRequest, jobs: JobService) -> NewSweep | Needs:
    """Reads and checks everything; records nothing."""
    submit = request.submit
    words, given = split_arguments(submit.fields.get("args") or [])
    tree = _with_options(_tree(request), given, request)
    spec = _read(tree, request)
    require(spec.method)
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
    await jobs.place_idle(base)  # what can never run is refused now
    name = (spec.name if submit.fields.get("name") is None else base.name) or base.name
    return NewSweep(submit.key, _short(name), submit.user, json.dumps(tree), dumps(base), _budget(request, spec))


def trial_spec(base: JobSpec, name: str, settings: Settings) -> JobSpec:
    """The job of a trial: the same for the same settings, whenever it is made."""
    env = {**dict(base.env), **variables(settings)}
    return replace(
        base, name=_short(name), argv=tuple(expanded(base.argv, settings)), env=tuple(sorted(env.items()))
    )


def _short(name: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return kept[:_LONGEST_NAME].strip("._-") or "sweep"


def _tree(request: SweepRequest) -> dict[str, Any]:
    if request.text is None:
        return {}
    document = read_document(request.text, request.file)
    if document.problems:
        raise config_error(request.file, document.problems)
    if not isinstance(document.tree, dict):
        raise ConfigError(f"{request.file}:1: expected a map of keys to values", hint="method: random …")
    if request.method is None and document.tree.get("method") is None:
        raise ConfigError(f"{request.file}: method: missing", hint="method: grid, random or bayes")
    return document.tree


def _read(tree: dict[str, Any], request: SweepRequest) -> SweepSpec:
    try:
        return read(tree)
    except ConfigError as error:
        if request.text is None:
            raise
        raise ConfigError(f"{request.file}: {error.message}", hint=error.hint) from None


def _with_options(tree: dict[str, Any], given: Mapping[str, Any], request: SweepRequest) -> dict[str, Any]:
    tree = {**tree}
    if given:
        tree["parameters"] = {**(tree.get("parameters") or {}), **given}
    if not tree.get("parameters"):
        raise UsageError("nothing to search: no option of the script has several values", hint=_EXAMPLE)
    metric = dict(tree.get("metric") or {})
    named = {"name": request.metric, "goal": request.goal, "target": request.target}
    metric |= {key: value for key, value in named.items() if value is not None}
    if metric:
        tree["metric"] = metric
    if request.prune is not None and request.prune != "none":
        tree["early_terminate"] = {"type": request.prune} | ({"min_iter": 3} if request.prune == "hyperband" else {})
    elif request.prune == "none":
        tree.pop("early_terminate", None)
    if (method := request.method or tree.get("method") or _usual_method(tree, request)) is not None:
        tree["method"] = method
    return tree


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
            gpu_s=None if hours is None else 3600 * float(hours),
            no_improvement=_count(limits, "no_improvement"),
            parallel=_count(limits, "max_parallel"),
            max_failed=_count(limits, "max_failed"),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"ugro: {error}") from None
    names = ("trials", "time_s", "gpu_s", "no_improvement", "parallel", "max_failed")
    return Budget(*(getattr(budget if getattr(budget, name) is not None else of_file, name) for name in names))


def _count(limits: Mapping[str, Any], key: str) -> int | None:
    value = limits.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"ugro.{key}: expected a whole number of 1 or more, got {value!r:.60}")
    return value
