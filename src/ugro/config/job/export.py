"""From a job back to a job file, which has the keys that are not defaults. Reading it gives the same job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from ugro.config.job.schema import JobSection
from ugro.config.yamltext import flow
from ugro.core.job import JobSpec


def job_file(spec: JobSpec) -> str:
    return yaml.safe_dump(JobSection.of_spec(spec).written(), sort_keys=False, allow_unicode=True, width=100)


def settings(spec: JobSpec) -> dict[str, str]:
    """The keys of its job file that are not defaults, such as ``resources.gpus_per_node``, as a user writes them.

    Without its name, command and variables, which are about this job alone.
    """
    written = JobSection.of_spec(spec).written()
    return dict(_flat("", {name: value for name, value in written.items() if name not in _ALONE}))


_ALONE = frozenset({"name", "command", "script", "args", "env", "sync"})


def _flat(prefix: str, written: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in written.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value if isinstance(value, str) else flow(value)
