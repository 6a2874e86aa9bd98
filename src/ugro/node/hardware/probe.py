"""What this machine is (``machine``) and its current load (``Prober``), from /proc.

Probes are frequent: files stay open, nothing forks, nothing is imported.
"""

from __future__ import annotations

import os
import pwd
import sys
import time

from ugro.node.machine import machine_id

TYPE_CHECKING = False  # see wire.py

if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple


# --- gpu hint ---------------------------------------------------------------------------------------------------------
# Whether the node may have GPUs at all. Must be cheap: it is asked while a link opens.


_DEVICES = ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/kfd", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi")


def has_gpu_hint() -> bool:
    if os.environ.get("UGRO_NVML_LIBRARY") or any(os.path.exists(path) for path in _DEVICES):
        return True
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return any(os.access(os.path.join(folder, tool), os.X_OK) for folder in folders for tool in _TOOLS)


# --- probe ------------------------------------------------------------------------------------------------------------


_MIN_CPU_WINDOW_S = 0.2


def machine(root: str) -> Dict[str, Any]:
    names = os.uname()
    return {
        "hostname": names.nodename,
        "os": _os_name(),
        "kernel": names.release,
        "arch": names.machine,
        "boot_id": _read("/proc/sys/kernel/random/boot_id").strip(),
        "user": _user(),
        "root": os.path.realpath(root),  # resolved: a start names the folder that it was planned for
        "python": "%d.%d.%d" % sys.version_info[:3],
        "python_path": sys.executable,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "machine_id": machine_id(),
        **_home(),
    }


class Prober:
    def __init__(self, root: str) -> None:
        self._root = root
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY)
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY)
        self._stat = os.open("/proc/stat", os.O_RDONLY)
        self._cpu_at = time.monotonic()
        self._cpu = self._cpu_times()
        self._cpu_use: Optional[float] = None

    def sample(self) -> Dict[str, Any]:
        load = os.pread(self._loadavg, 128, 0).split(None, 3)
        total, available = self._memory()
        return {
            "time_unix": time.time(),
            "uptime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 1),
            "load": [float(load[0]), float(load[1]), float(load[2])],
            "cpu_use_ratio": self._cpu_use_ratio(),
            "memory_total_bytes": total,
            "memory_available_bytes": available,
            "disks": self._disks(),
        }

    def _memory(self) -> Tuple[int, int]:
        text = os.pread(self._meminfo, 512, 0)
        return _kib(text, b"MemTotal:"), _kib(text, b"MemAvailable:")

    def _cpu_times(self) -> Tuple[int, int]:
        """Busy and total time of all cores together, in clock ticks."""
        fields = [int(field) for field in os.pread(self._stat, 256, 0).split(b"\n", 1)[0].split()[1:9]]
        total = sum(fields)
        return total - fields[3] - fields[4], total

    def _cpu_use_ratio(self) -> Optional[float]:
        now = time.monotonic()
        if now - self._cpu_at >= _MIN_CPU_WINDOW_S:
            busy, total = self._cpu_times()
            elapsed = total - self._cpu[1]
            if elapsed > 0:
                self._cpu_use = round(min(1.0, max(0.0, (busy - self._cpu[0]) / elapsed)), 4)
            self._cpu, self._cpu_at = (busy, total), now
        return self._cpu_use

    def _disks(self) -> List[Dict[str, Any]]:
        disks = []
        seen = set()
        for mount in (self._root, "/"):
            try:
                usage, device = os.statvfs(mount), os.stat(mount).st_dev
            except OSError:
                continue
            if device in seen:
                continue
            seen.add(device)
            # What a user may fill, as df counts it: blocks reserved for root count neither as free nor in the total.
            used = usage.f_blocks - usage.f_bfree
            total = (used + usage.f_bavail) * usage.f_frsize
            disks.append({"mount": mount, "total_bytes": total, "free_bytes": usage.f_bavail * usage.f_frsize})
        return disks


def _kib(text: bytes, key: bytes) -> int:
    at = text.find(key)
    return int(text[at + len(key) :].split(None, 1)[0]) * 1024 if at >= 0 else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(64 * 1024)
    except OSError:
        return ""


def _os_name() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip('"')
    return os.uname().sysname


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def _home() -> Dict[str, str]:
    home = os.path.realpath(os.path.expanduser("~"))
    try:
        found = os.stat(home)
    except OSError:
        return {}
    return {"home": home, "home_id": "%d:%d" % (found.st_dev, found.st_ino)}


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
