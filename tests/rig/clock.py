"""Clocks that a test sets while processes run: a library in front of the C library shows them another time.

Only the wall clock, the clock of the boot and the boot's id change. The kernel stamps files as ever.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_FORMAT = struct.Struct("<qq64s")
HOUR_S = 3600.0
YEAR_S = 365 * 86400.0


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class RigClock:
    """The clock of the processes that are started with ``env``."""

    def __init__(self, folder: Path, name: str = "clock") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = folder / "rigclock.so"
        self._path = folder / name
        self._path.write_bytes(_FORMAT.pack(0, 0, b""))
        if not self.library.exists():
            build(self.library)
        with self._path.open("r+b") as file:
            self._shown = mmap.mmap(file.fileno(), _FORMAT.size)
        self._wall_s, self._boot_s, self._boot_id = 0.0, 0.0, b""

    @property
    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "RIG_CLOCK": str(self._path)}

    def jump(self, by_s: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_s += by_s
        self._write()

    def reboot(self, number: int, wall_by_s: float = 0.0) -> None:
        """For processes that start from now on: another boot, just begun, with a wall clock that is off by so much."""
        with open("/proc/uptime", encoding="ascii") as file:
            self._boot_s = 20.0 - float(file.read().split()[0])
        self._boot_id = b"%08d-0000-4000-8000-000000000000" % number
        self._wall_s += wall_by_s
        self._write()

    def _write(self) -> None:
        packed = _FORMAT.pack(round(self._wall_s * 1e9), round(self._boot_s * 1e9), self._boot_id)
        self._shown[:] = packed


def build(library: Path) -> None:
    found = compiler()
    if found is None:
        pytest.skip("not installed: a C compiler")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([found, *flags, "-o", str(library), str(_SOURCE), "-ldl"], check=True, timeout=60)
