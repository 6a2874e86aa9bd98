"""Podman with a store of a test's own, and a base image that debootstrap made: no registry is needed.

The base is kept in ``build/``: it takes minutes to make. It needs root and Debian's podman, runc and debootstrap.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/ugro-test-base"
_KEPT = ROOT / "build/deployment/base.tar"
_PACKAGES = "python3,python3-venv,openssh-client"
_LONG_S = 900
# Podman asks for more than an unprivileged virtual machine may give; cgroups of either version will do for runc.
RUN = ("--network=host", "--ulimit=nofile=1024:4096", "--ulimit=nproc=1024:4096")


class Podman:
    def __init__(self, folder: Path) -> None:
        """``folder``: short, because sockets are in it."""
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "podman"
        words = f"--root {folder}/store --runroot {folder}/run --tmpdir {folder}/tmp --runtime runc"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("podman")} {words} --cgroup-manager cgroupfs "$@"\n')
        program.chmod(0o755)

    @property
    def path(self) -> str:
        """In which ``podman`` is this one."""
        return f"{self.bin}:{os.environ['PATH']}"

    def __call__(self, *words: str, timeout_s: float = 120, is_checked: bool = True) -> str:
        argv = [str(self.bin / "podman"), *words]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
        if is_checked and done.returncode != 0:
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise AssertionError(f"podman {' '.join(words)}: {done.returncode}: {said}")
        return done.stdout if done.returncode == 0 else ""

    def start(self, name: str, image: str, *words: str, options: tuple[str, ...] = ()) -> None:
        self("run", "--detach", "--name", name, *RUN, *options, image, *words)

    def import_base(self) -> None:
        self("import", "--quiet", str(base()), BASE, timeout_s=_LONG_S)

    def close(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self("rm", "--all", "--force", "--time", "0")
        # Layers are mounted as long as a container has them.
        shutil.rmtree(self.folder, ignore_errors=True)


def missing() -> str | None:
    """Why containers cannot be run here."""
    if os.geteuid() != 0:
        return "containers are tried as root only"
    programs = [name for name in ("podman", "runc", "debootstrap") if shutil.which(name) is None]
    return f"not installed: {', '.join(programs)} (Debian packages of the same names)" if programs else None


@cache
def base() -> Path:
    if _KEPT.exists():
        return _KEPT
    _KEPT.parent.mkdir(parents=True, exist_ok=True)
    folder = _KEPT.with_name(f"base.{os.getpid()}")  # tests run side by side
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "stable", str(folder)],
        capture_output=True, text=True, timeout=_LONG_S,
    )  # fmt: skip
    if made.returncode != 0:
        raise RuntimeError(f"debootstrap failed: {made.stdout[-500:]}{made.stderr[-500:]}")
    fresh = _KEPT.with_suffix(f".{os.getpid()}")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(fresh), "."], check=True, timeout=_LONG_S)
    fresh.replace(_KEPT)
    shutil.rmtree(folder, ignore_errors=True)
    return _KEPT
