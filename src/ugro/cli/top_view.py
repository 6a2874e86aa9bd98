"""Draws ``ugro top``: a headline, nodes and GPUs, jobs with how far they are, services, alerts. It asks nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ugro.cli.health import SIGNS, note
from ugro.cli.jobs import describe
from ugro.cli.output import Cell, Output, Style
from ugro.features.alerts.model import Alert
from ugro.features.services.cli_show import service_lines
from ugro.features.services.model import ServiceReport
from ugro.features.training.model import Headline
from ugro.kernel.jobs.model import WAITING_STATES, Job, JobState, holders
from ugro.kernel.links.model import Facts, Gpu, NodeReport, Status, by_name
from ugro.kernel.support.quantities import format_duration, format_size

SORTS = ("name", "use", "memory", "temperature")
_BAR = 8
_BARS_FROM = 110  # columns: a narrower terminal has room for the figures only
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_FIGURE, _BAR_SIZES = 4, 13  # the widest: 100%, 10.0/141.0 GiB
_MUCH, _HOT_C = 0.9, 80.0
_NODE_HEADER = ("", "NODE", "LOAD", "CPU", "MEM", "GPU", "USE", "VRAM", "TEMP", "POWER", "JOB")
_NODE_SPARE = ("LOAD", "MEM", "CPU")
_JOB_HEADER = ("", "JOB", "NAME", "STATE", "NODES", "TIME", "USER")
_JOB_SPARE = ("USER", "NODES")


@dataclass(frozen=True, slots=True)
class Item:
    """What can be selected: a node by its name, a job by its id."""

    kind: Literal["node", "job"]
    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that belong together; the first stands for the item."""

    lines: Sequence[str]
    item: Item | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the cluster at one moment."""

    cluster: str
    nodes: Sequence[NodeReport]
    jobs: Sequence[Job]  # that have not ended
    alerts: Sequence[Alert]
    headlines: Mapping[int, Headline] = field(default_factory=dict)  # of running jobs, by job
    services: Sequence[ServiceReport] = ()  # that are not over


def headline(seen: Seen) -> str:
    machines = [report for report in seen.nodes if report.same_as is None]
    up = sum(report.status.is_up for report in machines)
    parts = [f"{seen.cluster}", f"{up} of {len(machines)} nodes", *_gpu_totals(machines)]
    running = sum(job.state not in WAITING_STATES for job in seen.jobs)
    parts.append(f"{running} running, {len(seen.jobs) - running} waiting")
    if seen.alerts:
        parts.append(f"{len(seen.alerts)} alert{'s' if len(seen.alerts) > 1 else ''}")
    return "   ".join(parts)


def _gpu_totals(nodes: Sequence[NodeReport]) -> Iterator[str]:
    gpus = [gpu for report in nodes if report.facts for gpu in report.facts.gpus]
    uses = [gpu.use_ratio for gpu in gpus if gpu.use_ratio is not None]
    if uses:
        yield f"GPU {sum(uses) / len(uses) * 100:.0f}%"
    sizes = [(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in gpus]
    known = [(used, total) for used, total in sizes if used is not None and total is not None]
    if known:
        yield f"VRAM {sum(used for used, _ in known) / 2**30:.1f}/{format_size(sum(total for _, total in known))}"
    watts = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    if watts:
        yield f"{sum(watts):.0f} W"


def lines(output: Output, seen: Seen, sort: str) -> list[str]:
    return [line for group in groups(output, seen, sort) for line in group.lines]


def groups(output: Output, seen: Seen, sort: str) -> list[Group]:
    drawn = _node_groups(output, seen, sort)
    if seen.jobs:
        drawn += [Group([""]), *_job_groups(output, seen)]
    else:
        drawn.append(Group(["", output.styled("no running or waiting jobs; start one: ugro launch train.py", "dim")]))
    if seen.services:
        drawn.append(Group(["", *service_lines(output, seen.services)]))
    if seen.alerts:
        drawn.append(Group(["", *output.table_lines(("", "NODE", "ALERT"), list(map(_alert_row, seen.alerts)))]))
    return drawn


# --- nodes -------------------------------------------------------------------------------------------------------


def _node_groups(output: Output, seen: Seen, sort: str) -> list[Group]:
    nodes = sorted(seen.nodes, key=lambda report: by_name(report.name))
    if sort != "name":
        nodes.sort(key=lambda report: -_most(report, sort))  # equal ones stay sorted by name
    has_bars = output.width >= _BARS_FROM
    rows, below, items = [], [], []
    for report in nodes:
        own = _rows_of(report, seen.jobs, has_bars=has_bars)
        rows += own
        items += [Item("node", report.name), *[None] * (len(own) - 1)]
        below += [*[Cell("")] * (len(own) - 1), Cell(output.cut_below(_trouble(report)), SIGNS[report.status][1])]
    drawn = output.table_groups(_NODE_HEADER, rows, spare=_NODE_SPARE, below=below)
    return [Group(one, item) for one, item in zip(drawn, [None, *items], strict=True)]


def _trouble(report: NodeReport) -> str:
    """Nothing for a healthy node: what little there is to say, ``ugro health`` says."""
    is_plain = report.status is Status.HEALTHY and report.drained is None and not report.owner_note
    is_plain = is_plain and not report.power_note
    return "" if is_plain and not report.second_name and not report.taken_gpus else note(report)


def _most(report: NodeReport, sort: str) -> float:
    facts = report.facts
    if facts is None:
        return -1.0
    own = {"use": facts.cpu_use_ratio, "memory": facts.memory_used_ratio}.get(sort)
    values = [
        {"use": gpu.use_ratio, "memory": gpu.memory_ratio, "temperature": gpu.temperature_c}[sort] for gpu in facts.gpus
    ]
    return max((value for value in values if value is not None), default=own or 0.0)


def _jobs_on(node: str, gpu: int | None, jobs: Sequence[Job]) -> list[str]:
    return [f"{job.id} {job.spec.name}" for job in holders(jobs, node, gpu)]


def _rows_of(report: NodeReport, jobs: Sequence[Job], *, has_bars: bool) -> list[list[Cell]]:
    """A row for each GPU, beside it the jobs that hold it; the first also has what is known of the node itself."""
    sign, style = SIGNS[report.status]
    own = [Cell(sign, style), Cell(report.name, "bold"), *_system_cells(report.facts)]
    gpus = report.facts.gpus if report.facts else ()
    on_cores = _jobs_on(report.name, None, jobs)
    if not gpus:
        return [[*own, *[Cell("")] * 5, Cell(", ".join(on_cores), "id")]]
    beside = [_jobs_on(report.name, gpu.index, jobs) for gpu in gpus]
    beside[0] += [f"{text} (no GPU)" for text in on_cores]
    cells = [_gpu_cells(gpu, has_bars=has_bars) for gpu in gpus]
    rows = [[*one, Cell(", ".join(held), "id")] for one, held in zip(cells, beside, strict=True)]
    blank = Cell("")
    return [[*own, *rows[0]], *([*[blank] * len(own), *row] for row in rows[1:])]


def _system_cells(facts: Facts | None) -> list[Cell]:
    if facts is None:
        return [Cell("")] * 3
    return [_number(f"{facts.load[0]:.2f}"), _percent(facts.cpu_use_ratio), _percent(facts.memory_used_ratio)]


def _gpu_cells(gpu: Gpu, *, has_bars: bool) -> list[Cell]:
    name = Cell(f"{gpu.index} {gpu.model}", "bad" if gpu.error else "")
    if gpu.error:
        return [name, *[Cell("")] * 4]
    is_hot = gpu.temperature_c is not None and gpu.temperature_c >= _HOT_C
    heat = f"{gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
    power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""
    use, memory = _percent(gpu.use_ratio), _memory(gpu)
    if has_bars:
        use, memory = _with_bar(gpu.use_ratio, use), _with_bar(gpu.memory_ratio, memory)
    return [name, use, memory, _number(heat, "warn" if is_hot else ""), _number(power)]


def _memory(gpu: Gpu) -> Cell:
    if gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return _number("")
    text = f"{gpu.memory_used_bytes / 2**30:.1f}/{format_size(gpu.memory_total_bytes)}"
    return _number(text, "warn" if (gpu.memory_ratio or 0.0) >= _MUCH else "")


def _percent(ratio: float | None) -> Cell:
    return _number(f"{ratio * 100:.0f}%" if ratio is not None else "", "warn" if (ratio or 0.0) >= _MUCH else "")


def _number(text: str, style: Style = "") -> Cell:
    return Cell(text, style, is_number=True)


def _with_bar(ratio: float | None, cell: Cell) -> Cell:
    """The bars of a column begin below each other: their figures are as wide as the widest."""
    if ratio is None:
        return cell
    return _number(f"{_bar(ratio)} {cell.text:>{_BAR_FIGURE if '%' in cell.text else _BAR_SIZES}}", cell.style)


def _bar(ratio: float) -> str:
    eighths = round(min(1.0, max(0.0, ratio)) * _BAR * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{bar:<{_BAR}}"


# --- jobs and alerts ---------------------------------------------------------------------------------------------


def _job_groups(output: Output, seen: Seen) -> list[Group]:
    below = [Cell(output.cut_below(_about(job, seen)), "" if job.id in seen.headlines else "dim") for job in seen.jobs]
    drawn = output.table_groups(_JOB_HEADER, list(map(_job_row, seen.jobs)), spare=_JOB_SPARE, below=below)
    items = [None, *(Item("job", str(job.id)) for job in seen.jobs)]
    return [Group(one, item) for one, item in zip(drawn, items, strict=True)]


def _job_row(job: Job) -> list[Cell]:
    style: Style = "good" if job.state is JobState.RUNNING else ""
    return [
        Cell("●" if job.state is JobState.RUNNING else "◌", style),
        Cell(str(job.id), "id", is_number=True),
        Cell(job.spec.name, "bold"),
        Cell(job.state, style),
        Cell(",".join(job.held.node_names) if job.held else ""),
        _number(format_duration(describe.duration_s(job))),
        Cell(job.user),
    ]


def _about(job: Job, seen: Seen) -> str:
    """How far a running job is, with the curve of its loss; why another one does not run."""
    found = seen.headlines.get(job.id)
    if found is None or job.state is not JobState.RUNNING:
        return describe.news(job)
    curve = spark(found.loss.values) if found.loss else ""
    return f"{found.words}  {curve}" if curve else found.words


def _alert_row(alert: Alert) -> list[Cell]:
    style: Style = "bad" if alert.severity == "critical" else "warn"
    return [Cell("✗" if style == "bad" else "!", style), Cell(alert.node, "bold"), Cell(alert.text, style)]


def spark(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    return "".join(" " if value is None else _LEVELS[round((value - low) / step)] for value in values)
