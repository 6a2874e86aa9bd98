"""HTTP/1.1 over the agent's unix socket: importing the standard library's client takes longer than a call.

Strict, because both ends are ours: an unexpected answer means that the agent ended, or is not an agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ugro.kernel.operations.request import part_of
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import ConfigError, UgroError, Unreachable, error_from_wire

# --- account ----------------------------------------------------------------------------------------------------------
# The account of this process.


def account() -> str:
    """The account, whatever its environment says; its number if it has no name, as in some containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


# --- http -------------------------------------------------------------------------------------------------------------


_READ = 256 * 1024
_LONGEST_LINE = 64 * 1024
_MOST_HEADERS = 100
_LONGEST_NUMBER = 15
PIECEWISE = {"Transfer-Encoding": "chunked"}  # the header of a request whose body is sent while its answer is read


class AgentGone(Unreachable):
    """No agent listens on the socket: none runs, or it has just ended."""


class NoAgent(AgentGone):
    """The agent cannot have read the request, so it can be sent again."""


class Connection:
    """One request at a time. Opened by the first, reused by the next, reopened if an answer was not read to its end.

    ``dial``: another way to the agent than its socket on this machine; ``headers``: of every request.
    """

    def __init__(
        self,
        path: Path,
        *,
        dial: Callable[[], socket.socket] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._dial = dial
        self._headers = dict(headers or {})
        self._socket: socket.socket | None = None
        self._stream: BinaryIO | None = None
        self._is_idle = True

    @property
    def is_usable(self) -> bool:
        """False once the agent has closed it: an idle agent sends nothing, so anything readable is the end."""
        if self._socket is None or not self._is_idle:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """One request, one JSON answer; None for an empty one."""
        content = b"".join(self.start(method, path, body, timeout_s=timeout_s, headers=headers))
        return json.loads(content) if content else None

    def start(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[bytes]:
        """Yields the answer's content as it arrives; raises an error answer. ``timeout_s`` limits each wait."""
        request = _request(method, path, body, {**self._headers, **(headers or {})})
        was_kept = self.is_usable
        try:
            if not was_kept:
                self._open()
            try:
                status, fields = self._exchange(request, timeout_s)
            except ConnectionError:
                if not was_kept:  # else the agent closed it just as we wrote
                    raise
                self._open("the agent ended before it answered")
                status, fields = self._exchange(request, timeout_s)
        except (TimeoutError, KeyboardInterrupt) as error:
            self.close()  # so that the agent sees that nobody waits for its answer
            raise _given_up(error) from error
        except ConnectionError as error:
            # It had not read the whole request, else we would have seen an end, not a reset: so it did nothing.
            raise NoAgent("the agent ended before it answered") from error
        except (OSError, _BrokenOffError) as error:
            raise AgentGone("the agent ended before it answered") from error
        content = self._content(fields, status)
        if status >= 400:
            raise _error(status, b"".join(content))
        return content

    def _exchange(self, request: bytes, timeout_s: float | None) -> tuple[int, Mapping[str, str]]:
        assert self._socket is not None
        assert self._stream is not None
        self._is_idle = False
        self._socket.settimeout(timeout_s)
        self._socket.sendall(request)
        return _head(self._stream)

    def upload(self, path: str, pieces: Iterable[bytes], *, timeout_s: float) -> Any:
        """One POST whose body is sent piece by piece; its JSON answer."""
        try:
            self._open()
            assert self._socket is not None
            assert self._stream is not None
            self._is_idle = False
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(ConnectionError):  # then the answer says why it takes no more
                self._socket.sendall(_request("POST", path, None, {**self._headers, **PIECEWISE}))
                for piece in pieces:
                    self.send(piece)
                self.send(b"")
            status, fields = _head(self._stream)
            content = b"".join(self._content(fields, status))
        except TimeoutError as error:
            raise _hung() from error
        except (OSError, _BrokenOffError) as error:
            raise AgentGone("the agent ended before it answered") from error
        if status >= 400:
            raise _error(status, content)
        return json.loads(content)

    def send(self, piece: bytes) -> None:
        """A part of the body of a request that was started with ``PIECEWISE``; an empty one is its end."""
        assert self._socket is not None
        self._socket.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))

    def abort(self) -> None:
        """Wakes the threads that wait for it; it still has to be closed."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def set_timeout(self, timeout_s: float | None) -> None:
        if self._socket is not None:
            self._socket.settimeout(timeout_s)

    def close(self) -> None:
        for part in (self._stream, self._socket):
            if part is not None:
                part.close()
        self._stream = self._socket = None

    def _open(self, complaint: str = "no agent is running") -> None:
        self.close()
        self._socket = connected(self._path, complaint) if self._dial is None else self._dial()
        self._stream = self._socket.makefile("rb")

    def _content(self, fields: Mapping[str, str], status: int) -> Iterator[bytes]:
        assert self._stream is not None
        stream = self._stream
        try:
            if fields.get("transfer-encoding") == "chunked":
                yield from _chunks(stream)
            elif status != 204:
                yield from _exactly(stream, _number(fields.get("content-length", ""), 10))
        except TimeoutError as error:
            raise _hung() from error
        except (OSError, _BrokenOffError) as error:
            raise AgentGone("the agent ended in the middle of its answer") from error
        self._is_idle = fields.get("connection") != "close"


def connected(path: Path, complaint: str = "no agent is running") -> socket.socket:
    """To the socket of an agent on this machine."""
    # Through the folder's descriptor: a socket's address is limited to 108 bytes, unlike a path.
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NoAgent(complaint) from error
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError as error:
        found.close()
        raise NoAgent(complaint) from error
    finally:
        os.close(folder)
    return found


def lines(content: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the documents of an NDJSON answer as they arrive; raises an error among them."""
    rest = b""
    for piece in content:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            document = json.loads(line)
            if "error" in document and len(document) == 1:
                raise error_from_wire(document["error"])
            yield document


class _BrokenOffError(Exception):
    """The answer stops early, or is not HTTP."""


def _request(method: str, path: str, body: Any, headers: Mapping[str, str]) -> bytes:
    content = b"" if body is None else dumps(body).encode()
    length = {} if PIECEWISE.keys() <= headers.keys() else {"Content-Length": str(len(content))}
    fields = {"Host": "ugro", "Content-Type": "application/json", **length, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + content


def _head(stream: BinaryIO) -> tuple[int, dict[str, str]]:
    version, _, rest = _line(stream).partition(" ")
    if version != "HTTP/1.1":
        raise _BrokenOffError(version)
    fields: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        if not (line := _line(stream)):
            return _number(rest[:3], 10), fields
        name, _, value = line.partition(":")
        fields[name.lower()] = value.strip().lower()
    raise _BrokenOffError("too many headers")


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while size := _number(_line(stream).partition(";")[0], 16):
        yield from _exactly(stream, size)
        if _line(stream):
            raise _BrokenOffError("a chunk longer than announced")
    while _line(stream):
        pass


def _exactly(stream: Any, size: int) -> Iterator[bytes]:
    while size:
        piece = stream.read1(min(size, _READ))
        if not piece:
            raise _BrokenOffError("the end came early")
        size -= len(piece)
        yield piece


def _line(stream: BinaryIO) -> str:
    line = stream.readline(_LONGEST_LINE)
    if not line.endswith(b"\r\n"):
        raise _BrokenOffError(f"not a line: {line[:80]!r}")
    return line[:-2].decode("latin-1")


def _number(text: str, base: int) -> int:
    # int() alone also accepts signs, spaces, underscores and 0x.
    digits = "0123456789" if base == 10 else "0123456789abcdefABCDEF"
    if not 0 < len(text) <= _LONGEST_NUMBER or not set(text) <= set(digits):
        raise _BrokenOffError(f"not a number: {text[:80]!r}")
    return int(text, base)


def _given_up(error: BaseException) -> BaseException:
    return _hung() if isinstance(error, TimeoutError) else KeyboardInterrupt()


def _hung() -> Unreachable:
    return Unreachable("the agent does not answer", cause="hung", hint="see: ugro agent logs; stop it: ugro agent stop")


def _error(status: int, content: bytes) -> UgroError:
    try:
        return error_from_wire(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return UgroError(f"the agent failed (HTTP {status})", hint="see: ugro agent logs")


# --- path -------------------------------------------------------------------------------------------------------------
# The path of a request about something that a user has named.


def path_of(kind: str, word: str | int) -> str:
    """Raises NotFound for a word that would lead to another path: nothing has such a name."""
    return f"/v1/{kind}/{part_of(kind, word)}"


# --- retrying ---------------------------------------------------------------------------------------------------------
# Asks again when the agent has ended meanwhile: another one is started, and answers.


_LEAST_PAUSE_S = 0.05
_TRIES = 8  # without any answer


def trying_again() -> Iterator[Callable[[], None]]:
    """Tries with growing pauses. The caller calls the yielded function after each success, which resets the count."""
    tries = 0

    def went_well() -> None:
        nonlocal tries
        tries = 0

    while tries < _TRIES:
        yield went_well
        tries += 1
        time.sleep(_LEAST_PAUSE_S * 2**tries)
    raise AgentGone("the agent keeps ending", hint="see: ugro agent logs")


# --- small file -------------------------------------------------------------------------------------------------------
# The text of a file that a request carries.


_LARGEST = 256 << 10  # as kernel/jobs/config/kinds.py has it


def text_of(file: Path, what: str) -> str:
    """``what``: as in "a sweep file". Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            hint = "a range stands for many values; data belongs into files of its own"
            raise ConfigError(f"{file}: larger than 256 KiB, which is too large for {what}", hint=hint)
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}", hint=f"name {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text in UTF-8", hint=f"name {what}") from None


# --- variables --------------------------------------------------------------------------------------------------------
# Environment variables of this process that the agent asks for, because a job names them without a value.
#
# An agent of somebody else gets only those that the command names: all others were refused before this (see
# ``features/remote_access/client/offer.py``).


def asked_for(needs: Iterable[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """``env``: that of this process, if it is not given."""
    known = os.environ if env is None else env
    return {name: known[name] for name in needs if name in known}
