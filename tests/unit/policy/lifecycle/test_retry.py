from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.jobs import model as job
from ugro.kernel.jobs.engine.rules.retry import (
    FREE_RETRIES,
    GPU_PAUSE_S,
    INFRASTRUCTURE,
    LASTING,
    LONGEST_PAUSE_S,
    UNCOUNTED,
    GiveUp,
    JobView,
    Retry,
    after_failure,
)
from ugro.kernel.jobs.model import Cause, Failure

NOW = 1000.0


def view(retries: int = 0, *, on: tuple[str, ...] = (), never_on: tuple[str, ...] = (), **more: bool | int) -> JobView:
    return JobView(job.Retry(retries, on, never_on), **more)  # type: ignore[arg-type]


def failure(cause: Cause, node: str | None = "gpu1", exit_code: int | None = None) -> Failure:
    return Failure(cause, f"rank 2 on {node}: {cause}", node=node, exit_code=exit_code)


def retried(decision: Retry | GiveUp) -> Retry:
    assert isinstance(decision, Retry), decision
    return decision


def given_up(decision: Retry | GiveUp) -> GiveUp:
    assert isinstance(decision, GiveUp), decision
    return decision


@pytest.mark.parametrize("cause", sorted(INFRASTRUCTURE))
def test_what_the_machines_did_is_free_of_charge(cause: Cause) -> None:
    decision = retried(after_failure(view(), failure(cause), NOW))
    assert (decision.charged, decision.free) == (0, 1)
    assert "free of charge (1 of 5)" in decision.reason


def test_the_pause_grows_between_free_retries_up_to_a_limit() -> None:
    lost = failure(Cause.NODE_LOST)
    pauses = [retried(after_failure(view(free=used), lost, NOW)).not_before - NOW for used in range(FREE_RETRIES)]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0]
    assert pauses[-1] <= LONGEST_PAUSE_S


def test_a_preempted_job_does_not_pause_and_pays_nothing_however_often() -> None:
    again = retried(after_failure(view(free=FREE_RETRIES), failure(Cause.PREEMPTED), NOW))
    assert (again.not_before, again.free, again.charged) == (NOW, FREE_RETRIES, 0)


def test_a_start_for_which_the_gpu_was_not_free_costs_nothing_however_often_and_is_not_repeated_at_once() -> None:
    again = retried(after_failure(view(free=FREE_RETRIES), failure(Cause.GPU_UNAVAILABLE), NOW))
    assert (again.not_before, again.free, again.charged) == (NOW + GPU_PAUSE_S, FREE_RETRIES, 0)
    assert again.avoid == (), "the node may have another GPU that is free"


def test_after_the_free_ones_its_own_retries_are_used_and_then_none() -> None:
    lost = failure(Cause.NODE_LOST)
    charged = retried(after_failure(view(1, free=FREE_RETRIES), lost, NOW))
    assert (charged.charged, charged.free) == (1, FREE_RETRIES)
    assert "(retry 1 of 1)" in charged.reason
    over = given_up(after_failure(view(1, free=FREE_RETRIES, charged=1), lost, NOW))
    assert over.reason.endswith("all 1 retries are used and the 5 free ones are used")


@pytest.mark.parametrize("cause", sorted(set(Cause) - INFRASTRUCTURE - UNCOUNTED))
def test_without_retries_nothing_else_is_tried_again(cause: Cause) -> None:
    assert given_up(after_failure(view(), failure(cause), NOW)).reason.endswith("; it has no retries")


@pytest.mark.parametrize("cause", sorted(set(Cause) - INFRASTRUCTURE - UNCOUNTED - LASTING))
def test_retries_are_for_what_may_go_well_the_next_time(cause: Cause) -> None:
    decision = retried(after_failure(view(2), failure(cause, exit_code=1), NOW))
    assert (decision.charged, decision.not_before) == (1, NOW)
    assert decision.reason.endswith("it is tried again (retry 1 of 2)")


@pytest.mark.parametrize("cause", sorted(LASTING))
def test_what_would_happen_again_is_retried_only_if_named(cause: Cause) -> None:
    assert "would happen again" in given_up(after_failure(view(2), failure(cause), NOW)).reason
    assert retried(after_failure(view(2, on=(cause,)), failure(cause), NOW)).charged == 1


def test_naming_some_causes_leaves_out_the_others() -> None:
    decision = given_up(after_failure(view(2, on=("cuda_oom",)), failure(Cause.OOM), NOW))
    assert decision.reason.endswith("retried only after cuda_oom, as it was submitted")


def test_naming_causes_does_not_take_the_free_retries_away() -> None:
    assert retried(after_failure(view(2, on=("cuda_oom",)), failure(Cause.NODE_LOST), NOW)).free == 1


def test_an_exit_code_can_be_named() -> None:
    failed = failure(Cause.RANK_FAILED, exit_code=33)
    assert retried(after_failure(view(1, on=("exit_code:33",)), failed, NOW)).charged == 1
    given_up(after_failure(view(1, on=("exit_code:34",)), failed, NOW))
    given_up(after_failure(view(1, on=("rank_failed",), never_on=("exit_code:33",)), failed, NOW))


def test_never_means_never_even_where_it_would_be_free() -> None:
    decision = given_up(after_failure(view(3, never_on=("node_lost",)), failure(Cause.NODE_LOST), NOW))
    assert decision.reason.endswith("never retried after node_lost, as it was submitted")


def test_an_attempt_that_got_further_starts_the_counts_anew() -> None:
    given_up(after_failure(view(2, charged=2, free=FREE_RETRIES), failure(Cause.RANK_FAILED), NOW))
    further = view(2, charged=2, free=FREE_RETRIES, has_progressed=True)
    again = retried(after_failure(further, failure(Cause.RANK_FAILED), NOW))
    assert (again.charged, again.free) == (1, 0)
    free = retried(after_failure(further, failure(Cause.NODE_LOST), NOW))
    assert (free.charged, free.free, free.not_before - NOW) == (0, 1, 5.0)
    assert "from its last checkpoint" in free.reason


def test_a_node_that_failed_is_avoided_one_that_was_innocent_is_not() -> None:
    def avoided(cause: Cause) -> tuple[str, ...]:
        return retried(after_failure(view(1, on=(cause,)), failure(cause), NOW)).avoid

    at_fault = {cause for cause in Cause if avoided(cause)}
    assert at_fault == {"node_lost", "node_rebooted", "supervisor_lost", "start_failed", "disk_full", "killed"}
    assert avoided(Cause.DISK_FULL) == ("gpu1",)
    assert retried(after_failure(view(), failure(Cause.NODE_LOST, node=None), NOW)).avoid == ()


def test_the_hint_of_the_failure_is_passed_on() -> None:
    failed = Failure(Cause.CUDA_OOM, "no memory", hint="use a smaller batch")
    assert given_up(after_failure(view(), failed, NOW)).hint == "use a smaller batch"


# Who made way for another lost nothing by it, and is tried again without end.
causes = st.lists(st.sampled_from(sorted(set(Cause) - UNCOUNTED)), max_size=40)


@given(causes, st.integers(0, 5), st.lists(st.sampled_from(sorted(Cause)), max_size=3))
def test_without_progress_every_job_is_given_up_in_the_end(
    happens: list[Cause], retries: int, on: list[Cause]
) -> None:
    seen, now = view(retries, on=tuple(on)), 0.0
    for tries, cause in enumerate([*happens, *[Cause.NODE_LOST] * (FREE_RETRIES + retries + 1)]):
        decision = after_failure(seen, failure(cause), now)
        if isinstance(decision, GiveUp):
            return
        assert tries < FREE_RETRIES + retries
        assert decision.not_before >= now
        seen, now = JobView(seen.retry, decision.charged, decision.free), decision.not_before
    raise AssertionError("tried again for ever")


def test_a_job_that_found_no_room_is_tried_elsewhere_once_and_at_once() -> None:
    full = failure(Cause.DISK_FULL)
    elsewhere = retried(after_failure(view(has_other_nodes=True), full, NOW))
    assert (elsewhere.not_before, elsewhere.charged, elsewhere.free, elsewhere.avoid) == (NOW, 0, 1, ("gpu1",))
    assert given_up(after_failure(view(has_other_nodes=True, free=1), full, NOW)).reason.endswith("it has no retries")
    assert given_up(after_failure(view(), full, NOW)), "there is no other node"
    patient = retried(after_failure(view(3, charged=1, free=1, has_other_nodes=True), full, NOW))
    assert (patient.not_before, patient.charged) == (NOW + 10.0, 2), "asking again at once would only use its retries"
    ran = failure(Cause.DISK_FULL, exit_code=1)
    assert given_up(after_failure(view(has_other_nodes=True), ran, NOW)), "its own program filled it"
