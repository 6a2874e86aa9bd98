from __future__ import annotations

import pytest

from ugro.kernel.jobs.engine.rules.reported_run import (
    Belief,
    Recorded,
    Reported,
    StrangeRuns,
    Verdict,
    judge_run,
    most_log_bytes,
    run_number,
)
from ugro.kernel.jobs.model import Placement, Share
from ugro.kernel.links.model import Machine

ON_BOTH = Placement((Share("gpu1", root="/ws", boot_id="boot", hostname="one"), Share("gpu2")))
GIB = 2**30


def machine(hostname: str = "one", *, root: str = "/ws", boot_id: str = "boot") -> Machine:
    return Machine(hostname, "Debian", "6.1", "x86_64", boot_id, "ann", root, "3.11.4", "/usr/bin/python3", 8, "CPU", 1)


def judged(
    recorded: Recorded, *, node: str = "gpu1", job: int = 7, attempt: int = 2, there: Machine | None = None
) -> Verdict:
    return judge_run(Reported(node, there or machine(), job, attempt), recorded)


def strange(reason: str) -> Verdict:
    return Verdict(Belief.STRANGE, reason)


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_an_attempt_is_believed_on_each_node_that_it_was_placed_on(node: str) -> None:
    assert judged(Recorded(9, True, ON_BOTH), node=node).belief is Belief.PLACED


def test_the_same_machine_is_believed_after_it_was_restarted_or_got_another_host_name() -> None:
    for there in (machine(boot_id="later"), machine("two")):
        assert judged(Recorded(9, True, ON_BOTH), there=there).belief is Belief.PLACED


def test_an_attempt_that_was_placed_elsewhere_is_not_believed() -> None:
    expected = strange("attempt 2 of job 7 was placed on gpu1, gpu2")
    assert judged(Recorded(9, True, ON_BOTH), node="gpu3") == expected


@pytest.mark.parametrize("there", [machine(root="/other"), machine("two", boot_id="other")])
def test_another_machine_or_folder_that_has_the_name_by_now_is_not_believed(there: Machine) -> None:
    expected = strange("attempt 2 of job 7 was placed there when that name led to another machine or folder")
    assert judged(Recorded(9, True, ON_BOTH), there=there) == expected


def test_an_attempt_that_was_never_made_is_not_believed() -> None:
    assert judged(Recorded(9, True, None)) == strange("job 7 has had no attempt 2")


def test_a_job_that_was_never_submitted_is_not_believed() -> None:
    assert judged(Recorded(6, False)) == strange("no job 7 was ever submitted")


def test_what_is_left_of_a_job_that_was_removed_may_be_removed() -> None:
    assert judged(Recorded(7, False)) == Verdict(Belief.LEFTOVER, "job 7 was removed")


def test_only_numbers_as_we_write_them_name_a_job() -> None:
    assert run_number("120") == 120
    for text in ("", "0", "07", "-1", "+1", " 1", "1_0", "²", "１", "1" * 19, "9" * 5000, "x", "1.5"):
        assert run_number(text) is None, text


def test_a_log_may_be_as_large_as_a_disk_can_be_fast() -> None:
    assert most_log_bytes(-5) == most_log_bytes(0) == GIB
    assert most_log_bytes(60) == 241 * GIB


def test_strange_runs_are_one_sentence() -> None:
    assert str(StrangeRuns(1, "no job 7 was ever submitted")) == (
        "reports runs that were never placed there: no job 7 was ever submitted"
    )
    assert str(StrangeRuns(3, "job 7 has had no attempt 2")).endswith("no attempt 2, and 2 more")
