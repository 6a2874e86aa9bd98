"""The section `retention` of the cluster file."""

from __future__ import annotations

from ugro.kernel.config.kinds import DAY_S, Duration, OrNull, Whole
from ugro.kernel.config.section import Section, key, section

_TEN_YEARS_S = 3650 * DAY_S


@section
class RetentionSection(Section):
    """When ended jobs are removed, announced in `ugro events` first. Jobs with a note, a tag or a dependent stay."""

    jobs: float | None = key(
        90 * DAY_S,
        OrNull(Duration(_TEN_YEARS_S)),
        "Remove a job this long after it ended: its record, events, logs and metrics; null removes no jobs. A job that "
        "left results stays until those are removed.",
    )
    keep: int = key(10_000, Whole(0, 10_000_000), "How many of the newest ended jobs stay, however old they are.")
    results: float | None = key(
        None,
        Duration(_TEN_YEARS_S),
        "Remove a job's outputs and checkpoints, here and on its nodes, this long after it ended; null keeps them.",
        example=180 * DAY_S,
    )
    kept: float | None = key(
        30 * DAY_S,
        OrNull(Duration(_TEN_YEARS_S)),
        "Remove files that a job left on its nodes, because they were not to be collected, this long after it ended; "
        "null keeps them as long as its results.",
    )
    audit: float | None = key(
        365 * DAY_S,
        OrNull(Duration(_TEN_YEARS_S)),
        "Remove entries of `ugro audit` after this time; null keeps the newest 100,000, which is the most in any case.",
    )
    notice: float = key(
        DAY_S, Duration(_TEN_YEARS_S, may_be_zero=True), "How long before a removal it is announced."
    )
