"""Updates, scaling and moves in a world of limited devices and random ends: what holds whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.unit.policy.serving.places import job, ready, service, starting, waiting
from ugro.features.services.model import Rollout, Server, ServerState, Service
from ugro.features.services.rules.rollout import applied, changes, forgotten
from ugro.features.services.rules.steps import (
    AddServer,
    Cancel,
    DoorSeen,
    Forget,
    Seen,
    Step,
    Submit,
    Turn,
    TurnServer,
    View,
    next_steps,
)
from ugro.kernel.jobs.model import JobState

_LOOKS = 400
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(5, 60))]


@dataclass
class World:
    """Jobs wait for one of ``devices``, start, and are ready after a while; servers are what the door has."""

    service: Service
    devices: int
    chance: random.Random
    ages: dict[int, int] = field(default_factory=dict)  # of jobs, in looks; those that hold a device are in ``placed``
    placed: dict[int, int] = field(default_factory=dict)  # looks since they got a device
    ended: set[int] = field(default_factory=set)
    servers: dict[int, ServerState] = field(default_factory=dict)
    never_ready: frozenset[int] = frozenset()  # revisions
    freed: int = 100  # looks since a device was given back

    def view(self) -> View:
        seen = tuple(self._seen(one.number, one.revision, one.dropped) for one in self.service.replicas)
        servers = {f"r{number}": self._server(number) for number in self.servers}
        return View(self.service, seen, DoorSeen(job(0), servers), freed_s=self.freed)

    def _server(self, number: int) -> Server:
        return Server(f"r{number}", "127.0.0.1", 9000 + number, 100, self.servers[number], 0, 0)

    def _seen(self, number: int, revision: int, dropped: str | None) -> Seen:
        server = self._server(number) if number in self.servers else None
        if number in self.ended:
            found = replace(waiting(number), job=job(number, JobState.CANCELLED))
        elif number not in self.ages:
            found = replace(waiting(number), job=None)
        elif number not in self.placed:
            found = waiting(number, waits_s=self.ages[number])
        elif self.placed[number] < 3 or revision in self.never_ready:
            found = replace(starting(number), unready_s=100.0 * self.placed[number])
        else:
            found = ready(number)
        return replace(found, replica=replace(found.replica, revision=revision, dropped=dropped), server=server)

    def look(self) -> None:
        self.service = applied(self.service, changes(self.view()))
        for step in next_steps(self.view()):
            self._do(step)

    def _do(self, step: Step) -> None:
        match step:
            case Submit(replica):
                self.ages[replica.number] = 0
            case AddServer(number):
                self.servers[number] = ServerState.READY
            case TurnServer(Turn.DRAIN, name):
                self.servers[int(name[1:])] = ServerState.DRAIN
            case TurnServer(Turn.REMOVE, name):
                self.servers.pop(int(name[1:]), None)
            case Cancel(number):
                self.end(number - 100)
            case Forget(number):
                self.service = forgotten(self.service, number)
            case _:
                raise AssertionError(f"nobody asked for {step}")

    def end(self, number: int) -> None:
        self.ended.add(number)
        self.placed.pop(number, None)
        self.freed = 0

    def pass_time(self) -> None:
        self.freed += 1
        for number in self.ages:
            self.ages[number] += 1
            if number in self.placed:
                self.placed[number] += 1
            elif number not in self.ended and len(self.placed) < self.devices and self._is_given():
                self.placed[number] = 0

    def _is_given(self) -> bool:
        """The scheduler takes its time, but not long."""
        return self.freed > 2 or self.chance.random() < 0.7

    @property
    def serving(self) -> int:
        return sum(one.is_serving for one in self.view().seen if one.replica.dropped is None)

    def settle(self) -> None:
        for _ in range(_LOOKS):
            self.look()
            self.pass_time()
            is_busy = any(one.dropped for one in self.service.replicas) or self.service.rollout is not None
            if self.serving == self.service.wanted == len(self.service.replicas) and not is_busy:
                return
        raise AssertionError(f"it does not settle: {self.view()}")


@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_ends_with_all_replicas_new_and_at_most_one_missing_on_the_way(seed: int) -> None:
    chance = random.Random(seed)
    wanted = chance.randint(1, 5)
    world = World(service(wanted, surge=chance.randint(0, 2)), wanted + chance.randint(0, 2), chance)
    world.settle()
    world.service = replace(world.service, rollout=Rollout(2))
    least = wanted
    for _ in range(_LOOKS):
        world.look()
        world.pass_time()
        least = min(least, world.serving)
        if world.service.rollout is None:
            break
    assert world.service.revision == 2, world.view()
    assert least >= wanted - 1
    has_room = world.devices > wanted and world.service.spec.update.surge > 0
    assert least == wanted or not has_room, (least, wanted, world.devices)
    world.settle()
    assert {one.revision for one in world.service.replicas} == {2}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_ends_also_with_fewer_devices_than_replicas_and_of_a_service_that_never_worked(seed: int) -> None:
    chance = random.Random(seed)
    wanted = chance.randint(2, 5)
    devices = chance.randint(1, wanted - 1)
    is_broken = chance.random() < 0.5
    world = World(service(wanted, surge=chance.randint(0, 2)), devices, chance)
    world.never_ready = frozenset({1}) if is_broken else frozenset()
    for _ in range(50):
        world.look()
        world.pass_time()
    served = world.serving
    assert served == (0 if is_broken else devices)
    world.service = replace(world.service, rollout=Rollout(2, served=served))
    least = served
    for _ in range(_LOOKS):
        world.look()
        world.pass_time()
        least = min(least, world.serving)
    assert least >= served - 1
    assert world.serving == devices, world.view()
    assert {one.revision for one in world.service.replicas} == {2}
    assert world.service.revision == 2, world.view()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_that_is_never_ready_goes_back_and_the_old_ones_are_all_there_again(seed: int) -> None:
    chance = random.Random(seed)
    wanted = chance.randint(1, 4)
    world = World(service(wanted), wanted + chance.randint(0, 1), chance, never_ready=frozenset({2}))
    world.settle()
    world.service = replace(world.service, rollout=Rollout(2))
    world.settle()
    assert world.service.revision == 1
    assert "rolled back" in world.service.note
    assert {one.revision for one in world.service.replicas} == {1}


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_ends_and_however_it_is_scaled_it_settles_at_what_is_wanted(seed: int) -> None:
    chance = random.Random(seed)
    world = World(service(2), 6, chance)
    for _ in range(100):
        if chance.random() < 0.1:
            world.service = replace(world.service, wanted=chance.randint(0, 5))
        if world.placed and chance.random() < 0.2:
            world.end(chance.choice(sorted(world.placed)))
        world.look()
        world.pass_time()
    world.settle()
    assert len(world.placed) == world.service.wanted
    assert len(world.servers) == world.service.wanted
