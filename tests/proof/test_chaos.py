"""A short chaos run on real sshds. The long one is ``make chaos``."""

from __future__ import annotations

import pytest

from tests.proof import chaos, schedule
from tests.proof.faults import all_kinds, possible_kinds
from tests.proof.schedule import Size

SEED = 5
SIZE = Size(nodes=3, seconds=12, job_every_s=0.6, fault_every_s=0.8, cancel_every_s=4)
_SETTLE_S = 80


@pytest.mark.proof
def test_faults_of_every_kind_lose_double_and_leave_nothing() -> None:
    steps = schedule.draw(SEED, SIZE, possible_kinds())
    report, made = chaos.run(SEED, SIZE, steps, _SETTLE_S)
    assert report.complaints == [], "\n".join([report.to_text(), schedule.write(steps), *made.record])


def test_a_schedule_is_the_same_for_the_same_seed_and_can_be_read_again() -> None:
    steps = schedule.draw(7, SIZE, all_kinds())
    assert steps == schedule.draw(7, SIZE, all_kinds())
    assert steps != schedule.draw(8, SIZE, all_kinds())
    assert schedule.read(schedule.write(steps)) == steps
