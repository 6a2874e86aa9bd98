"""The data of the cluster page: a row for each node with its last hour, and totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Query

from ugro.features.alerts.service import Watched
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import Job
from ugro.kernel.links.model import Facts, Gpu, NodeReport, NodeSpec, Status, by_name
from ugro.kernel.operations.responses import Body
from ugro.kernel.telemetry.curves import Curve, Wanted
from ugro.kernel.telemetry.metricstore import node_owner
from ugro.web.site import seconds

_SPARK_S = 3600
_SPARK_BINS = 40
_SPARKS_S = 15.0  # how old they may be, since all tabs show the same hour
_MOST_GPUS = 16
_LATE = 2.5  # intervals
_LATE_MORE_S = 15.0

Spark = list[float | None]


@dataclass(frozen=True, slots=True)
class NodeRow:
    name: str
    report: NodeReport | None  # None: not probed yet
    drained: str | None
    jobs: tuple[int, ...]
    is_late: bool  # the report is older than it should be
    spark: Spark | None
    spark_words: str

    @property
    def facts(self) -> Facts | None:
        return self.report.facts if self.report else None

    @property
    def status(self) -> str:
        return self.report.status if self.report else "unknown"

    @property
    def second_name(self) -> str | None:
        """Why it is not used, if it is another name for a machine."""
        return self.report.second_name if self.report else None

    @property
    def owner(self) -> str | None:
        """That somebody uses it, if jobs make way for its owner."""
        report = self.report.owner if self.report else None
        return self.report.owner_note if self.report and report and report.is_there else None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.facts.gpus if self.facts else ()

    @property
    def use(self) -> float | None:
        return mean(gpu.use_ratio for gpu in self.gpus)

    @property
    def load(self) -> float | None:
        """The use of its GPUs or, without GPUs, of its CPUs."""
        return self.use if self.gpus or not self.facts else self.facts.cpu_use_ratio

    @property
    def memory(self) -> tuple[int, int] | None:
        """Used and total bytes of all GPUs that report them."""
        pairs = [(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in self.gpus]
        known = [(used, total) for used, total in pairs if used is not None and total]
        return (sum(used for used, _ in known), sum(total for _, total in known)) if known else None

    @property
    def temperature(self) -> float | None:
        return max((gpu.temperature_c for gpu in self.gpus if gpu.temperature_c is not None), default=None)

    @property
    def power(self) -> float | None:
        known = [gpu.power_w for gpu in self.gpus if gpu.power_w is not None]
        return sum(known) if known else None

    @property
    def gpu_words(self) -> str:
        """``2 × RTX 4070, GTX 1070``."""
        counts: dict[str, int] = {}
        for gpu in self.gpus:
            counts[gpu.model] = counts.get(gpu.model, 0) + 1
        return ", ".join(f"{count} × {model}" if count > 1 else model for model, count in counts.items())


@dataclass(frozen=True, slots=True)
class Totals:
    nodes: int
    nodes_up: int
    gpus: int
    use: float | None
    memory: tuple[int, int] | None
    power: float | None
    cpu: float | None
    cores: int


class Overview:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._sparks: dict[str, tuple[str, Spark]] = {}
        self._sparks_until = float("-inf")

    async def rows(self) -> list[NodeRow]:
        """Sorted by name, gpu2 before gpu10."""
        specs = [node.spec for node in self._agent.cluster.inventory]
        drained = await self._agent.store.drained()
        watched = {one.name: one for one in self._agent.monitoring.monitor.watched()}
        sparks = await self._refreshed([spec.name for spec in specs])
        jobs = jobs_by_node(self._agent.monitoring.live.holding())
        rows = [self._row(spec, drained, watched, jobs) for spec in specs]
        return [_with_spark(row, sparks) for row in sorted(rows, key=lambda row: by_name(row.name))]

    def _row(
        self, spec: NodeSpec, drained: Mapping[str, str], watched: Mapping[str, Watched], jobs: Mapping[str, list[int]]
    ) -> NodeRow:
        report = self._agent.monitoring.monitor.reports.get(spec.name)
        late = report is not None and is_late(report, watched.get(spec.name))
        return NodeRow(spec.name, report, drained.get(spec.name), tuple(jobs.get(spec.name, ())), late, None, "")

    async def _refreshed(self, names: Sequence[str]) -> dict[str, tuple[str, Spark]]:
        if time.monotonic() >= self._sparks_until:
            self._sparks_until = time.monotonic() + _SPARKS_S
            now = int(time.time())
            keys = ("cpu/use_ratio", *(f"gpu/{index}/use_ratio" for index in range(_MOST_GPUS)))
            owners = tuple(node_owner(name) for name in names)
            wanted = Wanted(owners, keys, first_step=now - _SPARK_S, last_step=now, bins=_SPARK_BINS)
            curves = await self._agent.monitoring.metrics.curves(wanted)
            self._sparks = {name: _spark(name, curves, now - _SPARK_S) for name in names}
        return self._sparks


def _with_spark(row: NodeRow, sparks: Mapping[str, tuple[str, Spark]]) -> NodeRow:
    words, spark = sparks.get(row.name, ("", None))
    return replace(row, spark=spark, spark_words=words)


def _spark(name: str, curves: Iterable[Curve], first: int) -> tuple[str, Spark]:
    """The use of the GPUs, or of the CPU without GPUs, in percent."""
    own = [curve for curve in curves if curve.owner == node_owner(name)]
    of_gpus = [curve for curve in own if curve.key.startswith("gpu/")]
    slots: list[list[float]] = [[] for _ in range(_SPARK_BINS)]
    for curve in of_gpus or own:
        for step, value in zip(curve.steps, curve.means, strict=True):
            index = (step - first) * _SPARK_BINS // _SPARK_S
            if value is not None and 0 <= index < _SPARK_BINS:
                slots[index].append(100 * value)
    values: Spark = [round(sum(slot) / len(slot)) if slot else None for slot in slots]
    return ("GPU use" if of_gpus else "CPU use") + " in the last hour, percent", _without_small_gaps(values)


def _without_small_gaps(values: Spark) -> Spark:
    """Fills single empty bins, which appear because the bins of the store and of the page do not align."""
    around = zip([None, *values[:-1]], values, [*values[1:], None], strict=True)
    return [before if here is None and after is not None else here for before, here, after in around]


def totals(rows: Sequence[NodeRow]) -> Totals:
    rows = [row for row in rows if not row.second_name]
    up = [row for row in rows if row.report is not None and row.report.status.is_up]
    memories = [row.memory for row in up if row.memory]
    powers = [row.power for row in up if row.power is not None]
    return Totals(
        nodes=len(rows),
        nodes_up=len(up),
        gpus=sum(len(row.gpus) for row in up),
        use=mean(gpu.use_ratio for row in up for gpu in row.gpus),
        memory=(sum(used for used, _ in memories), sum(total for _, total in memories)) if memories else None,
        power=sum(powers) if powers else None,
        cpu=mean(row.facts.cpu_use_ratio for row in up if row.facts),
        cores=sum(row.report.machine.cores for row in up if row.report and row.report.machine),
    )


def is_late(report: NodeReport, watched: Watched | None) -> bool:
    at = seconds(report.checked_at)
    interval_s = watched.interval_s if watched else 60.0
    return at is None or abs(time.time() - at) > _LATE * interval_s + _LATE_MORE_S


def chosen(rows: Sequence[NodeRow], text: str, status: str) -> list[NodeRow]:
    """Rows that contain all words of ``text`` and, if given, have the status."""
    wanted = text.lower().split()
    return [
        row
        for row in rows
        if status in ("", row.status, "drained" if row.drained is not None else "", "owner" if row.owner else "")
        and all(word in _words_of(row) for word in wanted)
    ]


def _words_of(row: NodeRow) -> str:
    labels = row.report.labels if row.report else ()
    return " ".join((row.name, row.status, row.gpu_words, *labels, row.drained or "", row.owner or "")).lower()


def jobs_by_node(jobs: Iterable[Job]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for job in jobs:
        for name in job.placement.node_names if job.placement else ():
            found.setdefault(name, []).append(job.id)
    return found


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- nodes ------------------------------------------------------------------------------------------------------------
# The nodes on the cluster page: a table and, for many nodes, a map and pages of the table.


MANY = 24  # with more nodes there is a map
PAGE = 50
LEVELS = 5  # of use, besides none
_ASLEEP = (Status.WAKING, Status.GOING_TO_SLEEP, Status.ASLEEP)
_WORST = (
    *(Status.UNREACHABLE, Status.UNHEALTHY, Status.DEGRADED, "unknown", "late", "drained", "owner"),
    *(*_ASLEEP, Status.HEALTHY),
)


class NodesQuery(Body):
    q: Annotated[str, Query(max_length=200)] = ""
    status: Annotated[str, Query(max_length=20)] = ""
    sort: Annotated[Literal["", "worst", "use", "name"], Query()] = ""  # default: the worst first if there are many
    page: Annotated[int, Query(ge=1, le=10**6)] = 1

    def link(self, page: int) -> str:
        given = {"q": self.q, "status": self.status, "sort": self.sort, "page": page if page > 1 else ""}
        return "/?" + urlencode({key: value for key, value in given.items() if value})


@dataclass(frozen=True, slots=True)
class NodeTable:
    rows: list[NodeRow]  # of this page
    squares: list[NodeRow]  # all that match, by name; empty without a map
    counts: dict[str, int]  # of those, by status word
    first: int  # number of the first row
    found: int
    before: str | None  # links to other pages
    after: str | None


def node_table(rows: Sequence[NodeRow], wanted: NodesQuery) -> NodeTable:
    """``rows`` are sorted by name."""
    has_map = len(rows) > MANY
    found = chosen(rows, wanted.q, wanted.status)
    last = max(1, -(-len(found) // PAGE))
    page = min(wanted.page, last)  # the table may have become shorter
    begin = (page - 1) * PAGE
    return NodeTable(
        rows=_sorted(found, wanted.sort or ("worst" if has_map else "name"))[begin : begin + PAGE],
        squares=found if has_map else [],
        counts=_counts(found),
        first=begin + 1,
        found=len(found),
        before=wanted.link(page - 1) if page > 1 else None,
        after=wanted.link(page + 1) if page < last else None,
    )


def word(row: NodeRow) -> str:
    """The status word of a node on the map; ``_WORST`` has the order."""
    if row.status != Status.HEALTHY:
        return row.status
    if row.drained is not None:
        return "drained"
    return "late" if row.is_late else "owner" if row.owner else Status.HEALTHY


def said(word: str) -> str:
    return "owner is there" if word == "owner" else word


def level(row: NodeRow) -> int:
    """How much of the node is in use: 0 for nothing, then in equal steps."""
    return 0 if row.load is None or row.load < 0.01 else min(LEVELS, 1 + int(row.load * LEVELS))


def _sorted(rows: Sequence[NodeRow], by: str) -> list[NodeRow]:
    if by == "name":
        return list(rows)
    if by == "use":
        return sorted(rows, key=lambda row: (-1.0 if row.load is None else row.load, by_name(row.name)), reverse=True)
    return sorted(rows, key=lambda row: (_WORST.index(word(row)), by_name(row.name)))


def _counts(rows: Sequence[NodeRow]) -> dict[str, int]:
    counts = Counter(map(word, rows))
    return {one: counts[one] for one in _WORST if counts[one]}
