"""What differs between jobs: their commands, their environments and their results. Pure: facts in, rows out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ugro.features.experiments.rules.table import best_of, metric_order
from ugro.features.training.model import JobEnergy
from ugro.kernel.jobs.model import Environment, Job
from ugro.kernel.support.moments import elapsed_s
from ugro.kernel.support.secrets import is_secret
from ugro.kernel.telemetry.model import Figure, MetricsSummary

PARAMETER = "parameter "
METRIC = "metric "
_DEFAULT = "default"  # a setting that a job leaves out
_NOT_SENT = "not sent"
_MOST_METRICS = 60


@dataclass(frozen=True, slots=True)
class Side:
    """Everything known about one job."""

    job: Job
    environments: Mapping[str, Environment]  # by node, of the newest attempt
    settings: Mapping[str, str] = field(default_factory=dict)  # keys of its job file that are not defaults
    parameters: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    metrics: MetricsSummary | None = None
    files: int = 0
    energy: JobEnergy | None = None


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    values: tuple[str | None, ...]  # one for each job, in order; None: the job has no such value

    @property
    def is_same(self) -> bool:
        return len(set(self.values)) == 1


def compare(sides: Sequence[Side]) -> tuple[Row, ...]:
    """Every fact that any job has, whether it differs or not."""
    instead = {"code": _code_row(sides), **_hidden(sides)}
    rows = [
        *_rows([dict(_parameters(side)) for side in sides]),
        *_rows([dict(_about(side)) for side in sides]),
        *_environment_rows(sides),
        *_rows([side.settings for side in sides], _DEFAULT),
        *_rows([dict(_outcome(side)) for side in sides]),
        *_metric_rows(sides),
    ]
    return tuple(instead.get(row.key, row) for row in rows)


def _rows(facts: Sequence[Mapping[str, str]], missing: str | None = None) -> Iterator[Row]:
    for key in dict.fromkeys(key for one in facts for key in one):
        yield Row(key, tuple(one.get(key, missing) for one in facts))


def _metric_rows(sides: Sequence[Side]) -> Iterator[Row]:
    """As everywhere: the last finite value, and the best one."""
    names = sorted({name for side in sides for name in side.figures}, key=metric_order)[:_MOST_METRICS]
    for name in names:
        found = [side.figures.get(name) for side in sides]
        yield Row(f"{METRIC}{name} best", _numbers(best_of(name, one) if one else None for one in found))
        yield Row(f"{METRIC}{name} last", _numbers(one.last if one else None for one in found))


def _numbers(values: Iterable[float | None]) -> tuple[str | None, ...]:
    return tuple(None if value is None else f"{value:.6g}" for value in values)


def _hidden(sides: Sequence[Side]) -> dict[str, Row]:
    """Variables that look secret: shows whether they differ, but not their values."""
    found: dict[str, Row] = {}
    envs = [dict(side.job.spec.env) for side in sides]
    for name in dict.fromkeys(name for env in envs for name in env):
        if any(is_secret(name, env[name]) for env in envs if name in env):
            known = dict.fromkeys(env[name] for env in envs if name in env)
            letters = {value: f"*** ({chr(97 + index % 26)})" for index, value in enumerate(known)}
            found[f"env.{name}"] = Row(f"env.{name}", tuple(letters.get(env.get(name, "\0")) for env in envs))
    return found


def _code_row(sides: Sequence[Side]) -> Row:
    """The hashes of others' code are cut short. If one is, all are: the same code looks the same then, too."""
    known = [side.job.spec.snapshot for side in sides]
    length = min((len(one) for one in known if one), default=0)
    return Row("code", tuple(one[:length] if one else _NOT_SENT for one in known))


def _parameters(side: Side) -> Iterator[tuple[str, str]]:
    """Variables have rows of their own."""
    return ((PARAMETER + name, value) for name, value in side.parameters.items() if not name.startswith("env."))


def _about(side: Side) -> Iterator[tuple[str, str]]:
    job, spec = side.job, side.job.spec
    yield "name", spec.name
    yield "state", job.state
    yield "command", shlex.join(spec.argv)
    yield "code", spec.snapshot or _NOT_SENT
    if spec.cwd is not None:
        yield "cwd", spec.cwd
    if job.origin is not None:
        yield "git", (job.origin.commit or "nothing committed") + (" and changes" if job.origin.is_dirty else "")
        yield "git branch", job.origin.branch or "none"
    yield from ((f"env.{name}", value) for name, value in spec.env)
    yield "nodes", ", ".join(job.placement.node_names) if job.placement else "none"


def _environment_rows(sides: Sequence[Side]) -> Iterator[Row]:
    """One row if it is not known of all: every package would seem to be missing where nothing was recorded."""
    if all(side.environments for side in sides):
        yield from _rows([dict(_installed(side.environments)) for side in sides])
    elif any(side.environments for side in sides):
        yield Row("packages", tuple("recorded" if side.environments else "not recorded" for side in sides))


def _installed(environments: Mapping[str, Environment]) -> Iterator[tuple[str, str]]:
    """A value that several nodes share is shown once."""
    gathered: dict[str, dict[str, None]] = {}
    for environment in environments.values():
        facts = {
            "python": environment.python,
            "python path": environment.python_path,
            "machine": environment.arch,
            "environment": environment.name,
            "CUDA of torch": environment.torch_cuda,
            "GPU driver": environment.gpu_driver,
            **{f"package {name}": version for name, version in environment.packages},
        }
        for key, value in facts.items():
            if value is not None:
                gathered.setdefault(key, {})[value] = None
    yield from ((key, ", ".join(values)) for key, values in gathered.items())


def _outcome(side: Side) -> Iterator[tuple[str, str]]:
    job, metrics = side.job, side.metrics
    if job.started and job.ended:
        yield "took", f"{elapsed_s(job.started, job.ended):.1f} s"
    if job.exit_code is not None:
        yield "exit code", str(job.exit_code)
    yield "attempts", str(job.attempt)
    if job.cached_from is not None:
        yield "cached from", f"job {job.cached_from}"
    yield "result files", str(side.files)
    if side.energy is not None:
        yield "energy (Wh)", f"{side.energy.wh:.4g}"
        if side.energy.cost is not None:
            yield f"cost ({side.energy.currency})", f"{side.energy.cost:.4g}"
    if metrics is not None:
        numbers = {
            "last step": metrics.last_step,
            "loss is not finite from step": metrics.lost_at_step,
            f"throughput ({metrics.throughput_name})": metrics.throughput,
            f"device use ({metrics.device_use_name})": metrics.device_use,
            "imbalance": metrics.imbalance,
            "checkpoint of step": metrics.checkpoint_step,
        }
        yield from ((key, f"{number:.6g}") for key, number in numbers.items() if number is not None)
