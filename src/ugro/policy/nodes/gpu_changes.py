"""Which GPUs of a node vanished or appeared between two probes, in words."""

from __future__ import annotations

from ugro.core.node import Facts, Gpu
from ugro.policy.wording import count_of, names


def gpu_changes(before: Facts, now: Facts) -> list[str]:
    """A driver that cannot be read says nothing about which GPUs there are."""
    if before.gpu_error is not None or now.gpu_error is not None:
        return []
    old, new = _by_id(before), _by_id(now)
    gone = [_label(gpu) for key, gpu in old.items() if key not in new]
    come = [_label(gpu) for key, gpu in new.items() if key not in old]
    left = f"it has {count_of(len(new), 'GPU')} now" if new else "it has no GPU now"
    verbs = ((gone, "vanished"), (come, "appeared"))
    return [f"{names(some)} {verb}; {left}" for some, verb in verbs if some]


def _by_id(facts: Facts) -> dict[str, Gpu]:
    """By UUID: indexes move when a GPU vanishes."""
    return {gpu.uuid or f"#{gpu.index}": gpu for gpu in facts.gpus}


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} {gpu.model}"
