"""One connection on this node, and a call over the link: bytes go both ways, each no faster than the other end reads.

To the agent go OUT frames as it grants credit; an empty one says that the server has ended its side. From the agent
come INPUT frames within what CREDIT frames have granted: the first of them says that the connection is open. A
connection that is cut off is reset and not closed: its server must not take the part that arrived for the whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from typing import Any, List, Optional, Set

from ugro.node import wire
from ugro.node.program import Call, Refused, method
from ugro.node.runs.rundir import RunDir, run_of

MOST = 64  # at once, for one link
CONNECT_S = 10.0
_RETRY_S = 0.05
_GRANTED_AT_ONCE = wire.WINDOW // 4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PLAIN_CLOSE = struct.pack("ii", 0, 0)
_RESET = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ENOTCONN, errno.ETIMEDOUT)


class Target:
    """``folder``: a descriptor that the address goes through; closed when the connection is open or has failed."""

    def __init__(self, family: int, address: Any, label: str, folder: Optional[int] = None) -> None:
        self.family = family
        self.address = address
        self.label = label
        self.folder = folder

    def close(self) -> None:
        if self.folder is not None:
            os.close(self.folder)
            self.folder = None


_open: Set[Forward] = set()


class Forward:
    def __init__(self, call: Call, targets: List[Target]) -> None:
        self._targets = targets
        if len(_open) >= MOST:
            self._close_targets()
            raise Refused("busy", "%d connections are forwarded from this node, which is the most at once" % MOST)
        self._call = call
        self._program = call.program
        self._label = targets[0].label
        self._socket: Optional[socket.socket] = None
        self._writing: Optional[int] = None  # a second descriptor of it: one is watched for one thing
        self._is_watching_writes = False
        self._is_reading = False
        self._is_waiting = False  # until the link has taken what is queued
        self._is_connected = False
        self._credit = wire.WINDOW
        self._has_read_all = False
        self._room = 0
        self._pending = bytearray()
        self._taken = 0
        self._has_input_ended = False
        self._is_broken = False  # the server takes no more
        _open.add(self)
        call.on_cancel, call.on_input, call.on_credit = self._cancel, self._input, self._grant
        self._program.after(CONNECT_S, self._expect_connected)
        self._connect()

    # --- connecting --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """To the first target that does not refuse."""
        while self._targets and not self._call.is_done:
            problem = self._try(self._targets[0])
            if problem in (0, errno.EINPROGRESS):
                return
            if problem == errno.EAGAIN:  # the server has not accepted those before us
                self._program.after(_RETRY_S, self._connect)
                return
            self._drop_socket()
            self._targets.pop(0).close()
            if not self._targets:
                self._fail(*self._refusal(problem))

    def _try(self, target: Target) -> int:
        self._drop_socket()
        try:
            made = self._socket = socket.socket(target.family, socket.SOCK_STREAM)
        except OSError as error:  # no IPv6 in this kernel, or no descriptor left
            return errno.ECONNREFUSED if error.errno == errno.EAFNOSUPPORT else error.errno or errno.EIO
        made.setblocking(False)
        if target.family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Until both sides have ended: also when this process is killed.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        try:
            problem = made.connect_ex(target.address)
            if problem in (0, errno.EINPROGRESS):
                self._writing = os.dup(made.fileno())
                self._watch_writes(True)
        except OSError as error:  # a socket's name that is too long has no number; or no descriptor is left
            return error.errno or errno.ENAMETOOLONG
        return problem

    def _refusal(self, problem: int) -> List[str]:
        if problem in (errno.ECONNREFUSED, errno.ENOENT, errno.EADDRNOTAVAIL):
            return ["refused", "nothing listens on %s" % self._label]
        return ["os", "%s: %s" % (self._label, os.strerror(problem))]

    def _connected(self) -> None:
        assert self._socket is not None
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem == 0 and _is_own_reflection(self._socket):
            problem = errno.ECONNREFUSED
        if problem:
            self._drop_socket()
            self._targets.pop(0).close()
            if self._targets:
                self._connect()
            else:
                self._fail(*self._refusal(problem))
            return
        self._is_connected = True
        self._close_targets()
        self._room = wire.WINDOW
        self._call.data(wire.CREDIT, wire.AMOUNT.pack(wire.WINDOW))
        self._watch_writes(False)
        self._watch_reads()

    def _expect_connected(self) -> None:
        if not self._is_connected and not self._call.is_done:
            self._fail("timed-out", "%s did not accept a connection within %g s" % (self._label, CONNECT_S))

    # --- from the server to the agent --------------------------------------------------------------------------

    def _grant(self, amount: int) -> None:
        if self._credit + amount > wire.WINDOW:
            raise wire.ProtocolError("call %d was granted more than it sent" % self._call.number)
        self._credit += amount
        self._watch_reads()

    def _watch_reads(self) -> None:
        wants = self._is_connected and not self._has_read_all and not self._call.is_done and self._credit > 0
        if wants and self._program.is_clogged:
            # What other calls have to say comes first: no more is put into a queue that they would wait behind.
            self._wait_until_clear()
            wants = False
        if wants != self._is_reading:
            assert self._socket is not None
            self._is_reading = wants
            if wants:
                self._program.watch(self._socket.fileno(), self._read)
            else:
                self._program.unwatch(self._socket.fileno())

    def _wait_until_clear(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._program.when_clear(self._clear)

    def _clear(self) -> None:
        self._is_waiting = False
        self._watch_reads()

    def _read(self) -> None:
        if not self._is_reading:  # changed by an event of the same round
            return
        assert self._socket is not None
        if self._program.is_clogged:
            self._watch_reads()
            return
        try:
            payload = self._socket.recv(min(wire.CHUNK, self._credit))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail("reset", _cut_off(self._label, error))
            return
        self._credit -= len(payload)
        self._call.data(wire.OUT, payload)  # an empty one is the end
        self._has_read_all = not payload
        self._watch_reads()
        self._finish_if_ended()

    # --- from the agent to the server --------------------------------------------------------------------------

    def _input(self, payload: bytes) -> None:
        if len(payload) > self._room or self._has_input_ended:
            raise wire.ProtocolError("call %d got more than it has room for" % self._call.number)
        self._room -= len(payload)
        self._has_input_ended = not payload
        if not self._is_broken:
            self._pending += payload
            self._write()

    def _write(self) -> None:
        if not self._is_connected:
            self._connected()
            return
        assert self._socket is not None
        while self._pending and not self._is_broken:
            try:
                sent = self._socket.send(self._pending[: wire.WINDOW])
            except BlockingIOError:
                break
            except OSError:  # it has closed; what it said before that is still read, and then how it ended
                self._break()
                break
            del self._pending[:sent]
            self._take(sent)
        self._watch_writes(bool(self._pending))
        if self._has_input_ended and not self._pending:
            with contextlib.suppress(OSError):  # it has closed
                self._socket.shutdown(socket.SHUT_WR)
        self._finish_if_ended()

    def _take(self, amount: int) -> None:
        self._taken += amount
        if self._taken >= _GRANTED_AT_ONCE:
            self._room += self._taken
            self._call.data(wire.CREDIT, wire.AMOUNT.pack(self._taken))
            self._taken = 0

    def _break(self) -> None:
        self._is_broken = True
        self._pending.clear()

    def _watch_writes(self, wants: bool) -> None:
        if wants != self._is_watching_writes:
            assert self._writing is not None
            self._is_watching_writes = wants
            if wants:
                self._program.watch_writable(self._writing, self._writable)
            else:
                self._program.unwatch(self._writing)

    def _writable(self) -> None:
        if self._is_watching_writes:  # as in _read
            self._write()

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish_if_ended(self) -> None:
        if not self._has_read_all or self._call.is_done:
            return
        if self._is_broken:
            self._fail("reset", "%s closed the connection before it had read everything" % self._label)
        elif self._has_input_ended and not self._pending:
            assert self._socket is not None
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _PLAIN_CLOSE)
            self._drop()
            self._call.finish({})

    def _cancel(self) -> None:
        self._fail("cancelled", "the connection to %s was given up" % self._label)

    def _fail(self, kind: str, text: str) -> None:
        self._drop()
        self._call.fail(kind, text)

    def _drop(self) -> None:
        _open.discard(self)
        self._drop_socket()
        self._close_targets()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._watch_writes(False)
            if self._is_reading:
                self._is_reading = False
                self._program.unwatch(self._socket.fileno())
            if self._writing is not None:
                os.close(self._writing)
                self._writing = None
            self._socket.close()
            self._socket = None

    def _close_targets(self) -> None:
        for target in self._targets:
            target.close()
        self._targets = []


def _is_own_reflection(connected: socket.socket) -> bool:
    """A connection to a port that nobody listens on meets itself if it happens to come from that port."""
    return connected.family != socket.AF_UNIX and connected.getsockname() == connected.getpeername()


def _cut_off(label: str, error: OSError) -> str:
    if error.errno in _RESET:
        return "%s cut the connection off" % label
    return "%s: %s" % (label, error.strerror)


# --- api --------------------------------------------------------------------------------------------------------------
# `net.connect`: a connection to what listens on this node, forwarded over the link in both directions.
#
# It goes to a loopback port, or to a socket in a run directory of this agent. No other host can be named.


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAME = 200


@method("net.connect")
def connect(call: Call, *, port: int = 0, socket: str = "", job: str = "", attempt: int = 0) -> None:
    if socket:
        Forward(call, [_run_socket(run_of(call, job, attempt), str(socket))])
    else:
        Forward(call, _loopback(int(port)))


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
