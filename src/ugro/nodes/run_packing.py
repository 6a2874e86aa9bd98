"""Runs to be started, in as few messages as they fit into."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ugro.core.errors import UgroError, UsageError
from ugro.remote import wire

_MOST_BYTES = wire.MAX_PAYLOAD // 2
_MOST_OF_ONE = wire.MAX_PAYLOAD - (32 << 10)  # with what every call has besides


def packed(runs: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]] | UgroError]:
    """As many in one message as fit into it; in its place, what fits into none."""
    if len(json.dumps(runs)) <= _MOST_BYTES:
        yield runs
        return
    part: list[dict[str, Any]] = []
    size = 0
    for run in runs:
        length = len(json.dumps(run))
        if part and size + length > _MOST_BYTES:
            yield part
            part, size = [], 0
        if length > _MOST_OF_ONE:
            yield UsageError(f"job {run['job']} is too large to send: {length} bytes (limit {_MOST_OF_ONE})")
            continue
        part.append(run)
        size += length
    if part:
        yield part
