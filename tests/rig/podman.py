"""Podman with a store of a test's own, and a base image that debootstrap made: no registry is needed.

The base is kept in ``build/``: it takes minutes to make. It needs root and Debian's podman, runc and debootstrap.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/ugro-test-base"
_KEPT = ROOT / "build/deployment"
_PACKAGES = {
    "base": "python3,python3-venv,openssh-client",
    "services": "prometheus,postgresql",
    "systemd": "python3,python3-venv,openssh-client,openssh-server,systemd-sysv,dbus,libpam-systemd",
}
_LONG_S = 900
# Also where podman itself uses the first version of cgroups, which systemd does not take any more.
_CGROUPS = "umount -R /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup"
_SYSTEMD = f"{_CGROUPS} && exec /usr/lib/systemd/systemd"
RUN = ("--network=host",)
# Podman asks for more than an unprivileged virtual machine may give; cgroups of either version will do for runc.
_ULIMITS = ["nofile=1024:4096", "nproc=1024:4096"]
# debootstrap's, then pip's.
_OFFLINE_WORDS = ("Failed getting release file", "Couldn't download", "after connection broken by")
_OFFLINE = "PIP_OPTIONS=--no-index --find-links /dist"


class Offline(RuntimeError):
    """Where packages come from cannot be reached. Whatever else goes wrong is a failure."""


class Podman:
    def __init__(self, folder: Path, namespace: str | None = None) -> None:
        """``folder``: short, because sockets are in it. ``namespace``: the network of containers."""
        self.folder = folder
        self.bin = folder / f"bin{namespace or ''}"
        self.bin.mkdir(parents=True)
        settings = folder / "containers.conf"
        settings.write_text(f"[containers]\ndefault_ulimits = {json.dumps(_ULIMITS)}\n")
        words = f"--root {folder}/store --runroot {folder}/run --tmpdir {folder}/tmp --runtime runc"
        entered = f"nsenter --net=/run/netns/{namespace} " if namespace else ""
        program = self.bin / "podman"
        program.write_text(
            f"#!/bin/sh\nexport CONTAINERS_CONF={settings}\n"
            f'exec {entered}{shutil.which("podman")} {words} --cgroup-manager cgroupfs "$@"\n'
        )
        program.chmod(0o755)

    def within(self, namespace: str) -> Podman:
        """With the same images."""
        return Podman(self.folder, namespace)

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

    @contextmanager
    def systemd(self, name: str, image: str) -> Iterator[list[str]]:
        """A container whose first process is systemd. It has a network of its own, with nothing in it.

        Yields what comes before a command that is run in it.
        """
        options = ("--systemd=always", "--network=none", "--cgroupns=private", "--privileged", "--user=0")
        try:
            self("run", "--detach", "--name", name, *options, "--entrypoint=sh", image, "-c", _SYSTEMD)
            yield [str(self.bin / "podman"), "exec", name]
        finally:
            self("rm", "--force", "--time", "0", name, is_checked=False)

    def take(self, name: str) -> str:
        """An image of the packages of this name."""
        image = f"localhost/ugro-test-{name}"
        self("import", "--quiet", str(root_of(name)), image, timeout_s=_LONG_S)
        return image

    def build(self, file: Path, folder: Path, tag: str, *arguments: str) -> None:
        words = ["--format", "docker", "--isolation", "chroot", "--network", "host", "-f", str(file), "-t", tag]
        given = [word for argument in arguments for word in ("--build-arg", argument)]
        self("build", *words, *given, str(folder), timeout_s=_LONG_S)

    def build_agent(self, folder: Path, base: str = BASE, tag: str = "ugro") -> str:
        """Built as deploy/Containerfile says, with all wheels beside it, on what ``take`` made."""
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        version = self("run", "--rm", *RUN, base, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        pip, dist = [sys.executable, "-m", "pip"], folder / "dist"
        # By what is installed: nothing is fetched for it.
        _fetch(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), str(ROOT))
        [wheel] = dist.glob("ugro-*.whl")
        argv = [*pip, "download", "--quiet", "--only-binary", ":all:", "--python-version", version.strip()]
        _fetch(*argv, "--dest", str(dist), f"{wheel}[postgres]")
        self.build(folder / "deploy/Containerfile", folder, tag, f"BASE={base}", _OFFLINE)
        return tag

    def close(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self("rm", "--all", "--force", "--time", "0")
        # Layers are mounted as long as a container has them.
        shutil.rmtree(self.folder, ignore_errors=True)


def _fetch(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_LONG_S)
    if done.returncode != 0:
        said = f"{argv}: {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
        raise Offline(said) if is_offline(done.stdout + done.stderr) else AssertionError(said)


def is_offline(said: str) -> bool:
    """Whether pip or debootstrap could not reach where packages come from."""
    return any(words in said for words in _OFFLINE_WORDS)


def missing() -> str | None:
    """Why containers cannot be run here."""
    if os.geteuid() != 0:
        return "containers are tried as root only"
    programs = [name for name in ("podman", "runc", "debootstrap", "catatonit") if shutil.which(name) is None]
    return f"not installed: {', '.join(programs)} (Debian packages of the same names)" if programs else None


@cache
def root_of(name: str) -> Path:
    """The files of a machine with these packages, as an archive."""
    kept = _KEPT / f"{name}.tar"
    if kept.exists():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Tests run side by side: each makes its own, and the last one stays.
    with tempfile.TemporaryDirectory(dir=_KEPT, prefix=name) as folder:
        _fetch("debootstrap", "--variant=minbase", f"--include={_PACKAGES[name]}", "stable", f"{folder}/root")
        argv = ["tar", "-C", f"{folder}/root", "-cf", f"{folder}/root.tar", "."]
        subprocess.run(argv, check=True, timeout=_LONG_S)
        os.replace(f"{folder}/root.tar", kept)
    return kept
