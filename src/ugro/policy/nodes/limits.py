"""Which nodes do not hold a job to the memory that it asks for."""

from __future__ import annotations

from collections.abc import Mapping

from ugro.core.job import Placement
from ugro.core.login import node_of
from ugro.core.node import Limits
from ugro.core.support.quantity import format_size
from ugro.policy.wording import in_words


def unlimited_memory(placement: Placement, limits: Mapping[str, Limits]) -> str | None:
    """For a job that asks for memory: which of its nodes do not hold it to that."""
    shares = [share for share in placement.shares if share.memory_bytes]
    names = [node_of(share.node) for share in shares]
    nodes = [name for name in names if name in limits and not limits[name].holds_memory]
    if not nodes:
        return None
    size = format_size(max(share.memory_bytes for share in shares))
    return f"{size} of memory is reserved on {in_words(nodes)}, and not enforced there: the job could take more"
