"""Installs and starts the node program: one connection, one fixed shell command, everything else on stdin.

The command works in bash, dash, fish and csh alike because it contains no user data and nothing that any of them
treats specially inside single quotes. Whatever rc files print before our marker is skipped.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ugro import remote
from ugro.core.node import NodeSpec
from ugro.remote import wire

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
def is_whole(home):
    return all(os.path.isfile(os.path.join(home, "ugro", "remote", name)) for name in A["files"])
def receive():
    import hashlib
    say("want")
    data = b""
    while len(data) < A["size"]:
        part = os.read(0, A["size"] - len(data))
        if not part: os._exit(1)
        data += part
    if hashlib.sha256(data).hexdigest() != A["digest"]:
        say("damaged"); os._exit(1)
    return data
def write(data, folder):
    import io, zipfile
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            with open(path, "wb") as file:
                file.write(archive.read(name)); file.flush(); os.fsync(file.fileno())
def move_in(fresh, home):
    try: os.rename(fresh, home)
    except OSError:
        # Another process was quicker, or a cleaner of old files removed some: missing files are added one by one.
        # Nothing is ever taken away: others may be reading it at this moment.
        for folder, _, names in os.walk(fresh):
            there = os.path.join(home, os.path.relpath(folder, fresh))
            os.makedirs(there, 0o700, exist_ok=True)
            for name in names: os.replace(os.path.join(folder, name), os.path.join(there, name))
def unpack(home):
    import shutil
    data = receive()
    fresh = home + "." + A["nonce"]
    try:
        write(data, fresh)
        move_in(fresh, home)
    except OSError:
        if not is_whole(home): raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        clean(os.path.dirname(home))
def clean(folder):
    # By age, not by whether it is in use: the folder may be shared with other machines.
    import shutil, time
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try: is_left = "." in name and time.time() - os.stat(path).st_mtime > A["leftover_s"]
        except OSError: continue
        if is_left: shutil.rmtree(path, ignore_errors=True)
def start():
    root = os.path.expanduser(A["root"])
    home = os.path.join(root, ".ugro", "program", A["digest"][:16])
    try:
        if not is_whole(home):
            os.makedirs(os.path.dirname(home), 0o700, exist_ok=True)
            unpack(home)
    except OSError as error:
        say("os-error %d %s" % (error.errno or 0, root)); os._exit(1)
    os.environ.update(A["env"])
    sys.path.insert(0, home)
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
_LEFTOVER_S = 600


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
    """The node program as it is sent, identified by the digest of its content."""

    content: bytes
    digest: str
    files: tuple[str, ...]


@functools.cache
def node_program() -> Archive:
    folder = Path(remote.__file__).parent
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry("ugro/__init__.py"), "")
        for name in names:
            archive.writestr(_entry(f"ugro/remote/{name}"), (folder / name).read_bytes())
    content = buffer.getvalue()
    return Archive(content, hashlib.sha256(content).hexdigest(), tuple(names))


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
        "files": program.files,
        "leftover_s": _LEFTOVER_S,
        "silence_s": silence_s,
        "env": dict(spec.env),
    }
    return f"{':'.join(candidates)}\n".encode() + f"S={_STAGE!a};A={arguments!a};exec(S)\n".encode("ascii")


def _entry(name: str) -> zipfile.ZipInfo:
    # A fixed time, so that the same code has the same digest wherever it is installed.
    entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
