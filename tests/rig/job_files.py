"""Job files as tests write them: texts, and the names of two jobs that there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ugro.kernel.jobs.config.file import Resolve, parse_job
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.support.errors import NotFound

JOBS = {"prepare": 7, "last": 9}


def by_name(word: str) -> int:
    if word not in JOBS:
        raise NotFound(f"there is no job {word}", hint="see: ugro status")
    return JOBS[word]


def load(
    text: str,
    overrides: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    resolve: Resolve | None = by_name,
) -> JobSpec:
    return parse_job(text, Path("job.yaml"), fields=overrides or {}).spec(env or {}, resolve)
