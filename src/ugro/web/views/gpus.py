"""The grid of all GPUs on the cluster page: each with the job that holds it, its use, memory, temperature and power.

A job stands beside a GPU if its placement has that GPU, and not because a process of it was seen there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ugro.config.schema import Alerts
from ugro.core.job import Job, Launcher, Share
from ugro.core.login import node_of
from ugro.core.node import Gpu, GpuProcess, Status
from ugro.web.views.overview import NodeRow

MANY = 48  # with more GPUs, the tiles are smaller
_SOME_USE = 0.05
_SOME_MEMORY = 0.1


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has the GPU, and its rank on it. A command is one process, which has no rank."""

    job: Job
    rank: int | None


@dataclass(frozen=True, slots=True)
class Sign:
    state: str  # selects icon and colour
    word: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A GPU; ``gpu`` is None while its node cannot be asked."""

    row: NodeRow
    index: int
    gpu: Gpu | None
    holder: Holder | None
    sign: Sign
    others: tuple[GpuProcess, ...] = ()  # processes on it that are not of the job that holds it

    @property
    def key(self) -> str:
        return f"{self.row.name}-{self.index}"


@dataclass(frozen=True, slots=True)
class Grid:
    tiles: tuple[Tile, ...]
    plain: tuple[NodeRow, ...]  # nodes without GPUs
    away: tuple[NodeRow, ...]  # nodes whose GPUs are not known
    free: int

    @property
    def is_dense(self) -> bool:
        return len(self.tiles) + len(self.plain) > MANY


Held = Mapping[tuple[str, int], Holder]  # by node and GPU


def gpu_grid(rows: Sequence[NodeRow], jobs: Iterable[Job], limits: Alerts) -> Grid:
    """``rows`` are in the order of the page; ``jobs`` are those that hold devices. Each machine counts once."""
    rows = [row for row in rows if not row.second_name or row.jobs]
    held = holders(jobs)
    tiles = tuple(tile for row in rows for tile in _tiles(row, held, limits))
    return Grid(
        tiles,
        tuple(row for row in rows if row.facts and not row.gpus),
        tuple(row for row in rows if not row.facts),
        sum(tile.sign.state == "free" for tile in tiles),
    )


def holders(jobs: Iterable[Job]) -> dict[tuple[str, int], Holder]:
    found = {}
    for job in jobs:
        first = 0
        for share in job.held.shares if job.held else ():
            for local, gpu in enumerate(share.gpus):
                rank = None if job.spec.launcher is Launcher.COMMAND else first + local
                found[node_of(share.node), gpu] = Holder(job, rank)
            first += _processes(share)
    return found


def _processes(share: Share) -> int:
    return len(share.gpus) or 1


def _tiles(row: NodeRow, held: Held, limits: Alerts) -> Iterator[Tile]:
    known = {gpu.index: gpu for gpu in row.gpus}
    of_jobs = {index for node, index in held if node == row.name}
    for index in sorted(known.keys() | of_jobs):
        yield _tile(row, index, known.get(index), held.get((row.name, index)), limits)


def _tile(row: NodeRow, index: int, gpu: Gpu | None, holder: Holder | None, limits: Alerts) -> Tile:
    own = str(holder.job.id) if holder else None
    others = tuple(one for one in (gpu.processes if gpu else ()) if not (one.is_ours and one.job and one.job == own))
    is_used = gpu is not None and bool(others or gpu.holder or _works(gpu))
    sign = _problem(row, gpu, limits) or _use(row, holder, is_used=is_used)
    return Tile(row, index, gpu, holder, sign, others)


def _problem(row: NodeRow, gpu: Gpu | None, limits: Alerts) -> Sign | None:
    if gpu is None:
        return _absence(row)
    if gpu.error:
        return Sign("critical", "cannot be read")
    if row.is_late:
        return Sign("late", "no news")
    if gpu.temperature_c is not None and gpu.temperature_c > limits.gpu_temperature_critical:
        return Sign("critical", "too hot")
    if gpu.temperature_c is not None and gpu.temperature_c > limits.gpu_temperature_warning:
        return Sign("warning", "hot")
    slowed = [word for word in gpu.throttle or () if word != "power"]  # a GPU under load reaches its power limit
    return Sign("warning", f"slowed: {', '.join(slowed)}") if slowed else None


def _absence(row: NodeRow) -> Sign:
    if row.report is not None and row.report.status.is_asleep:
        return Sign("asleep", row.status)
    return Sign("unreachable", "unreachable") if row.status == Status.UNREACHABLE else Sign("unknown", "not seen")


def _works(gpu: Gpu) -> bool:
    """Drivers do not name the processes of other containers and users; what they use is still seen."""
    return (gpu.use_ratio or 0.0) >= _SOME_USE or (gpu.memory_ratio or 0.0) >= _SOME_MEMORY


def _use(row: NodeRow, holder: Holder | None, *, is_used: bool) -> Sign:
    if holder is not None:
        return Sign(holder.job.state, holder.job.state)
    if is_used:
        return Sign("taken", "other use")
    if row.status == Status.UNHEALTHY:
        return Sign("unhealthy", "unhealthy")
    if row.drained is not None:
        return Sign("drained", "drained")
    return Sign("owner", "owner is there") if row.owner else Sign("free", "free")
