"""A service under load while everything around it is killed, drained, scaled and replaced: no request fails.

``UGRO_CHAOS_SECONDS`` and ``UGRO_CHAOS_SEED`` say for how long, and which order of faults.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.rig import needs
from tests.rig.agent import end_agent
from tests.rig.service import ServicePlace
from tests.rig.waiting import wait_until
from ugro.features.services.model import Phase
from ugro.kernel.agent.operations import DrainNode, ResumeNode

log = logging.getLogger(__name__)
# Read now: a test begins without variables of this name.
SECONDS = float(os.environ.get("UGRO_CHAOS_SECONDS", "45"))
SEED = int(os.environ.get("UGRO_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))


class Faults:
    def __init__(self, place: ServicePlace, seed: int) -> None:
        self._place = place
        self._chance = random.Random(seed)
        self._version = 1
        self._drained: str | None = None
        self.done: Counter[str] = Counter()

    def next(self) -> None:
        faults: list[Callable[[], None]] = [self.kill_replica, self.kill_agent, self.drain, self.scale, self.update]
        chosen = self._chance.choice(faults)
        self.done[chosen.__name__] += 1
        chosen()
        self._place.settled()

    def kill_replica(self) -> None:
        number = self._chance.choice([one.number for one in self._place.report().replicas])
        if self._place.servers_of(number):
            self._place.kill_replica(number)

    def kill_agent(self) -> None:
        end_agent(self._place.home)
        time.sleep(self._chance.random())  # nobody is there for a moment

    def drain(self) -> None:
        """Another node than before; that comes back."""
        names = [root.name for root in self._place.roots]
        if (before := self._drained) is not None:
            self._place.ask(lambda client: client.ask(ResumeNode(before)))
        self._drained = chosen = self._chance.choice([name for name in names if name != before])
        self._place.ask(lambda client: client.ask(DrainNode(chosen, "chaos")))
        self._place.until(lambda one: all(seen.node != chosen for seen in one.replicas))

    def scale(self) -> None:
        wanted = self._chance.randint(1, 3)
        self._place.ask(lambda client: client.services.scale("echo", wanted))

    def update(self) -> None:
        self._version += 1
        self._place.update(f"v{self._version}")
        self._place.until(lambda one: one.revision == self._version and not one.update)


@pytest.mark.proof
@pytest.mark.timeout(SECONDS + 300)
@needs.programs("haproxy")
def test_no_request_fails_whatever_happens_around_the_door() -> None:
    with ServicePlace() as place:
        place.start(2)
        faults = Faults(place, SEED)
        deadline = time.monotonic() + SECONDS
        with place.load() as clients:
            while time.monotonic() < deadline and not clients.failures:
                faults.next()
                clients.more(20)
        about = f"seed {SEED}, {SECONDS:g} s, {clients.total} requests, {dict(faults.done)}"
        log.info("%s", about)
        assert clients.failures == [], f"{about}: {clients.failures[:5]}"
        place.ask(lambda client: client.services.stop("echo"))
        place.until(lambda one: one.state is Phase.STOPPED)
        wait_until(lambda: not any(place.servers_of(number) for number in range(1, 200)), 20, "no process is left")
        assert faults.done, about
