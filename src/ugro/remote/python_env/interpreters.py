"""Interpreters on this node: found, asked for their version and packages. Nothing of theirs is changed."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ugro.remote import foreign
from ugro.remote.process import process_tree
from ugro.remote.python_env import torch_build
from ugro.remote.python_env.failures import Failed

_ASK_S = 20.0
_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")
_MINORS = range(15, 8, -1)
# Its own path, too: what is on PATH may be a script that chooses one by folder or variable.
_VERSION = "import sys; sys.stdout.write('%d.%d.%d %s' % (*sys.version_info[:3], sys.executable))"
# Runs in an environment's own Python, in a process of its own.
_PACKAGES = (
    torch_build.SOURCE
    + r"""
import json
found = {}
for one in metadata.distributions():
    name = one.metadata["Name"]
    if name and str(name) not in found:
        found[str(name)] = str(one.version)
sys.stdout.write("\n" + json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3],
    "prefix": sys.prefix,
    "packages": sorted(found.items()),
    "torch_cuda": torch_cuda(),
    "nccl": conda_nccl(),
}))
"""
)


class Interpreter(NamedTuple):
    version: str  # 3.11.2
    path: str

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]


def find(minor: str, pythons: str) -> Optional[Interpreter]:
    """One of that version; ours first. ``pythons``: the folder of those that UGRO has installed."""
    names = ("python%s" % minor, "python3", "python")
    return next((one for one in _candidates(names, pythons) if one.minor == minor), None)


def all_of(pythons: str) -> List[Interpreter]:
    """One of each version; the one that runs this program is the first."""
    names = ("python3", *("python3.%d" % minor for minor in _MINORS), "python")
    found: Dict[str, Interpreter] = {}
    for one in _candidates(names, pythons):
        found.setdefault(one.minor, one)
    return list(found.values())


def missing(minor: str, pythons: str, why: str, tail: Tuple[str, ...] = ()) -> Failed:
    there = ", ".join("%s (%s)" % one for one in all_of(pythons))
    return Failed("python-missing", "there is no Python %s on this node; it has %s%s" % (minor, there, why), tail)


def _candidates(names: Tuple[str, ...], pythons: str) -> Iterator[Interpreter]:
    own = sys.executable
    seen = {os.path.realpath(own)}
    yield Interpreter("%d.%d.%d" % sys.version_info[:3], own)
    folders = [*os.environ.get("PATH", "").split(":"), *_FOLDERS, *sorted(glob.glob(glob.escape(pythons) + "/*/bin"))]
    for folder in folders:
        for name in names if os.path.isabs(folder) else ():
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                found = _asked(path)
                if found is not None:
                    yield found


def _asked(path: str) -> Optional[Interpreter]:
    try:
        said = ask([path, "-I", "-S", "-c", _VERSION], _ASK_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version, _, own = os.fsdecode(said).partition(" ")
    return Interpreter(version, own) if re.fullmatch(r"3\.\d+\.\d+", version) and os.path.isabs(own) else None


def ask(argv: List[str], timeout_s: float) -> "subprocess.CompletedProcess[bytes]":
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "UV_", "PIP_"))}
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=clean,
        timeout=timeout_s,
        preexec_fn=process_tree.die_with_parent,
        check=False,
    )


def describe(python: str, timeout_s: float, *, alone: bool) -> Dict[str, Any]:
    """Version, prefix, packages, and what torch was built for.

    ``alone``: without what the user has installed outside of it.
    """
    flags = ["-I"] if alone else []
    try:
        answer = ask([python, *flags, "-B", "-c", _PACKAGES], timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Failed("crashed", "%s did not list its packages within %g s" % (python, timeout_s)) from error
    except OSError as error:
        raise Failed("python-missing", "%s does not start: %s" % (python, error.strerror)) from error
    tail = answer.stderr.decode("utf-8", "replace").splitlines()[-10:]
    if answer.returncode != 0:
        raise Failed("crashed", "%s ended with code %d%s" % (python, answer.returncode, _last(tail)), tail)
    try:
        about: Dict[str, Any] = foreign.parsed(answer.stdout.rpartition(b"\n")[2], 8 << 20)
    except ValueError as error:
        raise Failed("crashed", "%s did not list its packages" % python, tail) from error
    return about


def _last(lines: List[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return ": %.200s" % said[-1] if said else ""
