"""What became of a job's files, in a line or two: when an attached job ends, in ``ugro why`` and ``ugro status``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.core.errors import UgroError
from ugro.core.job import Job
from ugro.core.results import JobResults, ResultState
from ugro.core.support.quantity import format_size

_LOOK_S = 0.1
_WAIT_S = 10.0  # for files that are on their way; then the command ends without them


def show_results(output: Output, client: Client, job: Job) -> None:
    """Waits a little for what is on its way. A problem here is not the job's."""
    if output.is_quiet:
        return
    try:
        made = client.jobs.brief_results(job.id)
        until = time.monotonic() + _WAIT_S
        while made.state is ResultState.COMING and time.monotonic() < until:
            left = sum(node.missing_bytes for node in made.nodes)
            output.progress(f"collecting the files of job {job.id}: {format_size(left)} left")
            time.sleep(_LOOK_S)
            made = client.jobs.brief_results(job.id)
    except (UgroError, KeyboardInterrupt):
        return
    finally:
        output.end_progress()
    for line in result_lines(job, made):
        output.note(line)


def result_lines(job: Job, made: JobResults) -> Iterator[str]:
    yield from (f"{name}: {text}" for name, text in result_facts(job, made))


def result_facts(job: Job, made: JobResults) -> Iterator[tuple[str, str]]:
    if made.state in (ResultState.COMING, ResultState.UNKNOWN, ResultState.WAITING):
        problem = next((f" ({node.node}: {node.problem})" for node in made.nodes if node.problem), "")
        yield "files", f"not all of them are here yet{problem}; see: ugro results {job.id}"
    elif made.files:
        yield "files", f"{amount(made.files, made.bytes)} in {_short(made.folder)}"
    if made.left_count:
        yield "left", f"{amount(made.left_count, made.left_bytes)} on {_nodes(made)}; {fetch_hint(job)}"
    for attempt in made.left_before:
        yield "left", f"attempt {attempt} left files, too: ugro results {job.id} --attempt {attempt}"


def fetch_hint(job: Job) -> str:
    return f"fetch them: ugro results {job.id} --fetch"


def amount(files: int, size: int) -> str:
    return f"{files:,} {'file' if files == 1 else 'files'}, {format_size(size)}"


def _nodes(made: JobResults) -> str:
    names = [node.node for node in made.nodes if node.left_count]
    return names[0] if len(names) == 1 else f"{len(names)} nodes"


def _short(folder: str) -> str:
    home = str(Path.home())
    return f"~{folder.removeprefix(home)}" if folder.startswith(home + "/") else folder
