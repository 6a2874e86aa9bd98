"""Somebody sets the clock of the agent's machine: no job ends, waits or is removed for that."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import pytest

from tests.proof.faults.ordinary import supervisors
from tests.proof.place import Place
from tests.rig import agent as rig
from tests.rig.clock import HOUR_S, YEAR_S, RigClock
from tests.rig.judge import Task
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import signal_all
from ugro.features.health.operations import Diagnose
from ugro.kernel.support.moments import now

ENDLESS = Task("endless", lines=1_000_000, pause_s=0.05)
LOST = Task("lost", lines=1_000_000, pause_s=0.05)


@pytest.mark.proof
def test_a_clock_that_is_set_changes_no_time_limit_and_no_pause_before_a_retry() -> None:
    with Place(1) as place:
        clock = RigClock(place.folder)
        agent = place.agent(env=clock.env)
        assert agent.wait_ready()
        place.submit(LOST)
        place.wait_begun("lost")
        signal_all(SIGKILL, supervisors(place.roots[0]))
        place.wait(lambda: place.job("lost").state == "recovering", "the pause before a retry")
        clock.jump(-2 * HOUR_S)
        place.wait(lambda: place.job("lost").attempt == 2, "the second attempt")
        place.submit(ENDLESS, time_limit="1h")
        place.wait_begun("endless")
        clock.jump(3 * HOUR_S)
        wait_said(place, "set forward by 3h")
        agent.kill()
        clock.jump(5 * HOUR_S)
        assert place.agent(env=clock.env).wait_ready()
        wait_said(place, "set forward by 5h")
        place.wait(lambda: place.job("endless").state == "running", "it to be found again")
        assert place.job("endless").lasts_s(now()) < HOUR_S
        found = place.ask(lambda client: list(client.follow(Diagnose())))
        [finding] = [one for one in found if one.check == "clock" and one.remedy]
        assert "set forward by 5h; time limits and pauses are not changed" in finding.text
        for token in ("endless", "lost"):
            place.cancel(token)
        assert {final.state for final in place.finals().values()} == {"cancelled"}


@pytest.mark.proof
@pytest.mark.parametrize("years", [-10, 10])
def test_an_agent_whose_machine_starts_with_a_clock_that_is_years_off_ends_and_removes_nothing(
    tmp_path: Path, years: int
) -> None:
    with Place(1) as place, SshdFarm(tmp_path, count=1) as farm:
        place.cluster = farm.cluster_yaml()
        clock = RigClock(place.folder)
        agent = place.agent(env=clock.env)
        assert agent.wait_ready()
        place.submit(Task("done"))
        place.submit(ENDLESS, time_limit="1h")
        place.wait_begun("endless")
        place.wait(lambda: place.job("done").is_final, "the small job")
        agent.stop()
        clock.reboot(1, years * YEAR_S)
        assert place.agent(env=clock.env).wait_ready()
        wait_said(place, "nothing old is removed for 1d")
        place.submit(Task("later"))
        place.wait(lambda: place.job("later").is_final, "a job after the restart")
        place.wait(lambda: place.job("endless").state == "running", "the job to be found again")
        assert (place.job("later").state, place.job("done").state) == ("succeeded", "succeeded")
        clock.jump(-years * YEAR_S)
        wait_said(place, f"set {'back' if years > 0 else 'forward'} by 3650d")
        place.submit(Task("corrected"))
        place.wait(lambda: place.job("corrected").is_final, "a job after the clock was corrected")
        assert place.job("endless").state == "running"
        place.cancel("endless")
        place.finals()


def wait_said(place: Place, text: str) -> None:
    place.wait(lambda: text in said(place), f"an event that says: {text}")


def said(place: Place) -> str:
    return "\n".join(line for line in rig.events(place.home) if " clock " in line)
