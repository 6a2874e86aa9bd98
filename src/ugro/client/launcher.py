"""Starts the agent of a state directory, and finds out whether one runs."""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ugro.client.http import AgentGone, Connection
from ugro.kernel.agent.operations import StopAgent
from ugro.kernel.support.errors import (
    ConfigError,
    NotAllowed,
    NotFound,
    UgroError,
    Unallowed,
    Unreachable,
    error_from_wire,
)
from ugro.kernel.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

if TYPE_CHECKING:
    import subprocess


# --- clusterfile ------------------------------------------------------------------------------------------------------
# Finds the cluster file of a command. The agent reads it.


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    path: Path | None  # None: there is no file
    is_asked_for: bool = False  # by an option, the environment, a lab or the folder, not as the user's default
    is_found: bool = False  # in a folder, not named: it may be somebody else's, and must be allowed


def find_cluster_file(explicit: Path | None, env: Mapping[str, str], cwd: Path, home: StateDir) -> ClusterFile:
    """The file that was asked for, which must exist; else that of a lab that is up; else the nearest."""
    if explicit is not None:
        return _existing(cwd / explicit.expanduser(), "check the path given with --cluster, or write one: ugro init")
    if named := env.get(CLUSTER_VARIABLE):
        return _existing(cwd / Path(named).expanduser(), f"check the variable {CLUSTER_VARIABLE}, or unset it")
    # A broken link is found too, and reported: using another cluster would surprise the user.
    if os.path.lexists(home.lab_cluster):
        return ClusterFile(home.lab_cluster, is_asked_for=True)
    return nearest_cluster_file(env, cwd, home)


def nearest_cluster_file(env: Mapping[str, str], cwd: Path, home: StateDir) -> ClusterFile:
    """That of the folder or one above it, or the user's.

    Raises NotAllowed if the folder's file may be another user's work: a cluster file names commands to run here.
    """
    of_user = home.path / CLUSTER_FILE
    for folder in upwards(cwd, Path(env.get("HOME") or "/")):
        path = folder / CLUSTER_FILE
        if path != of_user and os.path.lexists(path):
            _check_owner(path, is_above=folder != cwd)
            return ClusterFile(path, is_asked_for=True, is_found=True)
    return ClusterFile(of_user if os.path.lexists(of_user) else None)


def when_allowed(act: Callable[[], _Answer], home: StateDir, ask: Callable[[Unallowed], bool] | None) -> _Answer:
    """Asks the user about a cluster file that is not allowed yet, and tries again."""
    while True:
        try:
            return act()
        except Unallowed as error:
            if ask is None or not ask(error):
                raise
            from ugro.client.before_agent import allow  # reads configurations: most commands do without

            allow(home, error)


def _existing(path: Path, hint: str) -> ClusterFile:
    try:
        is_there = path.exists()
    except ValueError:  # a path with a NUL in it
        is_there = False
    if not is_there:
        raise ConfigError(f"{path}: no such cluster file", hint=hint)
    return ClusterFile(path, is_asked_for=True)


def upwards(cwd: Path, user_home: Path) -> Iterator[Path]:
    """The folder and those above it: as far as the user's home folder, or as the file system goes."""
    last = _identity(user_home)
    first = _identity(cwd)
    for folder in (cwd, *cwd.parents):
        here = _identity(folder)
        if here is None or first is None or here[0] != first[0]:
            return
        yield folder
        if here == last:
            return


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_owner(path: Path, *, is_above: bool) -> None:
    try:
        found = path.lstat(), path.stat()
        folder = path.parent.stat()
    except OSError:  # a broken link: the agent reports it
        return
    if (problem := why_untrusted(found, folder, os.geteuid(), is_above=is_above)) is not None:
        raise NotAllowed(
            f"{path} is not used: {problem}",
            hint=f"if you trust it: {CLUSTER_VARIABLE}={path}; or name another file: ugro --cluster FILE …",
        )


def why_untrusted(
    found: tuple[os.stat_result, ...], folder: os.stat_result, user: int, *, is_above: bool
) -> str | None:
    """Why a file that was found, not named, is not used. ``found``: the file itself, and the link that leads to it.

    In the current folder the owner decides, as some file systems let everybody write everything.
    """
    if any(one.st_uid not in (user, 0) for one in found):
        return "it belongs to another user"
    writable = [one for one in (*found, folder) if one.st_mode & stat.S_IWOTH and not stat.S_ISLNK(one.st_mode)]
    return "every user can change it or its folder" if is_above and writable else None


# --- launcher ---------------------------------------------------------------------------------------------------------


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
    command = [sys.executable, "-m", "ugro.kernel.agent", "--home", str(home.path), "--log-level", log_level]
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
        if pid is None or not is_held_by(home, pid) or b"ugro.kernel.agent" not in command:
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


# --- stopping ---------------------------------------------------------------------------------------------------------
# Stops an agent and waits for its end; also one that hangs.


STATUS_S = 10.0  # an agent that takes longer to answer hangs
_STOPPING_END_S = 15.0


def end_agent(home: StateDir, connection: Connection, *, only_if_idle: bool = False) -> bool:
    """False if none ran."""
    deadline = time.monotonic() + _STOPPING_END_S
    while time.monotonic() < deadline:
        if stop(home, connection, last_holder(home), only_if_idle=only_if_idle):
            return True
        if not is_locked(home):
            connection.close()
            return False
        time.sleep(0.02)
    raise Unreachable("the agent does not stop", hint=holder_hint(home))


def stop(home: StateDir, connection: Connection, pid: int | None, *, only_if_idle: bool) -> bool:
    """Stops the agent with this pid and no other; False if it could not be asked."""
    if not _ask_to_stop(home, connection, pid, only_if_idle=only_if_idle):
        return False
    deadline = time.monotonic() + _STOPPING_END_S
    while is_held_by(home, pid):
        if time.monotonic() > deadline:
            raise Unreachable("the agent does not stop", hint=holder_hint(home, pid))
        time.sleep(0.02)
    connection.close()
    return True


def _ask_to_stop(home: StateDir, connection: Connection, pid: int | None, *, only_if_idle: bool) -> bool:
    try:
        connection.ask(*StopAgent(pid, only_if_idle).to_wire(), timeout_s=STATUS_S)
    except (AgentGone, NotFound):
        return False
    except Unreachable as error:
        if only_if_idle or not kill_hung_agent(home, pid):
            raise Unreachable(error.message, cause=error.cause, hint=holder_hint(home, pid)) from error
    return True


def holder_hint(home: StateDir, pid: int | None = None) -> str:
    pid = pid or last_holder(home)
    return f"its pid is {pid}; if it hangs: kill -9 {pid}" if pid else f"see which process holds {home.lock}"
