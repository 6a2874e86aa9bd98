"""What differs between jobs: their commands, their environments and their results. Pure: facts in, rows out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from ugro.core.environment import Environment
from ugro.core.job import Job, JobSpec, Resources
from ugro.core.metrics import MetricsSummary
from ugro.core.support.secret import looks_secret

_APART = frozenset({"name", "env", "resources", "argv", "snapshot", "imports"})  # have rows of their own


@dataclass(frozen=True, slots=True)
class Side:
    """Everything known about one job."""

    job: Job
    environments: Mapping[str, Environment]  # by node, of the newest attempt
    metrics: MetricsSummary | None = None
    files: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    values: tuple[str | None, ...]  # one for each job, in order; None: the job has no such value

    @property
    def is_same(self) -> bool:
        return len(set(self.values)) == 1


def compare(sides: Sequence[Side]) -> tuple[Row, ...]:
    """Every fact that any job has, whether it differs or not."""
    facts = [dict(_facts(side)) for side in sides]
    hidden = _hidden(sides)
    keys = dict.fromkeys(key for one in facts for key in one)
    return tuple(hidden.get(key) or Row(key, tuple(one.get(key) for one in facts)) for key in keys)


def _hidden(sides: Sequence[Side]) -> dict[str, Row]:
    """Variables that look secret: shows whether they differ, but not their values."""
    found: dict[str, Row] = {}
    envs = [dict(side.job.spec.env) for side in sides]
    for name in dict.fromkeys(name for env in envs for name in env):
        if looks_secret(name):
            known = dict.fromkeys(env[name] for env in envs if name in env)
            letters = {value: f"*** ({chr(97 + index % 26)})" for index, value in enumerate(known)}
            found[f"env.{name}"] = Row(f"env.{name}", tuple(letters.get(env.get(name, "\0")) for env in envs))
    return found


def _facts(side: Side) -> Iterator[tuple[str, str]]:
    job, spec = side.job, side.job.spec
    yield "name", spec.name
    yield "state", job.state
    yield "command", shlex.join(spec.argv)
    yield "code", spec.snapshot or "not sent"
    if job.origin is not None:
        yield "git", (job.origin.commit or "nothing committed") + (" and changes" if job.origin.is_dirty else "")
        yield "git branch", job.origin.branch or "none"
    yield from ((f"env.{name}", value) for name, value in spec.env)
    yield from _given("", spec, JobSpec("", ()), _APART)
    yield from _given("resources.", spec.resources, Resources(), frozenset())
    yield "nodes", ", ".join(job.placement.nodes) if job.placement else "none"
    yield from _installed(side.environments)
    yield from _outcome(side)


def _given(prefix: str, value: object, default: object, apart: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The fields that differ from their default."""
    for field in fields(value):  # type: ignore[arg-type]  # a dataclass, as both callers give
        found = getattr(value, field.name)
        if field.name not in apart and found != getattr(default, field.name):
            yield f"{prefix}{field.name}", str(found)


def _installed(environments: Mapping[str, Environment]) -> Iterator[tuple[str, str]]:
    """A value that several nodes share is shown once."""
    gathered: dict[str, dict[str, None]] = {}
    for environment in environments.values():
        facts = {
            "python": environment.python,
            "python path": environment.python_path,
            "machine": environment.arch,
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
    if job.started_at and job.ended_at:
        took = datetime.fromisoformat(job.ended_at) - datetime.fromisoformat(job.started_at)
        yield "took", f"{took.total_seconds():.1f} s"
    if job.exit_code is not None:
        yield "exit code", str(job.exit_code)
    yield "attempts", str(job.attempt)
    if job.cached_from is not None:
        yield "cached from", f"job {job.cached_from}"
    yield "result files", str(side.files)
    if metrics is not None:
        numbers = {
            "final loss": metrics.final_loss,
            "best loss": metrics.best_loss,
            "last step": metrics.last_step,
            "loss is not a number from step": metrics.lost_at_step,
            f"throughput ({metrics.throughput_name})": metrics.throughput,
            f"device use ({metrics.device_use_name})": metrics.device_use,
            "imbalance": metrics.imbalance,
            "checkpoint of step": metrics.checkpoint_step,
        }
        yield from ((key, f"{number:.6g}") for key, number in numbers.items() if number is not None)
