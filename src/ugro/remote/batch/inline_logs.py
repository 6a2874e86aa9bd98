"""Logs so small that they travel with the word that their run is over."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from typing import Any, Dict, List, Optional

from ugro.remote.files.capped_log import read_cut
from ugro.remote.state.rundir import RunDir

MOST_BYTES = 8 * 1024  # together
_LOG = re.compile(r"rank_([0-9]+)\.log")

Logs = Dict[str, Dict[str, Any]]


def of_run(run: RunDir, record: Dict[str, Any]) -> Optional[Logs]:
    """Of a run that has exited, as ``record`` tells; None when they are large, cut, or somebody may still write."""
    if record.get("unkillable"):
        return None
    found: Logs = {}
    left = MOST_BYTES
    with contextlib.suppress(OSError):
        for number in sorted(_numbers(run)):
            path = run.log(number)
            content = content_of(path, left)
            if content is None or read_cut(path) != (0, 0, False):
                return None
            left -= len(content)
            found[str(number)] = told(content)
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


def told(content: bytes) -> Dict[str, Any]:
    return {"content": base64.b64encode(content).decode("ascii"), "size": len(content)}


def text_of(content: bytes) -> bytes:
    """Of a run of rank 0 alone."""
    return json.dumps({"0": told(content)}, separators=(",", ":")).encode()


def _numbers(run: RunDir) -> List[int]:
    with contextlib.suppress(FileNotFoundError):
        matches = (_LOG.fullmatch(name) for name in os.listdir(run.file("logs")))
        return [int(match[1]) for match in matches if match]
    return []
