"""Ports for a rendezvous: free when they were looked at, and given to one run at a time."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import List, Optional

from ugro.node import durable
from ugro.node.clock import boot_id
from ugro.node.program import Refused
from ugro.node.runs.rundir import AgentDir, RunDir

LOWEST = 15000
MOST = 64
_TRIES = 2000
_LOCK_S = 8.0  # several jobs may ask at once, and each writes to the disk meanwhile
_GIVEN_OUT = "/proc/sys/net/ipv4/ip_local_port_range"


def reserve(run: RunDir, count: int, preferred: Optional[int] = None) -> List[int]:
    """The same ports again for a run that has them already: an answer may have been lost."""
    import random  # leaves something to do after every fork of the node program

    if not 0 < count <= MOST:
        raise ValueError("count is not between 1 and %d" % MOST)
    folder = _folder(run.agent)
    durable.make_folder(folder)
    with durable.locked(os.path.join(folder, "lock"), _LOCK_S):
        _forget_past_boots(run.agent)
        ports = owned(run)
        others = random.sample(_candidates(), min(_TRIES, len(_candidates())))
        for port in others if preferred is None else [preferred, *others]:
            if len(ports) >= count:
                break
            if not os.path.exists(os.path.join(folder, str(port))) and bind_errno(port) is None:
                durable.write_json(os.path.join(folder, str(port)), {"run": run.name, "boot_id": boot_id()})
                ports.append(port)
    if len(ports) < count:
        raise Refused("no-port", "no %d ports are free on this node" % count)
    return sorted(ports[:count])


def free(run: RunDir) -> List[int]:
    ports = owned(run)
    for port in ports:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(_folder(run.agent), str(port)))
    return ports


def owned(run: RunDir) -> List[int]:
    return [port for port in _all(run.agent) if _owner(run.agent, port).get("run") == run.name]


def bind_errno(port: int) -> Optional[int]:
    """None: it is free."""
    import socket  # most runs want no port

    # Without SO_REUSEADDR: with it, Linux lets two sockets bind what only one of them can listen on.
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # a machine without IPv6
                return error.errno
    return None


def _candidates() -> range:
    """Below the ports that the kernel gives to outgoing connections: those may be taken the next moment."""
    highest = 32768
    with contextlib.suppress(OSError, ValueError), open(_GIVEN_OUT, encoding="ascii") as file:
        highest = int(file.read().split()[0])
    return range(LOWEST, highest) if highest - LOWEST >= MOST else range(LOWEST, 65536)


def _folder(agent: AgentDir) -> str:
    return os.path.join(agent.path, "ports")


def _all(agent: AgentDir) -> List[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(_folder(agent)) if name.isdigit())
    return []


def _owner(agent: AgentDir, port: int) -> dict[str, str]:
    return durable.read_json(os.path.join(_folder(agent), str(port))) or {}


def _forget_past_boots(agent: AgentDir) -> None:
    for port in _all(agent):
        if _owner(agent, port).get("boot_id") != boot_id():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(_folder(agent), str(port)))
