"""``client.jobs.get`` turned into a script or manifest for another system."""

from __future__ import annotations

from collections.abc import Callable

from ugro import __version__
from ugro.features.export import rules_kubernetes as kubernetes
from ugro.features.export.rules import Subject, comment, sbatch, script, subject_of
from ugro.kernel.jobs.model import Job

DEFAULT_IMAGE = "pytorch/pytorch:latest"


def export(job: Job, target: str, *, image: str = DEFAULT_IMAGE) -> str:
    """``target``: one of ``TARGETS``. Raises Unsatisfiable for a job that no other system can run."""
    return _WRITERS[target](subject_of(job, __version__), image)


def _jobset(subject: Subject, image: str) -> str:
    import yaml

    comments = "\n".join(line for one in kubernetes.comments(subject) for line in comment(one))
    document = kubernetes.jobset(subject, image)
    return f"{comments}\n{yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10**6)}"


_WRITERS: dict[str, Callable[[Subject, str], str]] = {
    "slurm": lambda subject, image: sbatch(subject),
    "kubernetes": _jobset,
    "torchrun": lambda subject, image: script(subject),
}
TARGETS = tuple(_WRITERS)
