"""Starts the agent of a state directory, and finds out whether one runs."""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.client.clusterfile import ClusterFile
from ugro.core.errors import NotAllowed, UgroError, Unreachable, error_from_wire
from ugro.core.support.state_dir import StateDir

if TYPE_CHECKING:
    import subprocess

START_LIMIT_S = 30.0
_END_S = 5.0


def start_agent(
    home: StateDir,
    cluster: ClusterFile,
    *,
    log_level: str = "info",
    on_wait: Callable[[str], None] | None = None,
) -> bool:
    """True when the agent is ready; False when another process has started one at the same time.

    Unless a file is asked for, it uses the one that the last agent served, if that one was not stopped on purpose.
    """
    if _start_service(home, on_wait):
        return True
    command = _command(home, cluster, log_level)
    try:
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        process, ready = _spawn(home, command)
    except OSError as error:
        raise home.unusable(error) from error
    try:
        answer = read_answer(ready, on_wait)
    finally:
        os.close(ready)
        # Keeps Popen from warning: the agent outlives this command.
        process.returncode = 0
    state = answer.get("state")
    if state == "ready":
        return True
    if state is None:
        raise Unreachable("the agent did not start", hint=f"see {home.errors} and: ugro agent logs")
    _reap(process.pid)
    if state == "failed":
        raise error_from_wire(answer["error"])
    return False


def _command(home: StateDir, cluster: ClusterFile, log_level: str) -> list[str]:
    command = [sys.executable, "-m", "ugro.agent", "--home", str(home.path), "--log-level", log_level]
    if cluster.path is not None:
        command += ["--cluster", str(cluster.path)]
    if cluster.is_found:
        command.append("--found")
    if not cluster.is_asked_for:
        command.append("--continue")
    return command


def _start_service(home: StateDir, on_wait: Callable[[str], None] | None) -> bool:
    """Where the agent is a service, systemd starts it.

    If the user's own systemd cannot, an agent without it is started. One of the system is not bypassed: it has a
    sandbox, and root decides when it runs.
    """
    from ugro.client.service import installed  # most commands find a running agent

    service = installed(home)
    if service is None:
        return False
    if on_wait:
        on_wait(f"starting {service.name}")
    try:
        service.start()
    except UgroError as error:
        if service.is_system:
            raise NotAllowed(
                f"the agent is {service.name}, which does not start: {error.message}",
                hint=f"{service.command} start {service.name}",
            ) from error
        return False
    return True


def is_locked(home: StateDir) -> bool:
    """Whether an agent runs, starts or stops there."""
    try:
        descriptor = os.open(home.lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_held_by(home: StateDir, pid: int | None) -> bool:
    return is_locked(home) and last_holder(home) == pid


def last_holder(home: StateDir) -> int | None:
    """The pid of the agent that has the lock, or had it last; None while it is being written."""
    try:
        return int(json.loads(home.lock.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kill_hung_agent(home: StateDir, pid: int | None) -> bool:
    """Kills an agent that no longer answers; all its state is on disk. False when it is gone."""
    import signal

    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        # Only a process that holds the lock and is an agent: the pid may have been reused.
        if pid is None or not is_held_by(home, pid) or b"ugro.agent" not in command:
            return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def _spawn(home: StateDir, command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the pipe on which it reports that it is ready."""
    import subprocess  # most commands find a running agent

    # For a crash before logging is set up.
    errors = os.open(home.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    ready, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs],
            start_new_session=True,
            cwd="/",
        )
    except OSError:
        os.close(ready)
        raise
    finally:
        os.close(theirs)
        os.close(errors)
    return process, ready


def read_answer(ready: int, on_wait: Callable[[str], None] | None) -> dict[str, Any]:
    """The agent's answer. Lines before it say what it is busy with."""
    deadline = time.monotonic() + START_LIMIT_S
    poll = select.poll()  # select.select takes no descriptor above 1023, and a notebook may have such
    poll.register(ready, select.POLLIN)
    text, doing = b"", "starting the agent"
    while (left_s := deadline - time.monotonic()) > 0:
        if not poll.poll(min(left_s, 0.3) * 1000):
            if on_wait:
                on_wait(doing)
            continue
        part = os.read(ready, 65536)
        *whole, text = (text + part).split(b"\n")
        for line in whole:
            answer = dict(json.loads(line))
            if answer["state"] != "starting":
                return answer
            doing = f"starting the agent: {answer['text']}"
        if not part:
            break
    return {}


def _reap(pid: int) -> None:
    """Waits for the agent that failed to start, so that a long-lived client keeps no zombie."""
    deadline = time.monotonic() + _END_S
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.005)
