"""Requests to three unequal replicas: the door of a service, in its ways to share them out, against Ray Serve.

Each replica takes 20, 40 or 80 ms for a request and computes one at a time: 87.5 requests a second at best. All doors
get the same requests at the same random moments. Also: what fails when a replica is killed or all are replaced.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.rig.door import DoorRig, Load, missing_haproxy, open_door, request

from bench.bars import Bar
from bench.peers_serve import RayServe, missing_ray_serve
from ugro.features.services.model import Balance, NewServer
from ugro.features.services.rules.load import Weighing, next_weights

TIMES_S = {"fast": 0.02, "middle": 0.04, "slow": 0.08}
_LOW, _HIGH = 15.0, 60.0  # requests a second; the latter is 70 % of what the replicas can do
# As long as when the design was chosen. The queue of the slow replica grows by 0.6 s a second with `roundrobin`, so
# the p99 of that is set by how long the load lasts: 9.3 s after 16 s, 11.7 s after 20 s, which would be an easier bar.
_LOW_S, _HIGH_S = 8.0, 16.0
_LEARN_S, _LOOK_S = 75.0, 2.0
_FAULT_LOAD, _FAULT_S = 40.0, 8.0
_NOOP_S, _NOOP_CLIENTS = 4.0, 16
_WEIGHTED, _LEAST, _TURNS = "leastconn, learned weights", "leastconn", "roundrobin"
_SLACK = 1.1  # of the ratios that were measured when the design was chosen: 120 ms of 236, of 424


@dataclass
class Case:
    name: str
    port: int
    mean_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    failures: int = 0

    async def load(self, per_s: float, seconds: float, seed: int) -> Load:
        load = Load(self.port, per_s, seed)
        await load.run(seconds)
        self.failures += len(load.failures)
        return load

    async def round(self, seed: int) -> None:
        low = await self.load(_LOW, _LOW_S, seed)
        self.mean_s.append(statistics.fmean(low.seconds))
        high = await self.load(_HIGH, _HIGH_S, seed)
        self.p99_s.append(high.quantile_s(0.99))


def measure(rounds: int) -> list[Bar]:
    if (reason := missing_haproxy()) is not None:
        print(f"not measured: {reason}\n")
        return []
    return asyncio.run(_measured(rounds))


async def _measured(rounds: int) -> list[Bar]:
    async with AsyncExitStack() as stack:
        cases = [await stack.enter_async_context(way) for way in _ways()]
        cases += _ray_serve(stack)
        for number in range(rounds):
            for case in cases:
                print(f"round {number + 1} of {rounds}: {case.name}", flush=True)
                await case.round(number)
    _print(cases)
    bars = _bars({case.name: case for case in cases})
    bars.append(await _failed("a replica killed with -9, GET", _kill, {}))
    bars.append(await _failed("a replica killed with -9, POST", _kill, {"method": "POST", "body": b"x" * 20_000}))
    bars.append(await _failed("all replicas replaced, one by one", _replace, {}))
    await _no_ops()
    return bars


def _ray_serve(stack: AsyncExitStack) -> list[Case]:
    try:
        if (reason := missing_ray_serve()) is None:
            return [Case(RayServe.name, stack.enter_context(RayServe(TIMES_S)).port)]
    except TimeoutError as error:
        reason = str(error)
    print(f"Ray Serve is not measured: {reason}\n", flush=True)
    return []


def _ways() -> list[Any]:
    return [
        _door(_TURNS, Balance.ROUNDROBIN),
        _door(_LEAST, Balance.LEASTCONN),
        _door(_WEIGHTED, Balance.LEASTCONN, learns=True),
        _door("leastconn, learned weights, limit 1", Balance.LEASTCONN, learns=True, limit=1),
        _door("first, limit 1, fastest first", Balance.FIRST, limit=1),
    ]


@asynccontextmanager
async def _door(name: str, balance: Balance, *, learns: bool = False, limit: int = 0) -> AsyncIterator[Case]:
    async with open_door(balance=balance) as rig:
        for number, (replica, seconds) in enumerate(TIMES_S.items()):
            server = await rig.start_replica(replica, seconds, "serial")
            # `first` goes by the weights that a replica comes with: here in the true order, with nothing learned.
            await rig.door.add(replace(server, limit=limit, weight=100 - number if limit else 100))
        case = Case(name, rig.port)
        if not learns:
            yield case
            return
        async with asyncio.TaskGroup() as group:
            learning = group.create_task(_learn(rig), name="learn weights")
            await Load(rig.port, 0.5 * _HIGH).run(_LEARN_S)
            yield case
            print(f"{name}: {', '.join(f'{k} {v.weight}' for k, v in (await rig.door.servers()).items())}")
            learning.cancel()


async def _learn(rig: DoorRig) -> None:
    """As the agent does."""
    known = Weighing()
    while True:
        paces = {name: one.pace for name, one in (await rig.door.stats()).servers.items()}
        before, known = known, next_weights(known, paces, {}, time.monotonic())
        for name, weight in known.weights.items():
            if before.weights.get(name) != weight:
                await rig.door.set_weight(name, weight)
        await asyncio.sleep(_LOOK_S)


def _print(cases: list[Case]) -> None:
    print(f"\n{'':<40}{f'mean at {_LOW:g}/s, ms':>20}{f'p99 at {_HIGH:g}/s, ms':>20}{'failed':>10}")
    for case in cases:
        means, highest = statistics.median(case.mean_s), statistics.median(case.p99_s)
        print(f"{case.name:<40}{means * 1000:>20.0f}{highest * 1000:>20.0f}{case.failures:>10}")
    print()


def _bars(cases: dict[str, Case]) -> list[Bar]:
    def bar(peer: str, share: float) -> Bar:
        ours, theirs = statistics.median(cases[_WEIGHTED].p99_s), statistics.median(cases[peer].p99_s)
        return Bar("p99 at 70 % load with learned weights", ours, theirs, peer, share)

    bars = [bar(_LEAST, _SLACK * 120 / 236), bar(_TURNS, _SLACK * 120 / 9267)]
    return [*bars, *([bar(RayServe.name, _SLACK * 120 / 424)] if RayServe.name in cases else [])]


# --- faults --------------------------------------------------------------------------------------------------------


async def _failed(what: str, fault: Callable[[DoorRig], Coroutine[Any, Any, None]], options: dict[str, Any]) -> Bar:
    async with open_door() as rig:
        for name, seconds in TIMES_S.items():
            await rig.add_replica(name, seconds, "serial")
        load = Load(rig.port, _FAULT_LOAD, options=options)
        running = asyncio.create_task(load.run(_FAULT_S))
        await asyncio.sleep(_FAULT_S / 4)
        await fault(rig)
        await running
    count = len(load.failures) + len(load.seconds)
    print(f"{what}: {len(load.failures)} of {count} failed, p99 {load.quantile_s(0.99) * 1000:.0f} ms")
    return Bar(f"requests that fail: {what}", len(load.failures), 1.0, "none", 0.0)


async def _kill(rig: DoorRig) -> None:
    rig.kill_replica("fast")


async def _replace(rig: DoorRig) -> None:
    for name, seconds in TIMES_S.items():
        await rig.add_replica(f"new-{name}", seconds, "serial")
        await rig.door.drain(name)
        await _drained(rig, name)
        await rig.door.remove(name)
        rig.kill_replica(name)


async def _drained(rig: DoorRig, name: str) -> None:
    await rig.until(lambda _, servers: not servers[name].sessions)


# --- what a request costs by itself --------------------------------------------------------------------------------


async def _no_ops() -> None:
    async with open_door() as rig:
        server: NewServer = await rig.add_replica("nothing")
        through = await _per_s(rig.port)
        alone = await _per_s(server.port)
    text = f"{through:.0f} through the door, {alone:.0f} without it"
    print(f"requests a second that do nothing, {_NOOP_CLIENTS} clients: {text}; the client's limit, not the door's\n")


async def _per_s(port: int) -> float:
    end_at, count = time.monotonic() + _NOOP_S, 0

    async def client() -> None:
        nonlocal count
        while time.monotonic() < end_at:
            await request(port)
            count += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(_NOOP_CLIENTS):
            group.create_task(client(), name="a client")
    return count / _NOOP_S
