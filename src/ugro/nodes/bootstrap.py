"""How the node program gets onto a node and starts: one connection, one fixed shell command, everything else on stdin.

The command works in bash, dash, fish and csh alike because it holds no user data and nothing that any of them
treats specially inside single quotes. What a login shell's rc files print is skipped up to our marker.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ugro import remote
from ugro.core.node import NodeSpec

MARKER = b"UGRO1 "
OLDEST_PYTHON = (3, 9)

# Reads the candidates for Python, one line, colon-separated; starts the first that is there.
SCRIPT = (
    "IFS=:; read -r all; for p in $all; do "
    'case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'command -v "$p" >/dev/null 2>&1 && exec "$p" -I -S -c "import sys;exec(sys.stdin.readline())"; '
    "done; echo UGRO1 none no-python; exit 127"
)
SHELL_COMMAND = f"exec sh -c '{SCRIPT}'"
LOCAL_COMMAND = ("sh", "-c", SCRIPT)

_CANDIDATES = ("python3", *(f"python3.{minor}" for minor in range(14, 8, -1)), "python")

# Runs on the node before the program does; must parse on Python 2.7, to say what is wrong there.
_STAGE = r"""
import os, sys
def say(text): os.write(1, ("UGRO1 " + A["nonce"] + " " + text + "\n").encode("ascii", "replace"))
def newer():
    for minor in range(14, 8, -1):
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, "python3.%d" % minor)
            if os.access(path, os.X_OK): return path
def unpack(home):
    import hashlib, io, zipfile
    say("want")
    data = b""
    while len(data) < A["size"]:
        part = os.read(0, A["size"] - len(data))
        if not part: os._exit(1)
        data += part
    if hashlib.sha256(data).hexdigest() != A["digest"]:
        say("damaged"); os._exit(1)
    os.makedirs(os.path.dirname(home), 0o700, exist_ok=True)
    fresh = "%s.%d" % (home, os.getpid())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            path = os.path.join(fresh, name)
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            with open(path, "wb") as file:
                file.write(archive.read(name)); file.flush(); os.fsync(file.fileno())
    try: os.rename(fresh, home)
    except OSError:
        import shutil
        shutil.rmtree(fresh, ignore_errors=True)
        if not os.path.isdir(home): raise
def start():
    root = os.path.expanduser(A["root"])
    home = os.path.join(root, ".ugro", "program", A["digest"][:16])
    try:
        if not os.path.isdir(home): unpack(home)
    except OSError as error:
        say("os-error %d %s" % (error.errno or 0, root)); os._exit(1)
    os.environ.update(A["env"])
    sys.path.insert(0, home)
    from ugro.remote.main import main
    main(root, A["nonce"], A["silence_s"])
if sys.version_info >= (3, 9): start()
elif newer() and "-again" not in A:
    A["-again"] = 1
    path = newer()
    os.execv(path, [path, "-I", "-S", "-c", "S = %r\nA = %r\nexec(S)" % (S, A)])
else:
    say("old-python %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable)); os._exit(1)
"""


@dataclass(frozen=True, slots=True)
class Archive:
    """The node program as it travels, known by its content's digest."""

    content: bytes
    digest: str


@functools.cache
def node_program() -> Archive:
    folder = Path(remote.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry("ugro/__init__.py"), "")
        for path in sorted(folder.glob("*.py")):
            archive.writestr(_entry(f"ugro/remote/{path.name}"), path.read_bytes())
    content = buffer.getvalue()
    return Archive(content, hashlib.sha256(content).hexdigest())


def first_lines(spec: NodeSpec, nonce: str, silence_s: float) -> bytes:
    """What is written to the connection before anything is heard: where Python may be, and the first stage."""
    candidates = (spec.python,) if spec.python else _CANDIDATES
    program = node_program()
    arguments = {
        "nonce": nonce,
        "root": spec.remote_root,
        "digest": program.digest,
        "size": len(program.content),
        "silence_s": silence_s,
        "env": dict(spec.env),
    }
    # JSON is also a Python literal here: no true, false or null among the values, and ASCII only.
    stage = f"S={_STAGE!r};A={json.dumps(arguments)};exec(S)"
    return f"{':'.join(candidates)}\n{stage}\n".encode("ascii")


def _entry(name: str) -> zipfile.ZipInfo:
    # A fixed time, so that the same code has the same digest wherever it was installed.
    entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
