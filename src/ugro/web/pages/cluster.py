"""``/``: the cluster; ``/nodes/{name}``: one node, with curves of the last day."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from ugro.features.alerts.config import AlertSection
from ugro.features.environments.model import SHORT
from ugro.features.hardware import pages as hardware
from ugro.kernel.access.caller import disguised, viewer, visible
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Job, JobState, Launcher, Share
from ugro.kernel.jobs.rows import Happened
from ugro.kernel.links.model import Gpu, GpuProcess, Status
from ugro.web.pages import overview as nodes
from ugro.web.pages.overview import NodeRow, NodesQuery, Overview, chosen, node_table, totals
from ugro.web.site import Site

# --- activity ---------------------------------------------------------------------------------------------------------
# Recent events, folded: a line for each job or node with its latest state, and one line for a burst of like jobs.


MOST_LINES = 12
BURST = 4  # so many jobs of one name are one line
_MOST_NAMED = 20  # of the jobs of a burst
_STATES = frozenset(JobState)
_HOUSEKEEPING = frozenset({"retention"})  # for ``ugro events``, and nobody's activity
_NUMBERED = re.compile(r"[-_.]?\d+$")


@dataclass(frozen=True, slots=True)
class Line:
    """What happened to one job, to one node, or to the cluster; the newest event first."""

    events: tuple[Event, ...]
    name: str | None = None
    state: JobState | None = None  # now; None: a node, or a job that was removed

    @property
    def newest(self) -> Event:
        return self.events[0]

    @property
    def job(self) -> int | None:
        return self.newest.job

    @property
    def node(self) -> str | None:
        return self.newest.node if self.job is None else None

    @property
    def key(self) -> str:
        return f"job-{self.job}" if self.job is not None else f"node-{self.node}" if self.node else "cluster"

    @property
    def text(self) -> str:
        """Of the newest change of state: notes and the like do not say how a job is."""
        moves = (event for event in self.events if self.job is None or event.kind in _STATES)
        return next(moves, self.newest).text

    @property
    def path(self) -> tuple[str, ...]:
        """The states that it went through, the oldest first."""
        kinds = [event.kind for event in reversed(self.events) if event.kind in _STATES]
        return tuple(kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before)


@dataclass(frozen=True, slots=True)
class Burst:
    """Many jobs of one name; without a name, many nodes."""

    name: str | None
    lines: tuple[Line, ...]  # of each, the one that changed last first

    @property
    def newest(self) -> Event:
        return self.lines[0].newest

    @property
    def key(self) -> str:
        return f"burst-{self.name or 'of nodes'}"

    @property
    def counts(self) -> list[tuple[JobState, int]]:
        """How many of its jobs are in each state."""
        counts = Counter(line.state for line in self.lines)
        return [(state, counts[state]) for state in JobState if counts[state]]

    @property
    def named(self) -> tuple[Line, ...]:
        """The failed jobs first: somebody looks for them."""
        return tuple(sorted(self.lines, key=lambda line: line.state != JobState.FAILED)[:_MOST_NAMED])


def activity(happened: Iterable[Happened], most: int = MOST_LINES) -> list[Line | Burst]:
    """``happened``: the newest first."""
    lines = _lines(happened)
    sizes = Counter(map(_family, lines))
    folded: dict[object, list[Line]] = {}
    for line in lines:
        family = _family(line)
        folded.setdefault(family if sizes[family] >= BURST else line.key, []).append(line)
    return [_folded(some) for some in list(folded.values())[:most]]


def _lines(happened: Iterable[Happened]) -> list[Line]:
    found: dict[int | str | None, list[Happened]] = {}
    for one in happened:
        if one.event.kind in _HOUSEKEEPING:
            continue
        found.setdefault(one.event.job if one.event.job is not None else one.event.node, []).append(one)
    return [Line(tuple(one.event for one in some), some[0].name, some[0].state) for some in found.values()]


def _folded(lines: Sequence[Line]) -> Line | Burst:
    if len(lines) == 1:
        return lines[0]
    names = {line.name for line in lines}
    return Burst(names.pop() if len(names) == 1 else _family(lines[0])[1], tuple(lines))


def _family(line: Line) -> tuple[str, str | None]:
    """Lines that many make one: those of nodes, and of jobs whose names differ in a number at their end."""
    if line.name is None:
        return ("node", None) if line.job is None else ("removed job", str(line.job))
    return "job", _NUMBERED.sub("", line.name) or line.name


# --- gpus -------------------------------------------------------------------------------------------------------------
# The grid of all GPUs on the cluster page: each with the job that holds it, its use, memory, temperature and power.
#
# A job stands beside a GPU if its placement has that GPU, and not because a process of it was seen there.


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


def gpu_grid(rows: Sequence[NodeRow], jobs: Iterable[Job], limits: AlertSection) -> Grid:
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


def _tiles(row: NodeRow, held: Held, limits: AlertSection) -> Iterator[Tile]:
    known = {gpu.index: gpu for gpu in row.gpus}
    of_jobs = {index for node, index in held if node == row.name}
    for index in sorted(known.keys() | of_jobs):
        yield _tile(row, index, known.get(index), held.get((row.name, index)), limits)


def _tile(row: NodeRow, index: int, gpu: Gpu | None, holder: Holder | None, limits: AlertSection) -> Tile:
    own = str(holder.job.id) if holder else None
    others = tuple(one for one in (gpu.processes if gpu else ()) if not (one.is_ours and one.job and one.job == own))
    is_used = gpu is not None and bool(others or gpu.holder or _works(gpu))
    sign = _problem(row, gpu, limits) or _use(row, holder, is_used=is_used)
    return Tile(row, index, gpu, holder, sign, others)


def _problem(row: NodeRow, gpu: Gpu | None, limits: AlertSection) -> Sign | None:
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


# --- cluster ----------------------------------------------------------------------------------------------------------


_MOST_WAITING = 12
_MOST_RUNNING = 30
_MOST_HAPPENED = 2000  # events that are folded into lines
_MOST_ALERTS = 12
HOURS = (1, 6, 24)


def add_cluster_pages(app: FastAPI, site: Site) -> None:
    overview = Overview(site.agent)

    @app.get("/")
    async def cluster(request: Request, wanted: Annotated[NodesQuery, Query()]) -> Response:
        rows, limits = await overview.rows(), site.agent.cluster.config.section(AlertSection)
        monitoring = site.agent.monitoring
        live = monitoring.live
        held = disguised(live.holding())
        waiting, running, alerts = visible(live.waiting()), visible(held), monitoring.monitor.alerts()
        newest = sorted(running, key=lambda job: -job.id)[:_MOST_RUNNING]
        return await site.render(
            request,
            "cluster.html",
            cli="ugro health",
            nodes=node_table(rows, wanted),
            totals=totals(rows),
            wanted=wanted,
            node_view=nodes,
            waiting=await site.agent.jobs.with_reasons(waiting[:_MOST_WAITING]),
            waiting_count=len(waiting),
            running=newest,
            headlines=await monitoring.headlines.words(newest),
            job_names={job.id: job.spec.name for job in held},
            running_count=len(running),
            alerts=alerts[:_MOST_ALERTS],
            alert_count=len(alerts),
            activity=activity(await site.agent.store.listing.newest_happened(_MOST_HAPPENED, viewer())),
            grid=gpu_grid(chosen(rows, wanted.q, wanted.status), held, limits),
            limits=limits,
        )

    @app.get("/nodes/{name}")
    async def node(request: Request, name: str, hours: Annotated[int, Query(ge=1, le=24)] = 1) -> Response:
        site.agent.cluster.inventory.named(name)
        row = next(row for row in await overview.rows() if row.name == name)
        monitor = site.agent.monitoring.monitor
        return await site.render(
            request,
            "node.html",
            cli=f"ugro node show {name}",
            row=row,
            watched=next(one for one in monitor.watched() if one.name == name),
            alerts=[alert for alert in monitor.alerts() if alert.node == name],
            jobs=_jobs_on(site.agent, row),
            spec=site.agent.cluster.inventory.named(name).spec,
            environments=await site.agent.kept_environments.seen(site.agent.cluster.inventory.named(name)),
            short=SHORT,
            hours=hours,
            all_hours=HOURS,
            **await _measured(site.agent, name),
        )


async def _measured(agent: Agent, name: str) -> dict[str, Any]:
    store, figures = agent.store.hardware, agent.measured.latest_of(name)
    columns, runs = hardware.runs(await store.history(name))
    return {
        "measured": figures,
        "measured_bars": hardware.own_bars(figures, await store.best(name)) if figures else [],
        "measured_columns": columns,
        "measured_runs": runs,
        "worse": agent.measured.findings(name),
    }


def _jobs_on(agent: Agent, row: NodeRow) -> list[Job]:
    return [job for job in visible(agent.monitoring.live.holding()) if job.id in row.jobs]
