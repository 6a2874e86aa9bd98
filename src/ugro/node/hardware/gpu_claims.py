"""Claims on GPUs that every account of a machine sees: names of Unix sockets that are in no folder (abstract names).

The kernel gives such a name to one process at a time, of whichever account, and frees it when that process is gone,
however it ended, and so are all that it gave the socket to. A run's supervisor listens on the name of each of its GPUs;
of a GPU that a group shares, on that of a seat. Its reaper has these sockets, too (``SharedClaims``): a supervisor that
is killed may leave processes that use the GPU until the reaper has ended them. Whether a GPU is free is decided by
listening alone. Who listens, the kernel says, too. For which job, the holder says in another name, on which it listens
as well; anybody could, so it is believed of that process and those below it.

Names are those of one network namespace: a container with a network of its own has its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import sys
from functools import lru_cache
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ugro.node.hardware.gpu_facts import lineage, read
from ugro.node.machine import file_name, user_name

Record = Dict[str, Any]

MOST_SHARES = 16  # runs on one GPU
_GPU, _RUN = "ugro-gpu", "ugro-run"
_LONGEST_NAME = 107  # bytes, after the one that says that it is in no folder
_LONGEST_UUID = 64
_LONGEST_AGENT = 32
_LONGEST_JOB = 12
_MOST_NAMES = 512  # that a look takes into account; anybody may make more
_MOST_BYTES = 32 << 20
_MOST_KEPT = 253  # sockets in one message: the kernel's limit
_MOST_UNHEARD = 4096  # connections that nobody has accepted; the kernel may allow fewer
# Where there are no such names, or they are forbidden: then the lock files are all there is.
_NO_NAMES = (
    *(errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP),
    *(errno.ENOSYS, errno.EINVAL, errno.ENOENT),
)
_SIMULATED_DRIVER = "UGRO_NVML_LIBRARY"
# A line of /proc/net/unix about one that listens. A name may hold the end of a line, and so forge others.
_LINE = rb"(?m)^[0-9a-f]+: [0-9A-F]+ [0-9]+ 00010000 0001 [0-9]+ +([0-9]+) @(%s/[!-~]{1,107})$"
_SAID = re.compile(
    r"(?P<agent>[\w.-]{0,32})/(?P<job>[\w.-]{0,12})/(?P<attempt>[0-9]{1,9})/(?P<since>[0-9]{1,11})/[0-9]{1,9}"
    r"/(?P<node>[\w.@-]{0,107})",
    re.ASCII,
)


class Taken(Exception):
    """Somebody listens on the name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    @property
    def is_seat(self) -> bool:
        return self.name.count("/") > 2


class Listener(NamedTuple):
    pid: int  # 0: in another PID namespace
    uid: int


class SharedClaims:
    """Keeps the sockets of one run open for as long as one of the processes that have it lives, or until ``empty``.

    They lie in a queue of the kernel's. Any of those processes can take them out at once, without the others, which may
    be stopped.
    """

    def __init__(self) -> None:
        self._into, self._queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in (self._into, self._queue):
            one.setblocking(False)

    def fileno(self) -> int:
        """What a process that closes all others must leave open."""
        return self._queue.fileno()

    def put(self, sockets: List[int]) -> None:
        with contextlib.suppress(OSError):  # too many are on their way: then they end with who made them
            socket.send_fds(self._into, [b"+"], sockets)

    def has_any(self) -> bool:
        try:
            return bool(self._queue.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def empty(self) -> None:
        while self.has_any():
            for one in socket.recv_fds(self._queue, 1, _MOST_KEPT)[1]:
                os.close(one)


class Claims:
    """Those of one run. They end with ``release``, or with the process that made them and who has ``shared``."""

    def __init__(self, shared: Optional[SharedClaims] = None) -> None:
        self._sockets: List[int] = []
        self._shared = shared

    def hand_over(self) -> None:
        """All have been made: they outlast this process, if another one has them, too."""
        if self._shared is not None and self._sockets:
            self._shared.put(self._sockets)

    def publish(self, record: Record) -> None:
        """For whom it claims; before it does."""
        with contextlib.suppress(Taken):
            self.keep(_listen(_run_name(record)))

    def keep(self, claim: Optional[int]) -> None:
        if claim is not None:
            self._sockets.append(claim)

    def hear(self) -> None:
        """Those who wanted to know who listens have gone; who comes after them finds room."""
        for one in self._sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one)) as listening:
                for _ in range(_MOST_UNHEARD):
                    listening.accept()[0].close()

    def release(self) -> None:
        sockets, self._sockets = self._sockets, []
        if self._shared is not None and sockets:
            self._shared.empty()
        for one in sockets:
            os.close(one)


def held(uuid: str, own_seats: Iterable[int] = ()) -> Optional[int]:
    """The claim on the GPU, which ends when it is closed; None where there are no such names.

    ``Taken`` if another process has it, or a seat that is none of these.
    """
    own = _listen(gpu_name(uuid))
    if own is None:
        return None
    try:
        for number in set(range(MOST_SHARES)).difference(own_seats):
            free = seat(uuid, number)
            if free is not None:
                os.close(free)
    except (OSError, Taken):
        os.close(own)
        raise
    return own


def seat(uuid: str, number: int) -> Optional[int]:
    """The claim on a seat, while the GPU itself is held; raises ``Taken``."""
    return _listen(_seat_name(uuid, number))


class ClaimTable:
    """Who has which GPU, as of the last ``look``."""

    def __init__(self) -> None:
        self._known: Dict[Tuple[bytes, bytes], Listener] = {}  # by the socket's number and name
        self._by_name: Dict[str, Listener] = {}
        self._runs: Dict[Listener, Record] = {}
        self._users: Dict[int, str] = {}  # a name service may be slow

    def look(self) -> None:
        """Asks the kernel once, and again about sockets that are new only."""
        asked = {one: self._known.get(one) or listener(one[1].decode()) for one in listed()}
        self._known = {one: found for one, found in asked.items() if found is not None}
        self._by_name = {name.decode(): found for (_, name), found in self._known.items()}
        said = ((found, _said(name)) for name, found in self._by_name.items() if found.pid)
        self._runs = {found: record for found, record in said if record is not None}

    def holder(self, uuid: str) -> Optional[Record]:
        """One of those that share it, or who has it alone; None if nobody is known to."""
        names = [gpu_name(uuid), *(_seat_name(uuid, number) for number in range(MOST_SHARES))]
        found = next((self._by_name[name] for name in names if name in self._by_name), None)
        return None if found is None else self._record(found)

    def who(self, name: str) -> Record:
        """Who listens on it, as far as that can be known."""
        found = listener(name)
        return _record_of("", {}) if found is None else self._record(found)

    def run_above(self, pid: int) -> Optional[Record]:
        """What the process belongs to, if it or one above it has a claim."""
        if not self._runs:
            return None
        by_pid = {found.pid: (found.uid, record) for found, record in self._runs.items()}
        for one in lineage(pid):
            uid, record = by_pid.get(one, (-1, None))
            # A socket may outlive the process that made it, whose pid somebody else may have by now.
            if record is not None and uid in _uids(one):
                return record
        return None

    def _record(self, found: Listener) -> Record:
        user = self._users.get(found.uid) or user_name(found.uid)
        self._users = {**self._users, found.uid: user}
        return _record_of(user, self._runs.get(found, {}))


def _record_of(user: str, said: Record) -> Record:
    unknown = {"agent": "", "node": "", "job": "", "attempt": 0, "since": 0.0}
    return {**unknown, **said, "user": user, "is_leftover": False}


# --- names ----------------------------------------------------------------------------------------------------------


def _world() -> str:
    """Simulated GPUs of different drivers may have the same UUIDs, and have nothing to do with each other."""
    driver = os.environ.get(_SIMULATED_DRIVER)
    return _hashed(driver) if driver else ""


@lru_cache(maxsize=1)
def _hashed(text: str) -> str:
    from hashlib import sha256  # nodes with real GPUs need none of it

    return sha256(os.fsencode(text)).hexdigest()[:8]


def gpu_name(uuid: str) -> str:
    return "%s/%s/%s" % (_GPU, _world(), file_name(uuid)[:_LONGEST_UUID])


def _seat_name(uuid: str, number: int) -> str:
    return "%s/%d" % (gpu_name(uuid), number)


def _run_name(record: Record) -> str:
    agent, job = file_name(str(record.get("agent")))[:_LONGEST_AGENT], file_name(str(record.get("job")))[:_LONGEST_JOB]
    numbers = (int(record.get("attempt") or 0), int(record.get("since") or 0), os.getpid())
    # Without the account, which the kernel says, too: a long name would be cut.
    node = file_name(str(record.get("node")).rpartition("@")[2])
    text = "%s/%s/%s/%s/%d/%d/%d/%s" % (_RUN, _world(), agent, job, *numbers, node)
    return text[:_LONGEST_NAME]


def _said(name: str) -> Optional[Record]:
    start = "%s/%s/" % (_RUN, _world())
    match = _SAID.fullmatch(name[len(start) :]) if name.startswith(start) else None
    if match is None:
        return None
    said: Record = match.groupdict()
    return {**said, "attempt": int(said["attempt"]), "since": float(said["since"])}


# --- the kernel -------------------------------------------------------------------------------------------------------


def _listen(name: str) -> Optional[int]:
    """None where there are no such names."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.setblocking(False)
            one.bind("\0" + name)
            one.listen(_MOST_UNHEARD)
            return one.detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Taken(name) from error
        if error.errno in _NO_NAMES:
            return None
        raise


def listener(name: str) -> Optional[Listener]:
    """None if nobody listens, or does not say so."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.setblocking(False)
            one.connect("\0" + name)
            pid, uid, _ = struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:  # it has ended, too many have asked, or it was never there
        return None
    return Listener(pid, uid)


def listed() -> List[Tuple[bytes, bytes]]:
    """The numbers and names of sockets that look like ours, and may be anybody's."""
    try:
        with open("/proc/net/unix", "rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError:
        return []
    starts = b"(?:%s|%s)/%s" % (_GPU.encode(), _RUN.encode(), _world().encode())
    return re.findall(_LINE % starts, text)[:_MOST_NAMES] if b"@ugro-" in text else []


def _uids(pid: int) -> List[int]:
    found = re.search(rb"(?m)^Uid:((?:\s+[0-9]+){4})$", read("/proc/%d/status" % pid))
    return [int(word) for word in found[1].split()] if found else []

