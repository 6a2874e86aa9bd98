"""From a job back to a job file, which has the keys that are not defaults. Reading it gives the same job."""

from __future__ import annotations

import yaml

from ugro.config.job.schema import JobSection
from ugro.core.job import JobSpec


def job_file(spec: JobSpec) -> str:
    return yaml.safe_dump(JobSection.of_spec(spec).written(), sort_keys=False, allow_unicode=True, width=100)
