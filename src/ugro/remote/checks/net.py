"""What ``ugro doctor`` looks at in a node's network: its addresses, free ports, and whether nodes reach each other.

All of it may block; ``remote.check`` runs it in a process of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import struct
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ugro.remote.runs.linger import user_name

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_TIME_WAIT = 6
_BIND_TRIES = 6
_HELLO_S = 2.0


def network(ports: List[int]) -> Dict[str, Any]:
    return {"addresses": addresses(), "ports": [port_use(port) for port in ports]}


def addresses() -> List[str]:
    """The IPv4 address of each interface that is up and not loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address, or has just gone
                flags = struct.unpack_from("H", fcntl.ioctl(query, _SIOCGIFFLAGS, request), 16)[0]
                if flags & _IFF_UP and flags & _IFF_RUNNING and not flags & _IFF_LOOPBACK:
                    found.append(socket.inet_ntoa(fcntl.ioctl(query, _SIOCGIFADDR, request)[20:24]))
    return found


def port_use(port: int) -> Dict[str, Any]:
    answer: Dict[str, Any] = {"port": port, "is_free": True, "error": None, "pid": None, "process": None, "user": None}
    for _ in range(_BIND_TRIES):
        number = _bind_errno(port)
        if number is None:
            return answer
        if number != errno.EADDRINUSE:
            return {**answer, "is_free": False, "error": os.strerror(number)}
        seen = _sockets_at(port)
        users = [entry for entry in seen if entry.state != _TIME_WAIT]
        if users:
            return {**answer, "is_free": False, **_owner(users)}
        if seen:  # only the remains of closed connections: whoever sets SO_REUSEADDR, as servers do, may listen
            return answer
        # Bound by somebody and not in use: most likely another node program on this machine that tests it as we do.
        time.sleep(random.uniform(0.005, 0.05))
    return {**answer, "is_free": False}


def listen(params: Dict[str, Any], say: Callable[[Dict[str, Any]], None]) -> Dict[str, Any]:
    """Says its port, then waits for one connection that knows the word."""
    deadline = time.monotonic() + float(params["timeout_s"])
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(8)
        say({"port": listener.getsockname()[1]})
        while True:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, peer = listener.accept()
            with connection, contextlib.suppress(OSError):  # a stranger's: the next one may be ours
                connection.settimeout(_HELLO_S)
                if _receive(connection, len(params["word"])) == params["word"]:
                    connection.sendall(str(params["reply"]).encode())
                    return {"peer": peer[0]}


def connect(params: Dict[str, Any]) -> Dict[str, Any]:
    """Tries the addresses in turn; only an answer with the reply counts, as anybody may listen there."""
    candidates = [str(address) for address in params["addresses"]]
    limit_s = float(params["timeout_s"]) * 0.9 / max(1, len(candidates))
    tried = []
    for address in candidates:
        try:
            connect_s = _greet(address, limit_s, params)
        except OSError as error:
            tried.append({"address": address, "error": error.strerror or str(error)})
            continue
        if connect_s is not None:
            return {"address": address, "connect_s": connect_s, "tried": tried}
        tried.append({"address": address, "error": "something else answers there"})
    return {"address": None, "connect_s": None, "tried": tried}


def _greet(address: str, limit_s: float, params: Dict[str, Any]) -> Optional[float]:
    # Not by create_connection: what that loads to resolve names would count as connecting.
    with socket.socket() as connection:
        connection.settimeout(limit_s)
        started = time.monotonic()
        connection.connect((address, int(params["port"])))
        connect_s = time.monotonic() - started
        connection.settimeout(max(0.01, limit_s - connect_s))
        connection.sendall(str(params["word"]).encode())
        return connect_s if _receive(connection, len(params["reply"])) == params["reply"] else None


def _receive(connection: socket.socket, length: int) -> str:
    text = b""
    while len(text) < length:
        part = connection.recv(length - len(text))
        if not part:
            break
        text += part
    return text.decode("ascii", "replace")


def _bind_errno(port: int) -> Optional[int]:
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


def _owner(sockets: List[_Socket]) -> Dict[str, Any]:
    """As far as we may look: the process, else at least whose it is."""
    wanted = {"socket:[%s]" % entry.inode for entry in sockets}
    user = user_name(sockets[0].uid)
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            links = (os.readlink("/proc/%s/fd/%s" % (pid, fd)) for fd in os.listdir("/proc/%s/fd" % pid))
            if any(link in wanted for link in links):
                with open("/proc/%s/comm" % pid, encoding="utf-8", errors="replace") as name:
                    return {"pid": int(pid), "process": name.read().strip(), "user": user}
    return {"user": user}
