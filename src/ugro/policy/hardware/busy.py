"""Whether a node is in use, so that its figures would be wrong and its users disturbed."""

from __future__ import annotations

from collections.abc import Iterator

from ugro.core.node import Facts, Gpu
from ugro.core.owner import OwnerReport

_CPU_USE = 0.5
_GPU_USE = 0.1
_GPU_MEMORY = 0.1


def busy(facts: Facts, owner: OwnerReport | None = None, *, has_jobs: bool) -> str | None:
    """Why it should not be measured now."""
    return next(_reasons(facts, owner, has_jobs), None)


def _reasons(facts: Facts, owner: OwnerReport | None, has_jobs: bool) -> Iterator[str]:
    if has_jobs:
        yield "runs a job"
    if owner is not None and owner.is_there:
        yield f"is used by its owner ({owner.sign})"
    for gpu in facts.gpus:
        if (use := gpu_use(gpu)) is not None:
            yield f"has a busy GPU {gpu.index}: {use}"
    if facts.cpu_use_ratio is not None and facts.cpu_use_ratio > _CPU_USE:
        yield f"has a busy CPU: {facts.cpu_use_ratio * 100:.0f} % in use"


def gpu_use(gpu: Gpu) -> str | None:
    """What uses it now, in words; None: nothing that matters."""
    if gpu.holder is not None:
        return f"used by {gpu.holder}"
    if gpu.use_ratio is not None and gpu.use_ratio > _GPU_USE:
        return f"{gpu.use_ratio * 100:.0f} % in use"
    # A desktop's own programs take a little.
    if gpu.memory_ratio is not None and gpu.memory_ratio > _GPU_MEMORY:
        return f"{gpu.memory_ratio * 100:.0f} % of its memory is taken"
    return None
