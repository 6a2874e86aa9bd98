"""Attached to a job: what it waits for, then the output of rank 0, then how it ended. Ctrl-C only detaches."""

from __future__ import annotations

from ugro.cli.jobs.lines import dropped
from ugro.cli.jobs.text import exit_code, next_commands, sentence, story
from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.client.jobs import LogPiece
from ugro.core.job import Job, JobState

_SHOWN_RANK = 0


def attend(output: Output, client: Client, job: Job) -> int:
    """The job's exit code, or 130 when it goes on without us."""
    output.note(f"job {job.id} {job.spec.name}")
    try:
        ended = _follow(output, client, job)
    except KeyboardInterrupt:
        output.note(f"detached: job {job.id} goes on; see: ugro logs {job.id} -f · end it: ugro cancel {job.id}")
        return 130
    if ended.state is not JobState.SUCCEEDED:
        _tell(output, client, ended)
    return exit_code(ended)


def _follow(output: Output, client: Client, job: Job) -> Job:
    for seen in client.jobs.attend(job.id, ranks=[_SHOWN_RANK]):
        if isinstance(seen, LogPiece):
            if seen.dropped_bytes:
                output.warn(dropped(seen))
            output.raw(seen.content)
        else:
            _say(output, client, job, seen)
            job = seen
    return job


def _say(output: Output, client: Client, before: Job, job: Job) -> None:
    if job.attempt > before.attempt and job.attempt > 1:
        outcome = client.jobs.details(job.id).attempts[job.attempt - 2].outcome
        output.note(f"job {job.id} is in attempt {job.attempt}: {outcome}")
    if job.state in (JobState.QUEUED, JobState.STARTING):
        output.progress(f"job {job.id} {'waits' if job.state is JobState.QUEUED else 'starts'}: {job.reason}")
        return
    output.end_progress()
    if job.state is JobState.RECOVERING:
        output.progress(sentence(job))
    elif job.state is JobState.UNREACHABLE:
        output.note(sentence(job))


def _tell(output: Output, client: Client, job: Job) -> None:
    """Its last lines too, where they were not on the screen already."""
    output.note(sentence(job))
    attempts = client.jobs.details(job.id).attempts
    failure = attempts[-1].failure if attempts else None
    if failure is not None:
        for line in list(story(failure, with_lines=failure.rank != _SHOWN_RANK))[int(failure.reason in job.reason) :]:
            output.note(line)
    output.note(f"look further: {next_commands(job, failure)}")
