"""Where an elastic attempt stands, from what nodes say of its ranks."""

from __future__ import annotations

from dataclasses import replace

from ugro.kernel.jobs.engine.rules.attempt import (
    AttemptView,
    ElasticView,
    Move,
    NodeRun,
    RankState,
    RankView,
    Rejoin,
    RunState,
    Stop,
    described,
    is_done,
    members,
    next_step,
    problem,
    rejoin,
)
from ugro.kernel.jobs.model import Ending, JobState

R, D, L, U = RankState.RUNNING, RankState.DONE, RankState.LOST, RankState.UNKNOWN
UNHEARD = RankState.UNHEARD


def view(*states: RankState, members: set[int] | None = None, min_ranks: int = 1, **of_lost: object) -> ElasticView:
    ranks = [RankView(number, f"gpu{number}", state) for number, state in enumerate(states)]
    more = {"why": "signal 9", "can_start": True, "lost_s": 10.0, **of_lost}
    ranks = [replace(one, **more) if one.state is L else one for one in ranks]  # type: ignore[arg-type]
    group = set(range(len(states))) if members is None else members
    return ElasticView(min_ranks, 3, tuple(ranks), frozenset(group))


def attempt(elastic: ElasticView, *runs: RunState, state: JobState = JobState.RUNNING) -> AttemptView:
    nodes = tuple(NodeRun(f"gpu{number}", run) for number, run in enumerate(runs))
    return AttemptView(state, None, nodes, elastic=elastic)


def test_an_attempt_with_a_lost_rank_goes_on() -> None:
    lost = view(R, R, L)
    assert problem(lost) is None
    assert described(lost) == "rank 2 on gpu2 was lost (signal 9); training goes on with 2 of 3 ranks"
    assert next_step(attempt(lost, RunState.RUNNING, RunState.RUNNING, RunState.RUNNING)) is None


def test_a_rank_starts_again_once_the_others_have_gone_on_without_it() -> None:
    assert rejoin(view(R, R, L)) is None
    assert rejoin(view(R, R, L, members={0, 1})) == Rejoin("gpu2", 2, 1)
    going_on = attempt(view(R, R, L, members={0, 1}), RunState.RUNNING, RunState.RUNNING, RunState.RUNNING)
    assert next_step(going_on) == Rejoin("gpu2", 2, 1)


def test_the_pause_before_a_rank_starts_again_grows_and_the_number_of_starts_is_limited() -> None:
    assert rejoin(view(R, R, L, members={0, 1}, lost_s=1.0)) is None
    assert rejoin(view(R, R, L, members={0, 1}, lost_s=3.0, starts=2)) is None
    assert rejoin(view(R, R, L, members={0, 1}, lost_s=4.0, starts=2)) is not None
    assert rejoin(view(R, R, L, members={0, 1}, lost_s=9999.0, starts=4)) is None


def test_a_rank_whose_run_is_over_is_not_started_again() -> None:
    assert rejoin(view(R, R, L, members={0, 1}, can_start=False)) is None


def test_with_too_few_ranks_the_attempt_ends() -> None:
    few = view(R, L, L, min_ranks=2)
    assert problem(few) == (
        "rank 1 on gpu1 was lost (signal 9) and rank 2 on gpu2 was lost (signal 9); "
        "1 of 3 ranks are left, fewer than min_ranks 2"
    )
    step = next_step(attempt(few, RunState.RUNNING, RunState.RUNNING, RunState.RUNNING))
    assert isinstance(step, Move)
    assert (step.state, step.ending) == (JobState.STOPPING, Ending.FAILED)


def test_nothing_is_told_of_a_rank_before_its_node_has_answered() -> None:
    """An agent that was restarted hears its nodes one after the other."""
    unheard = view(R, R, UNHEARD, members={0, 1})
    assert described(unheard) is None
    assert problem(unheard) is None
    assert problem(view(R, L, UNHEARD, members=set())) is None


def test_a_rank_that_cannot_be_reached_is_not_lost() -> None:
    assert problem(view(R, U, U, min_ranks=3)) is None
    left_behind = view(R, R, U, members={0, 1})
    assert described(left_behind) == (
        "rank 2 on gpu2 cannot be reached, and was left behind; training goes on with 2 of 3 ranks"
    )


def test_nobody_knows_who_trains_until_every_node_has_answered_an_agent_that_was_restarted() -> None:
    assert problem(view(U, L, R, members=set())) is None


def test_a_rank_lost_before_the_training_begins_is_a_failure() -> None:
    assert problem(view(R, R, L, members=set())) == (
        "rank 2 on gpu2 was lost (signal 9), before the training had begun"
    )


def test_it_is_done_when_those_who_trained_last_have_ended_with_0() -> None:
    assert is_done(view(D, D, L, members={0, 1}))
    assert is_done(view(D, D, R, members={0, 1}))  # one that hangs: it is stopped
    assert not is_done(view(D, R, L, members={0, 1}))
    step = next_step(attempt(view(D, D, R, members={0, 1}), RunState.DONE, RunState.DONE, RunState.RUNNING))
    assert isinstance(step, Move)
    assert step.ending is Ending.DONE


def test_a_rank_that_fails_when_the_others_have_ended_is_a_failure() -> None:
    assert not is_done(view(L, D, D))
    assert problem(view(L, D, D)) == "rank 0 on gpu0 was lost (signal 9); no rank is left to go on"


def test_ranks_that_wait_to_join_do_not_go_on_alone() -> None:
    assert problem(view(L, L, R, members={0, 1})) is not None


def test_one_that_is_started_again_is_told() -> None:
    waits = view(R, R, R, members={0, 1})
    waits = replace(waits, ranks=(*waits.ranks[:2], replace(waits.ranks[2], starts=2)))
    assert described(waits) == (
        "rank 2 on gpu2 was started again, and waits to join; training goes on with 2 of 3 ranks"
    )
    assert described(view(R, R, R)) is None


def test_what_a_dead_supervisor_left_is_ended_while_the_others_go_on() -> None:
    gone = attempt(view(R, R, L, members={0, 1}, can_start=False), RunState.RUNNING, RunState.RUNNING, RunState.DEAD)
    assert next_step(gone) == Stop(("gpu2",))


def test_an_elastic_attempt_is_running_again_when_its_nodes_answer() -> None:
    back = attempt(view(R, R, R), RunState.RUNNING, RunState.RUNNING, RunState.RUNNING, state=JobState.UNREACHABLE)
    step = next_step(back)
    assert isinstance(step, Move)
    assert step.state is JobState.RUNNING


def test_the_newest_group_that_all_its_members_know_holds() -> None:
    nodes = {0: "a", 1: "b", 2: "c"}
    all_three, two = (0, (0, 1, 2)), (1, (0, 1))
    assert members({"a": all_three, "b": all_three, "c": all_three}, nodes) == frozenset({0, 1, 2})
    assert members({"a": two, "b": all_three, "c": all_three}, nodes) == frozenset({0, 1, 2})
    assert members({"a": two, "b": two, "c": all_three}, nodes) == frozenset({0, 1})
    assert members({}, nodes) == frozenset()


def test_a_node_does_not_say_that_others_belong_to_a_group() -> None:
    nodes = {0: "a", 1: "b"}
    true, lie = (0, (0, 1)), (9, (0, 1, 7))
    assert members({"a": true, "b": lie}, nodes) == frozenset({0, 1})
