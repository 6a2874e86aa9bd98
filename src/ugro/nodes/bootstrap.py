"""Installs and starts the node program: one connection, one fixed shell command, everything else on stdin.

The command works in bash, dash, fish and csh alike because it contains no user data and nothing that any of them
treats specially inside single quotes. Whatever rc files print before our marker is skipped.

The node program is one file on the node. What runs are the bytes whose hash was compared, imported from memory: nothing
that others could put beside it, or change afterwards, is ever executed.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ugro import remote
from ugro.core.node import NodeSpec
from ugro.remote import loader, wire

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
    from ugro.remote import home, trust
    try: home.settle(root, A["name"], received, A["nonce"])
    except trust.Unsafe as error:
        say("unsafe " + json.dumps(error.fields())); os._exit(1)
    except OSError as error:
        say("os-error %d %s" % (error.errno or 0, root)); os._exit(1)
    os.environ.update(A["env"])
    from ugro.remote.main import main
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


@functools.cache
def node_program() -> Archive:
    folder = Path(remote.__file__).parent
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    content = loader.pack({"ugro/__init__.py": b"", **{f"ugro/remote/{name}": text for name, text in files.items()}})
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
