"""Attached to a job: shows what it waits for, the output of rank 0, and how it ended. Ctrl-C detaches."""

from __future__ import annotations

from ugro.cli.jobs.describe import exit_code, failure_lines, next_commands, sentence
from ugro.cli.jobs.document import show_results
from ugro.cli.jobs.logs import dropped
from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.client.job_logs import LogPiece
from ugro.kernel.agent.model import PUT_BACK
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.operations import GetJob

_SHOWN_RANK = 0
_WAITING = (JobState.QUEUED, JobState.STARTING)
_BEFORE_IT_RUNS = (*_WAITING, JobState.RECOVERING)


def attach(output: Output, client: Client, job: Job) -> int:
    """The job's exit code, or 130 if we detached."""
    output.note(f"job {job.id} {job.spec.name}")
    try:
        ended = _follow(output, client, job)
    except KeyboardInterrupt:
        output.note(f"detached: job {job.id} keeps running; see: ugro logs {job.id} -f · stop it: ugro cancel {job.id}")
        return 130
    if ended.state is not JobState.SUCCEEDED:
        _show_failure(output, client, ended)
    show_results(output, client, ended)
    return exit_code(ended)


def _follow(output: Output, client: Client, job: Job) -> Job:
    for seen in client.jobs.follow(job.id, ranks=[_SHOWN_RANK]):
        if isinstance(seen, LogPiece):
            if seen.dropped_bytes:
                output.warn(dropped(seen))
            output.raw(seen.content)
        else:
            _show_state(output, client, job, seen)
            job = seen
    return job


def _show_state(output: Output, client: Client, before: Job, job: Job) -> None:
    if job.attempt > before.attempt and job.attempt > 1:
        outcome = client.ask(GetJob(str(job.id))).attempts[job.attempt - 2].outcome
        output.note(f"job {job.id} is in attempt {job.attempt}: {outcome}")
    if job.state in _WAITING:
        output.progress(f"job {job.id} {'waits' if job.state is JobState.QUEUED else 'starts'}: {job.reason}")
        return
    output.end_progress()
    if job.state is not JobState.RECOVERING and (before.attempt < job.attempt or before.state in _BEFORE_IT_RUNS):
        _show_files_put_back(output, client, job)
    if job.state is JobState.RECOVERING:
        output.progress(sentence(job))
    elif job.state is JobState.UNREACHABLE:
        output.note(sentence(job))


def _show_files_put_back(output: Output, client: Client, job: Job) -> None:
    if job.attempt > 1 or job.spec.earlier is not None:
        for event in client.jobs.events(job=str(job.id)):
            if event.kind == PUT_BACK and event.attempt == job.attempt:
                output.note(event.text)


def _show_failure(output: Output, client: Client, job: Job) -> None:
    """With its last lines of output, unless they are on the screen already."""
    output.note(sentence(job))
    attempts = client.ask(GetJob(str(job.id))).attempts
    failure = attempts[-1].failure if attempts else None
    if failure is not None:
        lines = list(failure_lines(failure, with_lines=failure.rank != _SHOWN_RANK))
        for line in lines[int(failure.reason in job.reason) :]:
            output.note(line)
    output.note(f"next: {next_commands(job, failure)}")
