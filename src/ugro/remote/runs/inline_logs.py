"""Logs so small that they are sent with the exit of their run."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from typing import Any, Dict, Iterable, List, Optional

from ugro.remote.files.capped_log import read_cut
from ugro.remote.state.rundir import RunDir

MOST_BYTES = 8 * 1024  # together
_LOG = re.compile(r"rank_([0-9]+)\.log")

Logs = Dict[str, Dict[str, Any]]


def of_run(run: RunDir, record: Dict[str, Any]) -> Optional[Logs]:
    """Of a run that has exited with that record; None when they are large or cut, or a process may still write."""
    numbers = sorted(_numbers(run))
    with contextlib.suppress(OSError):
        if all(read_cut(run.log(number)) == (0, 0, False) for number in numbers):
            return whole(run, numbers, record)
    return None


def whole(run: RunDir, ranks: Iterable[int], record: Dict[str, Any]) -> Optional[Logs]:
    """As ``of_run``, where it is known which ranks have logs, and that those are not cut."""
    if record.get("unkillable"):
        return None
    found: Logs = {}
    left = MOST_BYTES
    with contextlib.suppress(OSError):
        for number in ranks:
            content = content_of(run.log(number), left)
            if content is None:
                return None
            left -= len(content)
            found[str(number)] = {"content": base64.b64encode(content).decode("ascii"), "size": len(content)}
        return found
    return None


def content_of(path: str, most_bytes: int) -> Optional[bytes]:
    """None when it is more."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        content = os.read(fd, most_bytes + 1)
    finally:
        os.close(fd)
    return content if len(content) <= most_bytes else None


def _numbers(run: RunDir) -> List[int]:
    with contextlib.suppress(FileNotFoundError):
        matches = (_LOG.fullmatch(name) for name in os.listdir(run.file("logs")))
        return [int(match[1]) for match in matches if match]
    return []
