"""`net.connect`: a connection to what listens on this node, forwarded over the link in both directions.

It goes to a loopback port, or to a socket in a run directory of this agent. No other host can be named.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import Any, Callable, Dict, List

from ugro.remote.net.forward import Forward, Target
from ugro.remote.net.wake import wake
from ugro.remote.program import Call, Refused
from ugro.remote.state.access import run_of
from ugro.remote.state.rundir import RunDir

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAME = 200


def connect(call: Call, params: Dict[str, Any]) -> None:
    if "socket" in params:
        Forward(call, [_run_socket(run_of(call, params), str(params["socket"]))])
    else:
        Forward(call, _loopback(int(params["port"])))


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {"connect": connect, "wake": wake}


def _loopback(port: int) -> List[Target]:
    if not 0 < port < 65536:
        raise ValueError("port %d is not between 1 and 65535" % port)
    found = [Target(socket.AF_INET, ("127.0.0.1", port), "port %d" % port)]
    if socket.has_ipv6:
        found.append(Target(socket.AF_INET6, ("::1", port), "port %d" % port))
    return found


def _run_socket(run: RunDir, name: str) -> Target:
    """By the descriptor of its folder: a socket's address is limited to 108 bytes, unlike a path."""
    *folders, last = name.split("/")
    if len(name) > _MOST_NAME or "\0" in name or any(part in ("", ".", "..") for part in [*folders, last]):
        raise ValueError("no name for a socket in a run directory: %.80r" % name)
    fd = _entered(run, folders, name)
    try:
        if not stat.S_ISSOCK(os.lstat(last, dir_fd=fd).st_mode):
            raise ValueError("%.80r is no socket" % name)
    except FileNotFoundError:
        os.close(fd)
        raise _missing(run, name) from None
    except (OSError, ValueError):
        os.close(fd)
        raise
    return Target(socket.AF_UNIX, "/proc/self/fd/%d/%s" % (fd, last), "%s of run %s" % (name, run.name), fd)


def _entered(run: RunDir, folders: List[str], name: str) -> int:
    """No link is followed: the socket is below the run directory, whatever a job put there."""
    try:
        fd = os.open(run.path, _FOLDER)
    except FileNotFoundError:
        raise Refused("refused", "run %s is not on this node (any more)" % run.name) from None
    for folder in folders:
        try:
            inner = os.open(folder, _FOLDER, dir_fd=fd)
        except FileNotFoundError:
            raise _missing(run, name) from None
        finally:
            os.close(fd)
        fd = inner
    return fd


def _missing(run: RunDir, name: str) -> Refused:
    return Refused("refused", "nothing listens on %s of run %s" % (name, run.name))
