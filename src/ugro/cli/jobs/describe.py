"""Jobs as text: their signs, times and placement, and why one failed. It prints nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from datetime import datetime

from ugro.cli.output import Style
from ugro.kernel.jobs.model import Attempt, Failure, Job, JobState, Launcher
from ugro.kernel.support import moments as clock
from ugro.kernel.support.moments import Instant, elapsed_s
from ugro.kernel.support.quantities import format_duration
from ugro.kernel.support.secrets import HIDDEN, looks_secret, shown

SIGNS: dict[JobState, tuple[str, Style]] = {
    JobState.QUEUED: ("…", "dim"),
    JobState.STARTING: ("▷", "id"),
    JobState.RUNNING: ("▶", "id"),
    JobState.UNREACHABLE: ("?", "warn"),
    JobState.STOPPING: ("■", "warn"),
    JobState.RECOVERING: ("↻", "warn"),
    JobState.SUCCEEDED: ("✓", "good"),
    JobState.FAILED: ("✗", "bad"),
    JobState.CANCELLED: ("-", "dim"),
}
_LONGEST_VALUE = 2000


def sentence(job: Job) -> str:
    return f"job {job.id} {job.spec.name} {'is ' if not job.is_final else ''}{job.state}: {job.reason}"


def exit_code(job: Job) -> int:
    """Of a job that has ended; a job that did not succeed is never 0."""
    return job.exit_code or int(job.state is not JobState.SUCCEEDED)


def ranks(job: Job) -> int:
    """How many ranks have a log."""
    if job.placement is None or job.spec.launcher is Launcher.COMMAND:
        return 1
    if job.spec.launcher in (Launcher.TORCHRUN, Launcher.RAY):
        return len(job.placement.shares)
    return sum(max(1, len(share.gpus)) for share in job.placement.shares)


def gpus(job: Job) -> int:
    return sum(len(share.gpus) for share in job.placement.shares) if job.placement else 0


def duration_s(job: Job, now: Instant | None = None) -> float:
    return job.lasts_s(now or clock.now())


def attempt_duration(attempt: Attempt) -> str:
    return format_duration(attempt.lasts_s(clock.now()))


def local_time(text: str) -> str:
    """In the local time zone."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago(when: Instant, now: Instant) -> str:
    """How long ago, if that is less than a day; else the day and the time in the local time zone."""
    seconds = elapsed_s(when, now)
    at = datetime.fromisoformat(when.at)
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h ago"
    return at.astimezone().strftime("%b %d %H:%M" if seconds < 300 * 86400 else "%Y-%m-%d")


def news(job: Job) -> str:
    """Its reason, unless that goes without saying: that it succeeded, or that all of it runs."""
    if job.state is JobState.RUNNING or (job.state is JobState.SUCCEEDED and job.cached_from is None):
        return ""
    return job.reason


def command(argv: Iterable[str]) -> str:
    return shlex.join(argv)


def variables(env: Iterable[tuple[str, str]]) -> list[str]:
    """Quoted for a shell; what looks like a secret is not shown."""
    return [f"{name}={HIDDEN if looks_secret(name) else shlex.quote(_cut(shown(name, value)))}" for name, value in env]


def _cut(value: str) -> str:
    """A program may travel in a variable; nobody reads that."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[:40]}… ({len(value)} characters)"


def failure_lines(failure: Failure, *, with_lines: bool = True) -> Iterator[str]:
    """What failed, what to do about it, and its last lines of output."""
    yield failure.reason
    if failure.hint:
        yield f"hint: {failure.hint}"
    if with_lines and failure.last_lines:
        whose = f"rank {failure.rank}" if failure.rank is not None else "it"
        yield f"the last lines of {whose}:"
        yield from (f"  | {line}" for line in failure.last_lines)


def next_commands(job: Job, failure: Failure | None = None) -> str:
    if job.state is JobState.QUEUED:
        return f"ugro why {job.id} · ugro cancel {job.id}"
    if not job.is_final:
        return f"ugro logs {job.id} -f · ugro wait {job.id} · ugro cancel {job.id}"
    rank = f" --rank {failure.rank}" if failure and failure.rank is not None and ranks(job) > 1 else ""
    again = "" if job.state is JobState.SUCCEEDED else f" · ugro retry {job.id}"
    if job.started_at is None:  # there is no log
        return f"ugro events {job.id}{again}"
    return f"ugro logs {job.id}{rank} · ugro events {job.id}{again}"
