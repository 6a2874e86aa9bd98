from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.retention.rules import EndedJob, Keep, Remove, Rule, What, decide, least_age_s
from ugro.kernel.jobs.model import FINAL_STATES, JobState

DAY_S = 86400.0
RULE = Rule(jobs_s=90 * DAY_S, keep=10, results_s=None)
OLD = EndedJob(1, JobState.SUCCEEDED, ended_s=0.0)
NOW_S = 91 * DAY_S


def reason(job: EndedJob, rule: Rule = RULE, now_s: float = NOW_S) -> str:
    decision = decide(job, rule, now_s)
    assert isinstance(decision, Keep), decision
    return decision.reason


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_job_that_ended_long_ago_is_removed(state: JobState) -> None:
    decision = decide(replace(OLD, state=state), RULE, NOW_S)
    assert decision == Remove(What.JOB, "ended more than 90d ago (retention.jobs)")


@pytest.mark.parametrize("state", sorted(frozenset(JobState) - FINAL_STATES))
def test_a_job_that_has_not_ended_is_never_removed(state: JobState) -> None:
    loose = Rule(jobs_s=0.0, keep=0, results_s=0.0)
    assert reason(replace(OLD, state=state), loose, 1e12) == f"it is {state}"
    assert reason(replace(OLD, state=state, has_results=True), loose, 1e12) == f"it is {state}"


def test_a_job_stays_until_its_time_is_over() -> None:
    assert reason(OLD, now_s=90 * DAY_S) == "it ended less than 90d ago"
    assert isinstance(decide(OLD, RULE, 90 * DAY_S + 1), Remove)


def test_the_newest_jobs_stay_however_old_they_are() -> None:
    assert reason(replace(OLD, is_newest=True), now_s=1e12) == "it is among the newest 10"


@pytest.mark.parametrize("has_results", [False, True])
@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("has_note", "it has a note or a tag"),
        ("is_followed", "a job that has not ended runs after it"),
        ("is_source", "another job points to its results"),
        ("is_pending", "a checkpoint of it is still being collected"),
    ],
)
def test_a_job_that_somebody_needs_stays_whole(fact: str, words: str, has_results: bool) -> None:
    needed = replace(OLD, has_results=has_results, **{fact: True})  # type: ignore[arg-type]
    assert reason(needed, Rule(1.0, 0, 1.0), 1e12) == words


def test_results_stay_unless_their_own_rule_is_set_and_the_job_stays_with_them() -> None:
    made = replace(OLD, has_results=True)
    assert reason(made, now_s=1e12) == "retention.results is not set"
    rule = replace(RULE, results_s=30 * DAY_S)
    assert reason(made, rule, 30 * DAY_S) == "it ended less than 30d ago"
    assert decide(made, rule, 31 * DAY_S) == Remove(What.RESULTS, "ended more than 30d ago (retention.results)")
    assert decide(made, rule, 1e12) == Remove(What.RESULTS, "ended more than 30d ago (retention.results)")


def test_results_of_the_newest_jobs_go_by_age_too() -> None:
    newest = replace(OLD, has_results=True, is_newest=True)
    assert isinstance(decide(newest, Rule(None, 10, 1.0), NOW_S), Remove)


def test_without_a_rule_nothing_is_removed() -> None:
    never = Rule(None, 0, None)
    assert reason(OLD, never, 1e12) == "retention.jobs is not set"
    assert least_age_s(never) is None
    assert least_age_s(Rule(90.0, 0, None)) == 90.0
    assert least_age_s(Rule(90.0, 0, 30.0)) == 30.0


def test_files_that_were_left_on_nodes_go_before_the_results() -> None:
    rule = Rule(jobs_s=None, keep=0, results_s=60 * DAY_S, kept_s=30 * DAY_S)
    made = replace(OLD, has_results=True, has_left=True)
    assert reason(made, rule, 30 * DAY_S) == "it ended less than 30d ago"
    assert decide(made, rule, 31 * DAY_S) == Remove(What.LEFT, "ended more than 30d ago (retention.kept)")
    assert isinstance(decide(replace(made, has_left=False), rule, 31 * DAY_S), Keep)
    assert decide(made, rule, 61 * DAY_S) == Remove(What.RESULTS, "ended more than 60d ago (retention.results)")
    assert reason(made, replace(rule, kept_s=None), 31 * DAY_S) == "retention.kept is not set"
    assert least_age_s(rule) == 30 * DAY_S
