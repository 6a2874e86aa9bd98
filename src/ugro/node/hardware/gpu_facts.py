"""What the sampler reports about a GPU and its processes, in the fields of ``kernel.links.model``.

Every source (``nvml``, ``gpu_tools``) fills these in; ``None`` means "not known", never zero.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, TypedDict

UNKNOWN = "unknown"
_MOST_PARENTS = 64
# In the environment of ranks, of `ugro exec`, and of what measures this node.
_OURS = (b"UGRO_RUN", b"UGRO_EXEC", b"UGRO_BENCH")
_MARKS = tuple(name + b"=" for name in (*_OURS, b"UGRO_JOB"))


class GpuProcess(TypedDict):
    pid: int
    name: str
    memory_bytes: Optional[int]
    is_ours: bool
    job: Optional[str]


class Gpu(TypedDict):
    index: int
    uuid: str
    name: str
    memory_total_bytes: Optional[int]
    memory_used_bytes: Optional[int]
    use_ratio: Optional[float]
    temperature_c: Optional[float]
    power_w: Optional[float]
    power_limit_w: Optional[float]
    energy_j: Optional[float]  # what it has used since its driver was loaded
    throttle: Optional[List[str]]
    processes: List[GpuProcess]
    error: Optional[str]
    holder: Optional[Dict[str, Any]]  # of its lock; filled in last, whatever the source


class Reading(NamedTuple):
    gpus: List[Gpu]
    driver: Optional[str]


class SourceError(Exception):
    """This source cannot answer now; another one may."""


class SourceAbsentError(SourceError):
    """Not installed here, which is not an error."""


def unread_gpu(index: int, uuid: str = "", name: str = UNKNOWN, error: Optional[str] = None) -> Gpu:
    return {
        "index": index,
        "uuid": uuid,
        "name": name,
        "memory_total_bytes": None,
        "memory_used_bytes": None,
        "use_ratio": None,
        "temperature_c": None,
        "power_w": None,
        "power_limit_w": None,
        "energy_j": None,
        "throttle": None,
        "processes": [],
        "error": error,
        "holder": None,
    }


def gpu_process(pid: int, memory_bytes: Optional[int], name: str = UNKNOWN) -> GpuProcess:
    """``name`` comes from the source; the kernel's name for the process takes precedence."""
    marks = _marks(pid)
    return {
        "pid": pid,
        "name": read("/proc/%d/comm" % pid).decode(errors="replace").strip() or name,
        "memory_bytes": memory_bytes,
        "is_ours": any(name in marks for name in _OURS),
        "job": marks[b"UGRO_JOB"].decode(errors="replace") if b"UGRO_JOB" in marks else None,
    }


def _marks(pid: int) -> dict[bytes, bytes]:
    """Its own, or those of the nearest process above it that has some: `env -i` and sudo take them away."""
    return next((marks for marks in map(_environment_marks, lineage(pid)) if marks), {})


def lineage(pid: int) -> Iterator[int]:
    """The process, its parent, and so on."""
    for _ in range(_MOST_PARENTS):
        yield pid
        if pid <= 1:
            return
        pid = _parent(pid)


def is_hidden(pid: int) -> bool:
    """Whether nothing can be read of it: it is somebody else's where those are hidden, or it has ended."""
    return not read("/proc/%d/stat" % pid)


def _parent(pid: int) -> int:
    """0 if it is not known."""
    # The name is in brackets and may hold spaces and brackets itself.
    words = read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _environment_marks(pid: int) -> dict[bytes, bytes]:
    entries = read("/proc/%d/environ" % pid).split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if entry.startswith(_MARKS))


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # ended meanwhile, another user's, or in another PID namespace
        return b""
