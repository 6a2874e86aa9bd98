"""Interpreters on this node: found, asked for their version and packages. Nothing of theirs is changed."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ugro.features.environments.node.failures import Failed
from ugro.node import foreign
from ugro.node import system as torch_build
from ugro.node.process import process_tree

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


# --- existing ---------------------------------------------------------------------------------------------------------
# An environment that somebody else made, such as conda's: checked, never changed.


def check(path: str, timeout_s: float) -> Dict[str, Any]:
    """``path``: its folder or its interpreter; ``~`` is this account's."""
    python = _interpreter(path)
    about = describe(python, timeout_s, alone=False)
    found = {name: about[name] for name in ("version", "packages", "torch_cuda", "nccl")}
    return {"name": about["prefix"], "python": python, **found, "made_at": "", "used_at": "", "size": 0}


def _interpreter(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError("a path is needed")
    whole = os.path.expanduser(path)
    if not os.path.isabs(whole):
        raise Failed("not-found", "%s: write an absolute path, or one that begins with ~" % path)
    if not os.path.exists(whole):
        raise Failed("not-found", "%s does not exist on this node" % whole)
    if not os.path.isdir(whole):
        return whole
    for name in ("python", "python3"):
        python = os.path.join(whole, "bin", name)
        if os.access(python, os.X_OK):
            return python
    raise Failed("python-missing", "%s is not an environment: it has no bin/python that can be run" % whole)


# --- host -------------------------------------------------------------------------------------------------------------
# What decides which environments this node can have: its platform, its interpreters, and what it reaches.


_REACH_S = 5.0
_MOST_ADDRESSES = 20
_MUSL = "/lib/ld-musl-%s.so.1"


def about(pythons: Optional[str], addresses: List[str]) -> Dict[str, Any]:
    """``pythons``: the folder of those that UGRO has installed; None: interpreters are not asked for."""
    libc, version = _libc()
    return {
        "arch": os.uname().machine,
        "libc": libc,
        "libc_version": version,
        "pythons": [] if pythons is None else [list(one) for one in all_of(pythons)],
        "reaches": _reaches(addresses[:_MOST_ADDRESSES]),
    }


def _libc() -> Tuple[str, List[int]]:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        text = ""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    if found:
        return "glibc", [int(found[1]), int(found[2])]
    try:
        said = ask([_MUSL % os.uname().machine], _REACH_S).stderr.decode("utf-8", "replace")
    except OSError:
        return "unknown", [0, 0]
    found = re.search(r"Version (\d+)\.(\d+)", said)
    return "musl", [int(found[1]), int(found[2])] if found else [1, 0]


def _reaches(addresses: List[str]) -> List[bool]:
    """At once: one that drops packets must not hold up the others."""
    answers = [False] * len(addresses)

    def look(number: int) -> None:
        answers[number] = _is_reached(addresses[number])

    threads = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _REACH_S)
    return list(answers)


def _is_reached(address: str) -> bool:
    """Any answer of a web server will do; a folder has to be there."""
    import http.client
    import urllib.error
    import urllib.request

    if re.match(r"https?://", address) is None:
        return os.path.exists(re.sub(r"^file://", "", address))
    bare = re.sub(r"//[^/@]*@", "//", address)  # without a login: this asks for nothing that needs one
    try:
        urllib.request.urlopen(urllib.request.Request(bare, method="HEAD"), timeout=_REACH_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
