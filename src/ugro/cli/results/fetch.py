"""``ugro results --fetch``: fetches files that were left on the nodes, and shows how far that is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.result_summary import amount
from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.core.errors import NotFound, UgroError
from ugro.core.job import Job
from ugro.core.results import JobResults, ResultState
from ugro.core.support.quantity import format_size

_LOOK_S = 0.2


def fetch(output: Output, client: Client, which: tuple[str, int | None], patterns: Sequence[str]) -> int:
    word, attempt = which
    job, before = client.jobs.results(word, attempt=attempt)
    if before.left_count:
        job, made = client.jobs.fetch_results(job.id, patterns, attempt=attempt)
        made = _fetched(output, client, job, attempt, made)
    else:
        made = before
    files, size = before.left_count - made.left_count, before.left_bytes - made.left_bytes
    if before.left_count and not files and patterns:
        raise NotFound(f"no file that was left on a node matches {' '.join(patterns)}", hint=f"ugro results {job.id}")
    if output.is_json:
        fetched = {"files": files, "bytes": size}
        output.document({"job": {**job_document(job), "results": made, "fetched": fetched}})
    elif not before.left_count:
        output.note(f"job {job.id} has left no files on its nodes")
    else:
        output.note(f"fetched {amount(files, size)} to {made.folder}")
    return 0


def _fetched(output: Output, client: Client, job: Job, attempt: int | None, made: JobResults) -> JobResults:
    """Waits. The files that have not come are still on their nodes if this fails or is interrupted."""
    while made.state is ResultState.COMING:
        left = sum(node.missing_bytes for node in made.nodes)
        output.progress(f"fetching what job {job.id} left: {format_size(left)} to go")
        time.sleep(_LOOK_S)
        made = client.jobs.results(job.id, attempt=attempt)[1]
    output.end_progress()
    problem = next((f"{node.node}: {node.problem}" for node in made.nodes if node.problem), None)
    if problem is not None:
        raise UgroError(problem, hint="nothing is lost; what has not come is still there: try again")
    return made
