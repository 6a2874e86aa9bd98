"""Draws ``ugro top``: a headline, nodes and GPUs with bars, jobs and alerts. It makes no requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ugro.cli.health import SIGNS, note
from ugro.cli.jobs import describe
from ugro.cli.output import Cell, Output, Style
from ugro.core.alert import Alert
from ugro.core.job import WAITING_STATES, Job, JobState, holders
from ugro.core.node import Facts, Gpu, NodeReport, Status, by_name
from ugro.core.support.quantity import format_duration, format_size

SORTS = ("name", "use", "memory", "temperature")
_BAR = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
_MUCH, _HOT_C = 0.9, 80.0
_NODE_HEADER = ("", "NODE", "LOAD", "CPU", "MEM", "GPU", "USE", "VRAM", "TEMP", "POWER", "JOB", "NOTE")
_NODE_SPARE = ("POWER", "LOAD", "TEMP", "NOTE", "MEM", "CPU")
_JOB_HEADER = ("", "JOB", "NAME", "STATE", "NODES", "TIME", "LOSS", "", "REASON")
_JOB_SPARE = ("NODES",)


@dataclass(frozen=True, slots=True)
class Curve:
    """A training's loss over time; None where it was not a number."""

    values: Sequence[float | None]

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the cluster at one moment."""

    cluster: str
    nodes: Sequence[NodeReport]
    jobs: Sequence[Job]  # that have not ended
    alerts: Sequence[Alert]
    losses: Mapping[int, Curve] = field(default_factory=dict)  # by job


def headline(seen: Seen) -> str:
    machines = [report for report in seen.nodes if report.same_as is None]
    up = sum(report.status is not Status.UNREACHABLE for report in machines)
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
        yield f"VRAM {format_size(sum(used for used, _ in known))} of {format_size(sum(total for _, total in known))}"
    watts = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    if watts:
        yield f"{sum(watts):.0f} W"


def lines(output: Output, seen: Seen, sort: str) -> list[str]:
    drawn = output.table_lines(_NODE_HEADER, _node_rows(seen, sort), spare=_NODE_SPARE)
    if seen.jobs:
        drawn += ["", *output.table_lines(_JOB_HEADER, [_job_row(job, seen) for job in seen.jobs], spare=_JOB_SPARE)]
    else:
        drawn += ["", output.styled("no running or waiting jobs; start one: ugro launch train.py", "dim")]
    if seen.alerts:
        drawn += ["", *output.table_lines(("", "NODE", "ALERT"), [_alert_row(alert) for alert in seen.alerts])]
    return drawn


# --- nodes -------------------------------------------------------------------------------------------------------


def _node_rows(seen: Seen, sort: str) -> list[list[Cell]]:
    nodes = sorted(seen.nodes, key=lambda report: by_name(report.name))
    if sort != "name":
        nodes.sort(key=lambda report: -_most(report, sort))  # equal ones stay sorted by name
    return [row for report in nodes for row in _rows_of(report, seen.jobs)]


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


def _rows_of(report: NodeReport, jobs: Sequence[Job]) -> list[list[Cell]]:
    """A row for each GPU, beside it the jobs that hold it; the first also has what is known of the node itself."""
    sign, style = SIGNS[report.status]
    own = [Cell(sign, style), Cell(report.name, "bold"), *_system_cells(report.facts)]
    more = Cell(note(report), style)
    gpus = report.facts.gpus if report.facts else ()
    on_cores = _jobs_on(report.name, None, jobs)
    if not gpus:
        return [[*own, *[Cell("")] * 5, Cell(", ".join(on_cores), "id"), more]]
    beside = [_jobs_on(report.name, gpu.index, jobs) for gpu in gpus]
    beside[0] += [f"{text} (no GPU)" for text in on_cores]
    rows = [[*_gpu_cells(gpu), Cell(", ".join(held), "id")] for gpu, held in zip(gpus, beside, strict=True)]
    blank = Cell("")
    return [[*own, *rows[0], more], *([*[blank] * len(own), *row, blank] for row in rows[1:])]


def _system_cells(facts: Facts | None) -> list[Cell]:
    if facts is None:
        return [Cell("")] * 3
    return [Cell(f"{facts.load[0]:.2f}", is_number=True), _bar(facts.cpu_use_ratio), _bar(facts.memory_used_ratio)]


def _gpu_cells(gpu: Gpu) -> list[Cell]:
    name = Cell(f"{gpu.index} {gpu.model}", "bad" if gpu.error else "")
    if gpu.error:
        return [name, *[Cell("")] * 4]
    is_hot = gpu.temperature_c is not None and gpu.temperature_c >= _HOT_C
    heat = f"{gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
    power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""
    temperature = Cell(heat, "warn" if is_hot else "", is_number=True)
    return [name, _bar(gpu.use_ratio), _memory(gpu), temperature, Cell(power, is_number=True)]


def _memory(gpu: Gpu) -> Cell:
    cell = _bar(gpu.memory_ratio)
    total = f" of {format_size(gpu.memory_total_bytes)}" if cell.text and gpu.memory_total_bytes else ""
    return Cell(cell.text + total, cell.style)


def _bar(ratio: float | None) -> Cell:
    if ratio is None:
        return Cell("")
    ratio = min(1.0, max(0.0, ratio))
    eighths = round(ratio * _BAR * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Cell(f"{bar:<{_BAR}} {ratio * 100:3.0f}%", "warn" if ratio >= _MUCH else "")


# --- jobs and alerts ---------------------------------------------------------------------------------------------


def _job_row(job: Job, seen: Seen) -> list[Cell]:
    curve = seen.losses.get(job.id)
    loss = f"{curve.last:.4g}" if curve and curve.last is not None else ""
    style: Style = "good" if job.state is JobState.RUNNING else ""
    sign = "●" if job.state is JobState.RUNNING else "◌"
    return [
        Cell(sign, style),
        Cell(str(job.id), "id", is_number=True),
        Cell(job.spec.name, "bold"),
        Cell(job.state, style),
        Cell(", ".join(job.held.nodes) if job.held else ""),
        Cell(format_duration(describe.duration_s(job)), is_number=True),
        Cell(loss, is_number=True),
        Cell(spark(curve.values) if curve else ""),
        Cell(job.reason if job.state is not JobState.RUNNING else ""),
    ]


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
