"""The agent is killed at every step of a service's life: no replica is lost or doubled, and no request fails."""

from __future__ import annotations

import pytest

from tests.rig import needs
from tests.rig.engines import on_each
from tests.rig.service import ServicePlace, words
from tests.rig.stores import use_engine
from tests.rig.tiers import sample
from tests.rig.waiting import wait_until
from ugro.features.services.model import Phase
from ugro.kernel.support.process import SERVICE_POINTS

_REACHED_S = 60
LATER = ("service.decided@2", "service.submitted@3", "service.added@3", "service.cancelled@2", "service.removed@2")


@pytest.mark.proof
@pytest.mark.timeout(240)
@needs.programs("haproxy")
@on_each
@pytest.mark.parametrize("point", sample([*SERVICE_POINTS, *LATER]))
def test_a_service_whose_agent_is_killed_at_any_step_loses_and_doubles_nothing(point: str, engine: str) -> None:
    with ServicePlace((0.01, 0.01)) as place:
        use_engine(place.home)
        armed = place.agent(point)
        assert armed.wait_ready()
        place.start(2)
        with place.load(2) as clients:
            clients.more(10)
            place.update("two")
            place.until(lambda one: one.revision == 2 and not one.update)
            place.settled()
            clients.answers.clear()
            clients.more(20)
            assert words(clients.answers) == {"two"}
            found = place.report()
            place.ask(lambda client: client.services.scale("echo", 1))
            place.settled()
            clients.more(10)
        assert clients.failures == []
        jobs = place.ask(lambda client: client.jobs.newest(None))
        place.ask(lambda client: client.services.stop("echo"))
        place.until(lambda one: one.state is Phase.STOPPED)
        wait_until(lambda: armed.was_killed, _REACHED_S, f"the agent to die at {point}")
        # Two of each revision, and a door: each was submitted once.
        names = sorted(job.spec.name for job in jobs)
        assert names == ["echo-1", "echo-2", "echo-3", "echo-4", "echo-door"], (names, found)
