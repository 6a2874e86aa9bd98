"""From a job back to a job file: what it says where it differs from what holds anyway. Reading it gives the same job.

What looks secret stays out: such a variable has no value there, and must come with the submit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import yaml

from ugro.config.job.kinds import PRIORITIES
from ugro.core.job import ALL_GPUS, ANY_GPUS, JobSpec, Launcher, Resources
from ugro.core.support.secret import looks_secret

# The file's words for what has other names in a specification.
_SECTIONS = {
    "after": {"ok": "ok", "any": "any"},
    "retry": {"max_retries": "max", "on": "on", "never_on": "never_on"},
    "checkpoint": {"dir": "dir", "every_s": "every"},
    "disconnect": {"lost_after_s": "lost_after", "on_lost": "on_lost"},
    "stop": {"signal": "signal", "grace_s": "grace"},
    "results": {"checkpoints": "checkpoints", "limit_bytes": "limit"},
}
_PLAIN = {
    "cwd": "cwd",
    "setup": "setup",
    "priority": "priority",
    "time_limit_s": "time_limit",
    "outputs": "outputs",
    "seed": "seed",
    "inputs": "inputs",
    "is_cached": "cache",
    "notify": "notify",
    "balance": "balance",
}


def job_file(spec: JobSpec) -> str:
    return yaml.safe_dump(dict(_told(spec)), sort_keys=False, allow_unicode=True, width=100)


def _told(spec: JobSpec) -> Iterator[tuple[str, Any]]:
    yield "name", spec.name
    if spec.launcher is Launcher.COMMAND:
        yield "command", list(spec.argv)
    else:
        yield "script", spec.argv[0]
        yield from _differing("args", list(spec.argv[1:]), [])
        yield from _differing("launcher", str(spec.launcher), str(Launcher.DDP))
    if spec.env:
        yield "env", {name: None if looks_secret(name) else value for name, value in spec.env}
    if spec.snapshot is None and spec.cwd is None:
        yield "sync", False
    yield from _differing("resources", _resources(spec.resources, spec.launcher), {})
    plain = JobSpec("", ())
    for name, word in _PLAIN.items():
        yield from _differing(word, _value(name, getattr(spec, name)), _value(name, getattr(plain, name)))
    yield from _differing("preemptible", spec.is_preemptible, spec.priority <= PRIORITIES["batch"])
    for name, words in _SECTIONS.items():
        yield from _differing(name, _section(getattr(spec, name), getattr(plain, name), words), {})


def _differing(word: str, value: Any, usual: Any) -> Iterator[tuple[str, Any]]:
    if value != usual:
        yield word, value


def _section(value: Any, usual: Any, words: Mapping[str, str]) -> dict[str, Any]:
    assert {one.name for one in fields(value)} == set(words), "a job file must be able to say all of it"
    told = {name: (_value(name, getattr(value, name)), _value(name, getattr(usual, name))) for name in words}
    return {words[name]: now for name, (now, before) in told.items() if now != before}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(name, one) for one in value]
    if name.endswith("_bytes") and value is not None:
        return f"{value}B"
    return str(value) if isinstance(value, str) else value  # a word of an enumeration is one, too


def _resources(wanted: Resources, launcher: Launcher) -> dict[str, Any]:
    if wanted.any_of:
        return {"any_of": [_resources(replace(one, any_of=()), launcher) for one in wanted.any_of]}
    gpu = {
        **({"memory": f"{wanted.gpu_memory_bytes}B"} if wanted.gpu_memory_bytes is not None else {}),
        **({"model": list(wanted.gpu_models)} if wanted.gpu_models else {}),
    }
    usual_gpus = 1 if gpu else 0 if launcher is Launcher.COMMAND else ANY_GPUS
    told = {
        "nodes": _nodes(wanted),
        "gpus_per_node": "all" if wanted.gpus_per_node == ALL_GPUS else wanted.gpus_per_node,
        "gpu": gpu,
        "cpus": wanted.cpus,
        "memory": f"{wanted.memory_bytes}B" if wanted.memory_bytes else None,
        "labels": list(wanted.labels),
    }
    usual = {"nodes": 1, "gpus_per_node": usual_gpus, "gpu": {}, "cpus": None, "memory": None, "labels": []}
    return {word: value for word, value in told.items() if value != usual[word]}


def _nodes(wanted: Resources) -> int | str:
    if wanted.min_nodes == wanted.max_nodes:
        return wanted.min_nodes
    return f"{wanted.min_nodes}..{wanted.max_nodes}"
