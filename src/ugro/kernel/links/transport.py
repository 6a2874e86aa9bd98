"""Reaches a node: the command that gives stdin and stdout there, its process, and the start of the node program."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ugro.kernel.feature import installed
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.process import restore_limit
from ugro.node import loader, wire

# --- installing and starting the node program -------------------------------------------------------------------------
# One connection and one fixed shell command do it; everything else comes on stdin.
#
# The command works in bash, dash, fish and csh alike because it contains no user data and nothing that any of them
# treats specially inside single quotes. Whatever rc files print before our marker is skipped.
#
# The node program is one file on the node. What runs are the bytes whose hash was compared, imported from memory:
# nothing that others could put beside it, or change afterwards, is ever executed.


MARKER = b"UGRO1 "
MAX_BANNER = 64 * 1024
_NO_PYTHON = b"none no-python"  # the shell's only message; it does not know the nonce
_MAX_LINE = 8 * 1024

# Reads the candidates for Python (one line, colon-separated) and starts the first that exists. Does what -I would do on
# Python 3, but also runs on Python 2, which can then report that it is too old.
SCRIPT = (
    "IFS=:; read -r all; for p in $all; do "
    'case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'command -v "$p" >/dev/null 2>&1 && exec "$p" -E -s -S -c "import sys;del sys.path[0];exec(sys.stdin.readline())"; '
    f"done; echo {(MARKER + _NO_PYTHON).decode()}; exit 127"
)
SHELL_COMMAND = f"exec sh -c '{SCRIPT}'"
LOCAL_COMMAND = ("sh", "-c", SCRIPT)

_CANDIDATES = ("python3", *(f"python3.{minor}" for minor in range(14, 8, -1)), "python")

# Runs on the node before the program; must parse on Python 2.7 to report that it is too old.
_STAGE = r"""
import os, signal, sys
def say(text): os.write(1, ("UGRO1 " + A["nonce"] + " " + text + "\n").encode("ascii", "replace"))
def newer():
    for minor in range(14, 8, -1):
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, "python3.%d" % minor)
            if os.access(path, os.X_OK): return path
def is_whole(data):
    # Python's own SHA-256 first: hashlib would load OpenSSL.
    for name in ("_sha2", "_sha256", "hashlib"):
        try: return __import__(name).sha256(data).hexdigest() == A["digest"]
        except ImportError: pass
def read(fd):
    data = b""
    while len(data) < A["size"]:
        part = os.read(fd, A["size"] - len(data))
        if not part: break
        data += part
    return data
def kept(path):
    # Whatever was put there: nothing is waited for, and nothing is believed but the hash of the bytes that will run.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try: data = read(fd)
        finally: os.close(fd)
    except OSError: return b""
    return data if is_whole(data) else b""
def receive():
    say("want")
    data = read(0)
    if len(data) < A["size"]: os._exit(1)
    if not is_whole(data):
        say("damaged"); os._exit(1)
    return data
def start():
    import json
    root = os.path.expanduser(A["root"])
    if "{user}" in root:
        import pwd
        root = root.replace("{user}", pwd.getpwuid(os.geteuid()).pw_name)
    data, received = kept(os.path.join(root, ".ugro", "program", A["name"])), b""
    if not data: data = received = receive()
    names = {"__name__": "loader"}
    exec(A["loader"], names)
    names["install"](data)
    from ugro.node import home
    try: home.settle(root, A["name"], received, A["nonce"])
    except home.Unsafe as error:
        say("unsafe " + json.dumps(error.fields())); os._exit(1)
    except OSError as error:
        say("os-error %d %s" % (error.errno or 0, root)); os._exit(1)
    os.environ.update(A["env"])
    from ugro.node.main import main
    signal.alarm(0)
    main(root, A["nonce"], A["silence_s"], A["node"])
# If the agent disappears in the middle of this, there is nothing left to report to.
signal.alarm(60)
if sys.version_info >= (3, 9): start()
elif newer() and "again" not in A:
    A["again"] = 1
    path = newer()
    # In the environment, which others cannot read: A may hold secrets of the node's own env.
    os.environ["UGRO_STAGE"] = "S = %r\nA = %r\nexec(S)" % (S, A)
    code = "import sys; del sys.path[0]; import os; exec(os.environ.pop('UGRO_STAGE'))"
    os.execv(path, [path, "-E", "-s", "-S", "-c", code])
else:
    say("old-python %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable)); os._exit(1)
"""


class Greeting:
    """Finds the first stage's messages among whatever rc files print before them."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._buffer = bytearray()
        self._heard_bytes = 0

    @property
    def rest(self) -> bytes:
        """The bytes after the last message."""
        return bytes(self._buffer)

    @property
    def last_line(self) -> str:
        lines = [line for line in self._buffer[-_MAX_LINE:].splitlines() if line.strip()]
        return lines[-1].decode("utf-8", "replace") if lines else ""

    def feed(self, data: bytes) -> Iterator[str]:
        self._buffer += data
        self._heard_bytes += len(data)
        while (start := self._buffer.find(MARKER)) >= 0:
            begin = start + len(MARKER)
            end = self._buffer.find(b"\n", begin, begin + _MAX_LINE)
            if end < 0 and len(self._buffer) < begin + _MAX_LINE:
                break
            line = bytes(self._buffer[begin : max(begin, end)])
            nonce, _, said = line.partition(b" ")
            is_ours = nonce == self._nonce or line == _NO_PYTHON
            # Of a foreign line only the marker is dropped: ours may begin in the middle of it.
            del self._buffer[: end + 1 if is_ours else begin]
            if is_ours:
                yield said.decode("utf-8", "replace").strip()
        if self._heard_bytes > MAX_BANNER:
            raise wire.ProtocolError(f"more than {MAX_BANNER // 1024} KiB before its greeting")


@dataclass(frozen=True, slots=True)
class Archive:
    """The node program as it is sent, known by the hash of its content."""

    content: bytes
    digest: str

    @property
    def name(self) -> str:
        """Of its file on a node."""
        return f"{self.digest[:16]}.program"


_METHOD = re.compile(rb'^@method\("([a-z_.]+)"', re.MULTILINE)
SERVED = "ugro/node/served.py"  # is only in the archive: it says which module has which method


def program_files() -> dict[str, bytes]:
    """Returns the modules that a node runs, by their paths, such as ugro/node/main.py."""
    files = _texts("ugro.node", "")
    for feature in installed():
        for part in feature.on_nodes:
            files |= _texts(feature.package, part)
    served = {
        method.decode(): name.removesuffix(".py").replace("/", ".")
        for name, content in files.items()
        for method in _METHOD.findall(content)
    }
    files[SERVED] = f"MODULES = {served!r}\n".encode()
    # Packages above them are for the agent: on a node they are empty.
    above = {f"{parent.as_posix()}/__init__.py" for name in files for parent in Path(name).parents if parent.name}
    return {**dict.fromkeys(sorted(above - files.keys()), b""), **files}


def _texts(package: str, part: str) -> dict[str, bytes]:
    """Returns the Python files of a package's folder or file."""
    above = Path(str(import_module(package).__file__)).parent
    place, root = above / part, above.parents[package.count(".") - 1].parent
    found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


@functools.cache
def node_program() -> Archive:
    content = loader.pack(program_files())
    return Archive(content, hashlib.sha256(content).hexdigest())


def first_lines(spec: NodeSpec, nonce: str, silence_s: float) -> bytes:
    """Written to the connection at once: the candidates for Python, and the first stage."""
    candidates = (spec.python,) if spec.python else _CANDIDATES
    program = node_program()
    arguments = {
        "nonce": nonce,
        "node": spec.name,
        "root": spec.remote_root,
        "digest": program.digest,
        "size": len(program.content),
        "name": program.name,
        "loader": inspect.getsource(loader),
        "silence_s": silence_s,
        "env": dict(spec.env),
    }
    return f"{':'.join(candidates)}\n".encode() + f"S={_STAGE!a};A={arguments!a};exec(S)\n".encode("ascii")


# --- the process behind a link ----------------------------------------------------------------------------------------
# It is ssh, a shell on this machine, or the node's transport command. Its stdin and stdout are one socket of ours. The
# end of its stderr is kept for error messages.


# ssh prints a line or two, rc files perhaps a page; a process that prints more never stops.
MAX_STDERR = 1 << 20
_KEPT_STDERR = 16 * 1024
_FIRST_LOOK_S = 0.002
_MAX_PAUSE_S = 1.0


class LinkProcess:
    """Raises ``OSError`` if it cannot be started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], on_flood: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_flood = on_flood
        self._process, self.socket, self._stderr = _start(argv, env)
        self._said = b""
        self._said_bytes = 0
        self.is_gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._stderr, self._hear)

    def exit_code(self) -> int | None:
        """None while it runs. Does not reap the process: until then its group id cannot be reused."""
        if self._process.returncode is not None:
            return self._process.returncode
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def complaint(self) -> str:
        """The end of its stderr."""
        while self._stderr >= 0 and self._hear():
            pass
        return self._said.decode("utf-8", "replace").strip()

    def end(self) -> None:
        """Ends it and the processes it started to reach the node (a jump, a proxy), even if it ended before them."""
        self._stop_hearing()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._look_for_end(_FIRST_LOOK_S)

    def _look_for_end(self, pause_s: float) -> None:
        # This may take a while, and the agent must keep talking to other nodes.
        if self._process.poll() is None:
            self._loop.call_later(pause_s, self._look_for_end, min(2 * pause_s, _MAX_PAUSE_S))
        elif not self.is_gone.done():
            self.is_gone.set_result(None)

    def _hear(self) -> bool:
        """True if there may be more to read."""
        try:
            part = os.read(self._stderr, 64 * 1024)
        except BlockingIOError:
            return False
        if not part:
            self._stop_hearing()
            return False
        self._said = (self._said + part)[-_KEPT_STDERR:]
        self._said_bytes += len(part)
        if self._said_bytes > MAX_STDERR:
            self._on_flood()
        return True

    def _stop_hearing(self) -> None:
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1


def _start(argv: Sequence[str], env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        talk, other_end = socket.socketpair()
        ours.callback(talk.close)
        theirs.callback(other_end.close)
        heard, stderr = os.pipe()
        ours.callback(os.close, heard)
        theirs.callback(os.close, stderr)
        # In a session of its own: it has no terminal to prompt on, and its group can be killed as a whole.
        process = subprocess.Popen(
            argv,
            stdin=other_end.fileno(),
            stdout=other_end.fileno(),
            stderr=stderr,
            env=env,
            start_new_session=True,
        )
        restore_limit(process.pid)  # it starts nothing before it has read what we send
        ours.pop_all()
    talk.setblocking(False)
    os.set_blocking(heard, False)
    return process, talk, heard


# --- the command that reaches a node ----------------------------------------------------------------------------------


# Keys, names, jumps and ports come from the user's own ssh configuration. These options make the link one connection
# of its own that never prompts, forwards nothing, and ends by itself if the peer is dead and no agent is left. An agent
# notices earlier, by its keepalives, and reports a better reason.
_LINK_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "2",
    "ServerAliveInterval": "5",
}
# Anybody who writes to a registry chooses the address of a node that is found there. So its host key must be one of
# those that the user has accepted, whatever his configuration says about hosts that are not known.
_KNOWN_KEYS_ONLY = {
    "StrictHostKeyChecking": "yes",
    "NoHostAuthenticationForLocalhost": "no",
    "VerifyHostKeyDNS": "no",
}
# A jump is another ssh, which the options above do not reach: it must not prompt either, not even in a window.
LINK_ENVIRONMENT = {"SSH_ASKPASS_REQUIRE": "never"}


@dataclass(frozen=True, slots=True)
class SshOptions:
    connect_timeout_s: float = 5.0
    key_file: str | None = None
    config_file: str | None = None


def link_command(spec: NodeSpec, options: SshOptions) -> list[str]:
    if spec.transport == "ssh":
        return [*ssh_command(spec, options), SHELL_COMMAND]
    if spec.transport == "local":
        return list(LOCAL_COMMAND)
    return [*spec.transport, *LOCAL_COMMAND]


def ssh_command(spec: NodeSpec, options: SshOptions, **extra: str) -> list[str]:
    """``ssh`` up to and including the destination; ``extra`` are further ``-o`` options, which take precedence."""
    words = ["ssh"]
    if options.config_file:
        words += ["-F", os.path.expanduser(options.config_file)]
    strict = _KNOWN_KEYS_ONLY if spec.found_by else {}
    settings = {**_LINK_OPTIONS, **strict, "ConnectTimeout": str(max(1, round(options.connect_timeout_s))), **extra}
    for key, value in settings.items():
        words += ["-o", f"{key}={value}"]
    if options.key_file:
        words += ["-i", os.path.expanduser(options.key_file)]
    if spec.port:
        words += ["-p", str(spec.port)]
    if spec.user:
        words += ["-l", spec.user]
    return [*words, "--", spec.ssh_host]
