"""Whether the world knows more than the state, and what becomes of the jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.safe_mode.model import Mark
from ugro.features.safe_mode.rules import (
    Cancel,
    Change,
    End,
    Entry,
    Found,
    Ids,
    JobView,
    Lost,
    Recall,
    Settle,
    Take,
    Wait,
    adopt,
    described,
    forget,
    is_beyond,
    older_than_journal,
    older_than_mark,
)
from ugro.kernel.jobs.engine.rules.reported_run import Belief, Recorded, Reported, judge_run, judge_ticket
from ugro.kernel.jobs.model import Ending, Job, JobSpec, JobState, Placement, Share

OWN = Job(7, JobSpec("train", ("true",)), "ann", JobState.QUEUED, "submitted", "2026-01-01T00:00:00+00:00")
RUNNING = replace(OWN, state=JobState.RUNNING, attempt=1, placement=Placement((Share("n1"),)))
SECOND = replace(RUNNING, state=JobState.STARTING, attempt=2, placement=Placement((Share("n2"),)))
IDS = Ids(100, ((50, 60),))


@pytest.mark.parametrize(
    ("job", "attempt", "known", "expected"),
    [
        (101, 1, None, True),  # never given
        (100, 1, None, False),  # given, and removed since
        (55, 1, None, True),  # skipped when an older state was put back
        (61, 1, None, False),
        (7, 2, 1, True),
        (7, 1, 1, False),
        (7, 1, 2, False),
    ],
)
def test_a_run_is_beyond_the_state_if_that_gave_neither_its_job_nor_its_attempt(
    job: int, attempt: int, known: int | None, expected: bool
) -> None:
    assert is_beyond(job, attempt, known, IDS) is expected
    belief = judge_ticket(job, attempt, known, IDS).belief
    assert belief is (Belief.NEWER if expected else Belief.LEFTOVER)


def test_a_job_in_a_gap_is_not_one_that_was_removed() -> None:
    run = Reported("n1", None, 55, 1)
    assert judge_run(run, Recorded(100, False, None)).belief is Belief.LEFTOVER
    assert judge_run(run, Recorded(100, False, None, is_in_gap=True)).belief is Belief.STRANGE


def test_a_mark_shows_an_older_state_by_its_generation_or_its_ids_and_by_nothing_else() -> None:
    own = Mark("agent", 5, 1000)
    assert older_than_mark(own, Mark("agent", 5, 1000), "n1") == []
    assert older_than_mark(own, Mark("agent", 1, 10), "n1") == []
    assert "has met generation 6" in older_than_mark(own, Mark("agent", 6, 1000), "n1")[0]
    assert "ids up to 1500" in older_than_mark(own, Mark("agent", 5, 1500), "n1")[0]


@pytest.mark.parametrize(
    ("own", "entry", "expected"),
    [
        (OWN, Entry(0, JobState.QUEUED), False),
        (OWN, Entry(1, JobState.STARTING), True),
        (OWN, Entry(0, JobState.CANCELLED), True),
        (OWN, Entry(0, JobState.QUEUED, Ending.CANCELLED), True),
        (RUNNING, Entry(1, JobState.STARTING), False),
        (RUNNING, Entry(1, JobState.UNREACHABLE), False),
        (RUNNING, Entry(1, JobState.RECOVERING), True),
        (RUNNING, Entry(1, JobState.SUCCEEDED), True),
        (RUNNING, Entry(0, JobState.QUEUED), False),
        (replace(RUNNING, state=JobState.RECOVERING), Entry(1, JobState.RECOVERING), False),
    ],
)
def test_the_journal_shows_an_older_state_where_a_job_came_further(own: Job, entry: Entry, expected: bool) -> None:
    assert older_than_journal(own, entry) is expected


def adopted(*views: JobView, not_asked: tuple[str, ...] = ()) -> list[Change]:
    return adopt(views, not_asked)


def test_what_runs_is_taken_with_its_attempt_and_a_cancel_that_was_asked_for_holds() -> None:
    found = Found("n2", SECOND, "running")
    assert adopted(JobView(7, RUNNING, None, (found,))) == [Take(SECOND, None, ("n2",))]
    assert adopted(JobView(7, None, Entry(2, JobState.RUNNING), (found,))) == [Take(SECOND, None, ("n2",))]
    asked = Entry(2, JobState.STOPPING, Ending.CANCELLED)
    assert adopted(JobView(7, OWN, asked, (found,))) == [Take(SECOND, Ending.CANCELLED, ("n2",))]
    over = Entry(2, JobState.CANCELLED)
    assert adopted(JobView(7, OWN, over, (found,))) == [Take(SECOND, Ending.CANCELLED, ("n2",))]


def test_of_two_attempts_on_nodes_the_newer_one_is_taken() -> None:
    runs = (Found("n1", RUNNING, "exited"), Found("n2", SECOND, "running"))
    assert adopted(JobView(7, OWN, None, runs)) == [Take(SECOND, None, ("n2",))]


def test_a_job_that_ended_meanwhile_is_recorded_and_not_run_again() -> None:
    [change] = adopted(JobView(7, OWN, Entry(1, JobState.SUCCEEDED)))
    assert change == Settle(7, 1, JobState.SUCCEEDED, "it ended after this state was saved")
    [change] = adopted(JobView(7, OWN, None, (), started=1))
    assert isinstance(change, Settle)
    assert (change.attempt, change.state) == (1, JobState.FAILED)
    [change] = adopted(JobView(7, RUNNING))
    assert isinstance(change, Settle)
    assert change.state is JobState.FAILED


def test_a_job_of_which_nothing_runs_gets_an_attempt_with_a_new_number() -> None:
    assert adopted(JobView(7, OWN, Entry(1, JobState.STARTING))) == [Wait(7, 1)]
    assert adopted(JobView(7, RUNNING, Entry(1, JobState.RECOVERING))) == [Wait(7, 1)]
    assert adopted(JobView(7, OWN, Entry(0, JobState.QUEUED, Ending.CANCELLED))) == [Cancel(7)]


def test_a_job_that_may_run_on_a_node_that_was_not_asked_is_not_started_again() -> None:
    [change] = adopted(JobView(7, OWN, Entry(1, JobState.RUNNING)), not_asked=("n9",))
    assert isinstance(change, Settle)
    assert change.state is JobState.FAILED
    assert adopted(JobView(7, OWN, Entry(1, JobState.RECOVERING)), not_asked=("n9",)) == [Wait(7, 1)]


def test_a_run_of_an_older_attempt_tells_what_the_job_is_and_is_not_taken_for_the_newest() -> None:
    left = Found("n1", RUNNING, "exited")
    [change] = adopted(JobView(7, None, Entry(2, JobState.SUCCEEDED), (left,)))
    ended = Settle(7, 2, JobState.SUCCEEDED, "it ended after this state was saved")
    assert change == Recall(RUNNING, ("n1",), ended)
    assert adopted(JobView(7, None, Entry(2, JobState.RECOVERING), (left,))) == [Recall(RUNNING, ("n1",), Wait(7, 2))]
    [change] = adopted(JobView(7, None, None, (left,), started=2))
    assert isinstance(change, Recall)
    assert isinstance(change.then, Settle)
    assert (change.then.attempt, change.then.state) == (2, JobState.FAILED)
    [words] = described([Recall(RUNNING, ("n1",), Wait(7, 2))])
    assert words.text == "found again by attempt 1 on n1; waits for attempt 3; nothing of it runs"


def test_a_job_that_had_ended_before_stays_as_it_is() -> None:
    over = replace(RUNNING, state=JobState.FAILED)
    assert adopted(JobView(7, over, None, (Found("n2", SECOND, "running"),))) == []


def test_what_is_forgotten_is_ended_and_its_job_waits_with_a_number_that_was_never_used() -> None:
    found = Found("n2", SECOND, "running")
    assert forget([JobView(7, RUNNING, None, (found,))]) == [End(7, (("n2", 2),)), Wait(7, 2)]
    assert forget([JobView(9, None, None, (found,))]) == [End(9, (("n2", 2),))]
    assert forget([JobView(9, None, Entry(0, JobState.QUEUED))]) == [Lost(9, JobState.QUEUED)]


def test_the_end_of_an_attempt_that_the_state_knows_is_not_forgotten() -> None:
    [change] = forget([JobView(7, RUNNING, Entry(1, JobState.CANCELLED))])
    assert change == Settle(7, 1, JobState.CANCELLED, "it ended after this state was saved")
    asked = Entry(1, JobState.STOPPING, Ending.CANCELLED)
    assert forget([JobView(7, RUNNING, asked)]) == [Cancel(7)]
    assert forget([JobView(7, RUNNING)]) == [Wait(7, 1)]  # without a journal: no node has a trace of it
    assert forget([JobView(7, OWN, Entry(0, JobState.CANCELLED))]) == []  # in the queue again


def test_jobs_of_which_only_the_id_is_left_are_told_together() -> None:
    [text] = described([Lost(9, JobState.QUEUED), Lost(10, JobState.QUEUED), Lost(11, JobState.QUEUED)])
    assert text.text.startswith("jobs 9–11 had been submitted and had not started")
    cancelled, begun = described([Lost(9, JobState.CANCELLED), Lost(10, JobState.RUNNING)])
    assert cancelled.text.startswith("job 9 had been cancelled")
    assert begun.text.startswith("job 10 had started")
