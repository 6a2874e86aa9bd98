"""A disk small enough to be filled: a tmpfs over a folder. Needs root; ``available`` says whether there can be one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

_TIMEOUT_S = 10
_BLOCK = bytes(64 * 1024)


def available() -> str | None:
    """Why there can be none here; None when there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    with tempfile.TemporaryDirectory() as folder:
        disk = SmallDisk(Path(folder) / "disk", 1 << 20)
        try:
            disk.mount()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            return str(error)
        disk.unmount()
    return None


class SmallDisk:
    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.size_bytes = size_bytes
        self._ballast = folder / "ballast"

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = f"size={self.size_bytes},mode=755"
        _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder))

    def fill(self) -> int:
        """Not a byte is left; returns how many it took."""
        taken = 0
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                taken += file.write(_BLOCK)
        return taken

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Lazily: a process that a test left there must not keep it from going."""
        _run("umount", "-l", str(self.folder))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=_TIMEOUT_S)
