"""``ugro profile``: where the time of a training goes on each rank, and what slows it down."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Sequence

import click

from ugro.cli import candidates
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell, Output, Style, clean
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.client.jobs import new_key
from ugro.features.planning.model import speed
from ugro.features.training.model import (
    DeviceEnergy,
    FindingKind,
    JobEnergy,
    JobProfile,
    RankProfile,
    TraceFile,
    TraceRequest,
)
from ugro.features.training.operations import MOST_STEPS, MOST_TRACED, GetJobProfile, ListJobTraces, TraceJob
from ugro.kernel.files.model import ResultState
from ugro.kernel.files.operations import GetJobResults
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import format_duration, format_energy, format_size

# --- energy -----------------------------------------------------------------------------------------------------------
# What a job used, as text: by device, rank and epoch. It prints nothing.


_MOST_LISTED = 16


def energy_facts(energy: JobEnergy | None) -> Iterator[tuple[str, str]]:
    if energy is None:
        return
    yield "energy", energy.words
    devices = energy.devices
    if len(devices) > 1:
        yield "by device", _listed([_device(one) for one in devices])
    if len(energy.ranks) > 1:
        yield "by rank", _listed([f"{one.rank}: {format_energy(one.joules)}" for one in energy.ranks])
    if any(one.is_shared for one in energy.ranks):
        yield "", "devices that several ranks use count for each of them in equal parts"
    if len(energy.epochs) > 1:
        # The newest: the last one may still go on.
        some = energy.epochs[-_MOST_LISTED:]
        texts = [f"{one.epoch}: {format_energy(one.joules)} in {format_duration(one.seconds)}" for one in some]
        yield "by epoch", ", ".join(texts)


def _device(one: DeviceEnergy) -> str:
    share = one.measured_s / one.held_s if one.held_s else 0.0
    measured = "" if share >= 0.99 else f" ({100 * share:.0f} % measured)"
    return f"{one.node} {one.device}: {format_energy(one.joules)}{measured}"


def _listed(texts: list[str]) -> str:
    more = f", … {len(texts) - _MOST_LISTED} more: --json" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more


# --- trace ------------------------------------------------------------------------------------------------------------
# ``ugro profile JOB --trace N``: requests torch traces of some steps, waits for them, and lists their files.


_LOOK_S = 0.3
_VIEWER = "https://ui.perfetto.dev"
_COMING = (ResultState.WAITING, ResultState.LIVE, ResultState.COMING)


def trace_steps(output: Output, client: Client, word: str, steps: int) -> int:
    before = client.ask(ListJobTraces(word))
    job = before.job
    asked = client.ask(TraceJob(str(job.id), new_key(), steps))
    try:
        found = _arrived(output, client, asked, {one.path for one in before.traces})
    except KeyboardInterrupt:
        output.note(f"the traces will still be collected: ugro results {job.id}")
        raise
    _show(output, client.jobs.get(job.id), found)
    return int(any(one.problem for one in found))


def _arrived(output: Output, client: Client, asked: TraceRequest, known: set[str]) -> tuple[TraceFile, ...]:
    traces = ListJobTraces(str(asked.job), asked.attempt)
    while True:
        answer = client.ask(traces)
        job, found = answer.job, tuple(one for one in answer.traces if one.path not in known)
        if len({one.rank for one in found}) >= asked.ranks:
            return found
        if job.is_final and client.ask(GetJobResults(str(asked.job), asked.attempt)).results.state not in _COMING:
            found = tuple(one for one in client.ask(traces).traces if one.path not in known)
            if len({one.rank for one in found}) < asked.ranks:
                raise UgroError(f"job {job.id} has ended with {len(found)} of {asked.ranks} traces")
            return found
        output.progress(f"waiting for {asked.steps} steps of job {asked.job}: {len(found)} of {asked.ranks} traces")
        time.sleep(_LOOK_S)


def _show(output: Output, job: Job, found: Sequence[TraceFile]) -> None:
    if output.is_json:
        output.document({"job": {**job_document(job), "traces": found}})
        return
    rows = [
        [
            Cell(str(one.rank), is_number=True),
            Cell(one.node),
            Cell(str(one.step), is_number=True),
            Cell(format_size(one.bytes) if output.is_terminal else str(one.bytes), is_number=True),
            Cell(one.problem or one.path),
        ]
        for one in found
    ]
    output.table(("RANK", "NODE", "STEP", "SIZE" if output.is_terminal else "BYTES", "FILE"), rows)
    output.note(f"open them in {_VIEWER}")


# --- profile ----------------------------------------------------------------------------------------------------------


_PROFILE_LOOK_S = 1.0
_LEAST_BAR, _WIDEST_BAR = 10, 60
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Each part of a step has a letter of its own: bars are read without colour, too.
_PARTS: tuple[tuple[str, str, Style], ...] = (
    ("data", "d", "warn"),
    ("forward", "f", "good"),
    ("backward", "b", "good"),
    ("optimizer", "o", "id"),
    ("other", "x", "warn"),
    ("communication", "c", "id"),
    ("waiting", ".", "bad"),
)
_COLUMNS = ("RANK", "NODE", "SAMPLES", "OWN", "WAITS")
_POWER = ("W", "S/J")  # where it is measured


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.option("--watch", "-w", is_flag=True, help="Refresh until the job ends, or Ctrl-C.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Use this attempt; default: the newest.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), metavar="N", help="Use the newest N steps; default: 50.")
@click.option("--trace", type=click.IntRange(1, MOST_TRACED), metavar="N", help="Record N steps of each rank.")
@json_option
@pass_session
def profile(session: Session, /, job: str, attempt: int | None, steps: int | None, **flags: int | bool | None) -> int:
    """Show where a training's time goes.

    For each rank: how long it loads data, computes, communicates and waits for others; then what slows the training
    down, and what to do about it. Works for scripts that use ugro.train (see docs/profiling.md). With --trace, torch's
    profiler records the next steps of every rank; open the traces in Perfetto.

    \b
    Examples:
      ugro profile train --watch
      ugro profile 12 --trace 5
    """
    client, output = session.client(), session.output
    if flags["trace"]:
        if flags["watch"] or attempt or steps:
            raise UsageError("--trace takes no other option", hint=f"ugro profile {job} --trace {flags['trace']}")
        return trace_steps(output, client, job, int(flags["trace"]))
    if flags["watch"]:
        return _watch(output, client, (job, attempt, steps))
    found = client.ask(GetJobProfile(job, attempt, steps))
    _profile_show(output, found.job, found.profile)
    return 0


def _watch(output: Output, client: Client, which: tuple[str, int | None, int | None]) -> int:
    """From the first step to the last; waits for a job that has reported no steps yet."""
    try:
        job = client.jobs.get(which[0])
        shown: JobProfile | None = None
        is_over = False
        while not is_over:
            began = time.monotonic()
            is_over = _is_over(client, job)  # asked first, so that the last steps are shown
            job, measured = _newest(output, client, (job, *which[1:]), is_over=is_over)
            if measured is not None and measured != shown:
                shown = measured
                _draw(output, job, measured)
            if not is_over:
                # At least as long as the request took: with many ranks it is expensive.
                time.sleep(max(_PROFILE_LOOK_S, time.monotonic() - began))
    except KeyboardInterrupt:
        if output.is_terminal:
            output.text("")  # the next line begins below the ^C
    return 0


def _is_over(client: Client, job: Job) -> bool:
    if not job.is_final:
        return False
    return client.ask(GetJobResults(str(job.id))).results.state not in (ResultState.WAITING, ResultState.COMING)


def _newest(
    output: Output, client: Client, which: tuple[Job, int | None, int | None], *, is_over: bool
) -> tuple[Job, JobProfile | None]:
    job, attempt, steps = which
    try:
        found = client.ask(GetJobProfile(str(job.id), attempt, steps))
    except NotFound as error:
        if is_over:
            raise
        job = client.jobs.get(job.id)
        output.progress(f"{error}; it is {job.state}")
        return job, None
    return found.job, found.profile


def _draw(output: Output, job: Job, measured: JobProfile) -> None:
    if output.is_json or not output.can_redraw:
        _profile_show(output, job, measured)
    else:
        output.redraw(list(_lines(output, job, measured)), f"step {measured.last_step}   Ctrl-C quits")


def _profile_show(output: Output, job: Job, measured: JobProfile) -> None:
    if output.is_json:
        output.document({"job": {**job_document(job), "profile": measured}})
    elif output.is_terminal:
        for line in _lines(output, job, measured):
            output.raw(f"{line}\n".encode())
    else:
        output.table(_header(), [_whole_row(measured, rank) for rank in measured.ranks])
        for one in measured.findings:
            output.note(one.words + (f": {one.remedy}" if one.remedy else ""))


# --- for people -------------------------------------------------------------------------------------------------


def _lines(output: Output, job: Job, measured: JobProfile) -> Iterator[str]:
    yield output.styled(f"job {job.id} {clean(job.spec.name)}", "bold") + f"  {_about(measured)}"
    has_power = any(rank.watts is not None for rank in measured.ranks)
    rows = [[*_row(rank, measured), *(_power(rank) if has_power else ()), Cell("")] for rank in measured.ranks]
    part = "SAMPLES" if measured.pipeline is None else "LAYERS"
    columns = (*_COLUMNS[:2], part, *_COLUMNS[3:], *(_POWER if has_power else ()), "")
    header, *lines = output.table_lines(columns, rows, spare=(part,))
    room = output.width - max(len(_COLOUR.sub("", line)) for line in lines) - 4
    width = min(_WIDEST_BAR, max(_LEAST_BAR, room))
    yield header
    for line, rank in zip(lines, measured.ranks, strict=True):
        yield f"{line}  |{_bar(output, rank, measured.step_s, width)}|"
    yield "  ".join(f"{output.styled(letter, style)} {name}" for name, letter, style in _PARTS)
    yield ""
    lost = f"{format_duration(measured.lost_s)} of device time ({100 * measured.lost_share:.0f} %)"
    yield f"imbalance {measured.imbalance:.2f} · lost by waiting {lost} · computing {100 * measured.use:.0f} %"
    if measured.samples_per_joule is not None:
        yield f"{measured.samples_per_joule:.3g} samples per joule, {measured.watts:.0f} W"
    for one in measured.findings:
        style: Style = "good" if one.kind is FindingKind.BALANCED else "warn"
        yield from (output.styled(line, style) for line in textwrap.wrap(clean(one.words), output.width))
        if one.remedy:
            yield from textwrap.wrap(f"  → {clean(one.remedy)}", output.width, subsequent_indent="    ")


def _about(measured: JobProfile) -> str:
    rate = f"{speed(measured.samples_per_s)} samples/s, {format_duration(measured.step_s)} a step"
    passed = f", {measured.passed_over} skipped" if measured.passed_over else ""
    loss = "" if measured.loss is None else f", mean loss {measured.loss:.4g}"
    return f"steps {measured.first_step} to {measured.last_step}{passed}: {rate}{loss}"


def _row(rank: RankProfile, measured: JobProfile) -> list[Cell]:
    waits = rank.waiting_s / measured.step_s if measured.step_s else 0.0
    return [
        Cell(str(rank.rank), is_number=True),
        Cell(rank.node, "bold"),
        Cell(_share(rank, measured), is_number=True),
        Cell(format_duration(rank.own_s), is_number=True),
        Cell(f"{100 * waits:.0f} %", is_number=True),
    ]


def _share(rank: RankProfile, measured: JobProfile) -> str:
    pipeline = measured.pipeline
    if pipeline is None:
        return f"{rank.samples:.4g}"
    return str(pipeline.layers_of(rank.rank))


def _power(rank: RankProfile) -> list[Cell]:
    watts = "" if rank.watts is None else f"{rank.watts:.0f}"
    return [Cell(watts, is_number=True), Cell(_number(rank.samples_per_joule), is_number=True)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _bar(output: Output, rank: RankProfile, step_s: float, width: int) -> str:
    """The parts in proportion; rounding errors do not add up."""
    drawn, done, until = "", 0, 0.0
    for name, letter, style in _PARTS:
        until += getattr(rank, f"{name}_s")
        length = max(0, min(width, round(width * until / step_s)) - done) if step_s else 0
        drawn += output.styled(letter * length, style) if length else ""
        done += length
    return drawn + " " * (width - done)


# --- for programs -----------------------------------------------------------------------------------------------


def _header() -> tuple[str, ...]:
    parts = (f"{name}_s" for name, _, _ in _PARTS)
    of_all = ("step_s", "imbalance", "samples_per_s", "first_step", "last_step", "watts", "samples_per_joule")
    return ("rank", "node", "samples", "own_s", *parts, *of_all)


def _whole_row(measured: JobProfile, rank: RankProfile) -> list[Cell]:
    parts = [getattr(rank, f"{name}_s") for name, _, _ in _PARTS]
    numbers = [rank.samples, rank.own_s, *parts, measured.step_s, measured.imbalance, measured.samples_per_s]
    values = [str(rank.rank), rank.node, *(f"{number:.6g}" for number in numbers)]
    power = ("" if one is None else f"{one:.6g}" for one in (rank.watts, rank.samples_per_joule))
    return [Cell(text) for text in (*values, str(measured.first_step), str(measured.last_step), *power)]
