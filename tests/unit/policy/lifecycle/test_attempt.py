"""What comes next for an attempt, by what its nodes say of it."""

from __future__ import annotations

import pytest

from ugro.kernel.jobs.engine.rules.attempt import AttemptView, Conclude, Move, NodeRun, RunState, Start, Stop, next_step
from ugro.kernel.jobs.model import Ending, JobState, Share
from ugro.kernel.links.model import Machine

RUNNING, DONE, FAILED, ABSENT = RunState.RUNNING, RunState.DONE, RunState.FAILED, RunState.ABSENT
DEAD, UNKNOWN = RunState.DEAD, RunState.UNKNOWN


def view(state: JobState, *runs: RunState | NodeRun, ending: Ending | None = None, **more: object) -> AttemptView:
    nodes = [run if isinstance(run, NodeRun) else NodeRun(f"n{number}", run) for number, run in enumerate(runs, 1)]
    return AttemptView(state, ending, tuple(nodes), **more)  # type: ignore[arg-type]


def away(state: RunState = RUNNING, node: str = "n1", *, is_gone: bool = False) -> NodeRun:
    return NodeRun(node, state, is_reachable=False, is_gone=is_gone)


def move(step: object) -> tuple[JobState, Ending | None]:
    assert isinstance(step, Move), step
    return step.state, step.ending


def test_nodes_that_know_nothing_of_a_starting_attempt_are_asked() -> None:
    assert next_step(view(JobState.STARTING, ABSENT, RUNNING, ABSENT)) == Start(("n1", "n3"))


def test_nothing_is_asked_of_a_node_that_has_not_spoken_yet() -> None:
    assert next_step(view(JobState.STARTING, UNKNOWN)) is None
    assert next_step(view(JobState.RUNNING, UNKNOWN)) is None


def test_an_attempt_runs_when_all_its_ranks_do() -> None:
    assert next_step(view(JobState.STARTING, RUNNING, RunState.STARTING)) is None
    assert move(next_step(view(JobState.STARTING, RUNNING, DONE)))[0] is JobState.RUNNING
    assert next_step(view(JobState.RUNNING, RUNNING, DONE)) is None


def test_an_attempt_that_does_not_start_everywhere_in_time_is_taken_back() -> None:
    step = next_step(view(JobState.STARTING, RUNNING, away(ABSENT, "n2"), is_overdue=True))
    assert move(step) == (JobState.STOPPING, Ending.FAILED)
    assert isinstance(step, Move)
    assert "n2" in step.reason


def test_a_refusal_ends_it_with_its_words() -> None:
    step = next_step(view(JobState.STARTING, ABSENT, refusal="torch differs"))
    assert step == Move(JobState.STOPPING, "torch differs", Ending.FAILED)


@pytest.mark.parametrize("bad", [FAILED, DEAD])
def test_one_bad_rank_ends_all(bad: RunState) -> None:
    assert move(next_step(view(JobState.RUNNING, RUNNING, bad))) == (JobState.STOPPING, Ending.FAILED)


def test_all_done_is_done_also_when_it_was_over_before_it_was_seen_running() -> None:
    for state in (JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE):
        assert move(next_step(view(state, DONE, DONE))) == (JobState.STOPPING, Ending.DONE)


def test_a_node_that_cannot_be_reached_has_not_failed() -> None:
    assert move(next_step(view(JobState.RUNNING, away())))[0] is JobState.UNREACHABLE
    assert next_step(view(JobState.UNREACHABLE, away())) is None
    assert move(next_step(view(JobState.UNREACHABLE, RUNNING)))[0] is JobState.RUNNING


def test_a_run_that_ended_while_its_node_was_away_counts_when_it_is_back() -> None:
    assert move(next_step(view(JobState.UNREACHABLE, FAILED))) == (JobState.STOPPING, Ending.FAILED)


def test_a_lost_node_ends_the_attempt_elsewhere_and_is_not_waited_for() -> None:
    lost = away(is_gone=True)
    assert move(next_step(view(JobState.UNREACHABLE, lost, RUNNING))) == (JobState.STOPPING, Ending.FAILED)
    assert next_step(view(JobState.STOPPING, lost, RUNNING)) == Stop(("n2",))
    assert next_step(view(JobState.STOPPING, lost, FAILED)) == Conclude()


def test_nothing_is_concluded_while_a_rank_may_live() -> None:
    assert next_step(view(JobState.STOPPING, away(), FAILED)) is None
    assert next_step(view(JobState.STOPPING, UNKNOWN)) == Stop(("n1",))
    assert next_step(view(JobState.STOPPING, DEAD, ABSENT)) == Stop(("n1", "n2"))


def test_a_wish_to_end_goes_before_everything_but_is_only_a_wish() -> None:
    for state in (JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE):
        assert move(next_step(view(state, RUNNING, ending=Ending.CANCELLED))) == (JobState.STOPPING, Ending.CANCELLED)
    assert move(next_step(view(JobState.RUNNING, RUNNING, is_over_time=True)))[1] is Ending.TIME_LIMIT


def test_a_running_node_that_forgot_its_run_has_lost_it() -> None:
    assert move(next_step(view(JobState.RUNNING, ABSENT))) == (JobState.STOPPING, Ending.FAILED)


@pytest.mark.parametrize(
    ("hostname", "boot_id", "root", "is_same"),
    [
        ("gpu1", "b1", "/data", True),
        ("gpu1", "b2", "/data", True),  # restarted
        ("new-name", "b1", "/data", True),  # renamed while it ran
        ("gpu2", "b2", "/data", False),  # another machine
        ("gpu1", "b1", "/other", False),
    ],
)
def test_a_share_knows_the_machine_and_the_folder_that_gave_it(
    hostname: str, boot_id: str, root: str, is_same: bool
) -> None:
    machine = Machine(hostname, "", "", "", boot_id, "", root, "", "", 8, "", 0)
    assert Share("n1", boot_id="b1", hostname="gpu1", root="/data").is_of(machine) is is_same
    assert Share("n1", boot_id="b1").is_of(machine), "of a time when that was not noted"
