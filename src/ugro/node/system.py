"""Checks of a node's system: UGRO's folder, installed packages, whether processes survive a logout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
from typing import Any, Dict, Optional

from ugro.node import foreign
from ugro.node import machine as linger
from ugro.node.messages import Environment, Packages, Root, Survival
from ugro.node.process import process_tree

# --- torch build ------------------------------------------------------------------------------------------------------
# How a Python says what its torch was built for: source of functions, for a process of that Python.
#
# Package metadata does not tell a build for CPUs from one for CUDA, if it is not from PyTorch's own index: conda's have
# the same version, and bring NCCL as a package of conda. Files are read: to import torch takes seconds, and may touch
# the
# GPUs.


SOURCE = r"""
import os, re, sys
from importlib import metadata

def torch_says():
    try:
        file = metadata.distribution("torch").locate_file("torch/version.py")
        with open(str(file), encoding="utf-8", errors="replace") as source:
            return source.read()
    except (metadata.PackageNotFoundError, OSError):
        return ""

def built_with(key):
    found = re.search(r"^%s\b[^=\n]*=\s*['\"](.+?)['\"]" % key, torch_says(), re.MULTILINE)
    return found.group(1) if found else None

def torch_cuda():
    if not re.search(r"^cuda\b[^=\n]*=\s*None\b", torch_says(), re.MULTILINE):
        return built_with("cuda")
    rocm = ".".join((built_with("hip") or "").split(".")[:2])
    return "none (%s)" % ("rocm" + rocm if rocm else "xpu" if built_with("xpu") else "cpu")

def conda_nccl():
    try:
        names = os.listdir(os.path.join(sys.prefix, "conda-meta"))
    except OSError:
        return None
    # Three numbers are NCCL's own; conda adds one.
    found = [re.match(r"nccl-([0-9]+\.[0-9]+\.[0-9]+)[.0-9]*-[^-]+\.json$", name) for name in names]
    return next((one.group(1) for one in found if one), None)
"""


# --- system -----------------------------------------------------------------------------------------------------------


_BLOCK = b"\0" * 4096

# Runs in the user's Python as a job would see it, in a process of its own: the node program's Python sees no packages.
_LIST_PACKAGES = (
    SOURCE
    + r"""
import json, sysconfig

def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass

# PEP 668. A virtual environment is the user's own, whatever the Python below it.
is_managed = sys.prefix == sys.base_prefix and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
)
sys.stdout.write("\n" + json.dumps({
    "is_managed": is_managed,
    "python": "%d.%d.%d" % sys.version_info[:3],
    "torch": built_with("__version__") or version("torch"),
    "torch_cuda": torch_cuda(),
    "cuda_runtime": version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
    "nccl": version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11") or conda_nccl(),
    "ray": version("ray"),
    "packages": sorted(
        {(str(one.metadata["Name"]), str(one.version)) for one in metadata.distributions()} if "all" in sys.argv else ()
    ),
}))
"""
)


def root(*, path: str = "") -> Root:
    """``path``: the folder that holds all of UGRO's files on the node, which says it itself."""
    free_bytes = filesystem = None
    try:
        usage = os.statvfs(path)
        free_bytes = usage.f_bavail * usage.f_frsize
        filesystem = filesystem_of(os.path.realpath(path))
        _write_and_remove(os.path.join(path, ".ugro-check-%d-%s" % (os.getpid(), os.urandom(4).hex())))
        return Root(path, None, free_bytes, filesystem, _folder_id(os.path.join(path, ".ugro")))
    except OSError as error:
        return Root(path, error.strerror or str(error), free_bytes, filesystem)


def environment() -> Environment:
    """All installed packages, and the GPU driver."""
    driver = None
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        number = re.search(r"\b([0-9]+\.[0-9.]+)\b", file.readline())
        driver = number.group(1) if number else None
    found = asked_python(_LIST_PACKAGES, "all")
    installed = tuple((str(name), str(version)) for name, version in found["packages"])
    return Environment(found["python"], installed, found["torch_cuda"], driver)


def packages() -> Packages:
    found = asked_python(_LIST_PACKAGES)
    names = ("python", "torch", "torch_cuda", "cuda_runtime", "nccl", "is_managed", "ray")
    return Packages(*(found[name] for name in names))


def survival(prefix: str = "/") -> Survival:
    return Survival(**linger.survival(prefix))


def asked_python(code: str, *words: str, python: Optional[str] = None) -> Dict[str, Any]:
    """What ``code`` prints as its last line, run by the Python that runs the ranks."""
    python = python or sys.executable or "python3"
    # Dies with us if it hangs until our time is over.
    found = subprocess.run(
        [python, "-c", code, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        preexec_fn=process_tree.die_with_parent,
        check=False,
    )
    # A site's own start-up files may print something before our line.
    last = found.stdout.decode("utf-8", "replace").rpartition("\n")[2]
    if found.returncode != 0 or not last.startswith("{"):
        complaint = found.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise OSError("%s cannot say what it has: %s" % (python, complaint[:200]))
    try:
        answer: Dict[str, Any] = foreign.parsed(last, 8 << 20)
    except ValueError as error:
        raise OSError("%s cannot say what it has: %s" % (python, error)) from error
    return answer


def _write_and_remove(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A full disk or an exhausted quota may accept the file and refuse its contents, and only at fsync.
        os.write(descriptor, _BLOCK)
        os.fsync(descriptor)
        # A supervisor proves by a lock that it is alive; some file servers refuse locks.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _folder_id(path: str) -> str:
    """Written once and never changed: nodes that read the same id share the folder."""
    name = os.path.join(path, "folder-id")
    if not os.path.exists(name):
        os.makedirs(path, 0o700, exist_ok=True)
        fresh = "%s.%s" % (name, os.urandom(8).hex())
        with open(fresh, "x", encoding="ascii") as file:
            file.write(os.urandom(16).hex())
        try:
            with contextlib.suppress(FileExistsError):  # another node was first
                os.link(fresh, name)  # whole or not at all, also for others that read it now
        finally:
            os.unlink(fresh)
    with open(name, encoding="ascii") as file:
        return file.read(64)


def filesystem_of(path: str) -> Optional[str]:
    """The type of the mount that holds ``path``, as the kernel names it: ext4, nfs4, cifs, …"""
    best, kind = "", None
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, mount, filesystem = line.split(" ", 3)[:3]
            mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount)
            # Of two mounts at the same path the later hides the earlier.
            if len(mount) >= len(best) and (path + "/").startswith(mount.rstrip("/") + "/"):
                best, kind = mount, filesystem
    return kind
