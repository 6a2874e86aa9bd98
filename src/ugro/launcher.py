"""Finding the agent of a state directory, and starting one where there is none."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugro.core.errors import Unreachable, error_from_wire
from ugro.core.statedir import StateDir

START_LIMIT_S = 30.0


def start_agent(
    home: StateDir, cluster: Path | None, *, log_level: str = "info", on_wait: Callable[[str], None] | None = None
) -> None:
    """Returns when an agent answers: the one started here, or another command's that was quicker."""
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            _command(home, cluster, log_level, theirs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=_stderr(home),
            pass_fds=[theirs],
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(theirs)
    try:
        answer = _read(ready, on_wait)
    finally:
        os.close(ready)
    state = answer.get("state")
    if state == "failed":
        process.wait(5)
        raise error_from_wire(answer["error"])
    if state == "taken":
        process.wait(5)
    elif state != "ready":
        raise Unreachable("the agent did not start", hint=f"see {home.path / 'agent.err'} and: ugro agent logs")
    # Not our child to wait for: it lives on when this command has ended.
    process.returncode = process.returncode or 0


def _command(home: StateDir, cluster: Path | None, log_level: str, ready_fd: int) -> list[str]:
    command = [sys.executable, "-m", "ugro.agent", "--home", str(home.path), "--log-level", log_level]
    if cluster is not None:
        command += ["--cluster", str(cluster)]
    return [*command, "--ready-fd", str(ready_fd)]


def _stderr(home: StateDir) -> int:
    # A crash before logging is set up must leave a trace somewhere.
    return os.open(home.path / "agent.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def _read(ready: int, on_wait: Callable[[str], None] | None) -> dict[str, Any]:
    deadline = time.monotonic() + START_LIMIT_S
    text = b""
    while (left_s := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([ready], [], [], min(left_s, 0.3))
        if not readable:
            if on_wait:
                on_wait("starting the agent")
            continue
        part = os.read(ready, 65536)
        text += part
        if not part or text.endswith(b"\n"):
            break
    return dict(json.loads(text)) if text.endswith(b"\n") else {}
