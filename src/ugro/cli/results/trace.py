"""``ugro profile JOB --trace N``: requests torch traces of some steps, waits for them, and lists their files."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell, Output
from ugro.client.client import Client
from ugro.core.errors import UgroError
from ugro.core.job import Job
from ugro.core.profile import TraceFile, TraceRequest
from ugro.core.results import ResultState
from ugro.core.support.quantity import format_size

_LOOK_S = 0.3
_VIEWER = "https://ui.perfetto.dev"
_COMING = (ResultState.WAITING, ResultState.LIVE, ResultState.COMING)


def trace_steps(output: Output, client: Client, word: str, steps: int) -> int:
    job, before = client.jobs.traces(word)
    asked = client.jobs.trace(job.id, steps)
    try:
        found = _arrived(output, client, asked, {one.path for one in before})
    except KeyboardInterrupt:
        output.note(f"the traces will still be collected: ugro results {job.id}")
        raise
    _show(output, client.jobs.get(job.id), found)
    return int(any(one.problem for one in found))


def _arrived(output: Output, client: Client, asked: TraceRequest, known: set[str]) -> tuple[TraceFile, ...]:
    while True:
        job, traces = client.jobs.traces(asked.job, attempt=asked.attempt)
        found = tuple(one for one in traces if one.path not in known)
        if len({one.rank for one in found}) >= asked.ranks:
            return found
        if job.is_final and client.jobs.results(asked.job, attempt=asked.attempt)[1].state not in _COMING:
            job, traces = client.jobs.traces(asked.job, attempt=asked.attempt)
            found = tuple(one for one in traces if one.path not in known)
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
