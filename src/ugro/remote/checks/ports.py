"""Whether ports of a node are free, and which process uses those that are not."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from typing import List, NamedTuple

from ugro.remote.identity import user_name
from ugro.remote.messages import Ports, PortUse
from ugro.remote.runs.ports import bind_errno

_TIME_WAIT = 6
_BIND_TRIES = 6


def ports(numbers: List[int]) -> Ports:
    return Ports(tuple(port_use(number) for number in numbers))


def port_use(port: int) -> PortUse:
    for _ in range(_BIND_TRIES):
        number = bind_errno(port)
        if number is None:
            return PortUse(port, is_free=True)
        if number != errno.EADDRINUSE:
            return PortUse(port, is_free=False, error=os.strerror(number))
        seen = _sockets_at(port)
        users = [entry for entry in seen if entry.state != _TIME_WAIT]
        if users:
            return _used(port, users)
        if seen:  # only closed connections in TIME_WAIT: a server that sets SO_REUSEADDR, as most do, can listen
            return PortUse(port, is_free=True)
        # Bound but not in use: most likely another node program on this machine that runs the same check.
        time.sleep(random.uniform(0.005, 0.05))
    return PortUse(port, is_free=False)


class _Socket(NamedTuple):
    state: int
    uid: int
    inode: str


def _sockets_at(port: int) -> List[_Socket]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(_Socket(int(fields[3], 16), int(fields[7]), fields[9]))
    return found


def _used(port: int, sockets: List[_Socket]) -> PortUse:
    """The process, if we may see it; otherwise only its user."""
    wanted = {"socket:[%s]" % entry.inode for entry in sockets}
    user = user_name(sockets[0].uid)
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            links = (os.readlink("/proc/%s/fd/%s" % (pid, fd)) for fd in os.listdir("/proc/%s/fd" % pid))
            if any(link in wanted for link in links):
                with open("/proc/%s/comm" % pid, encoding="utf-8", errors="replace") as name:
                    return PortUse(port, False, None, int(pid), name.read().strip(), user)
    return PortUse(port, is_free=False, user=user)
