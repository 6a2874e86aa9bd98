"""Costly work in turns: a bounded number at once, and less for one user."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ugro.features.environments.service.service import Turns, working_for
from ugro.kernel.access.caller import enter
from ugro.kernel.access.model import Caller, Role


class Work:
    """Each piece goes on until it is told to end."""

    def __init__(self) -> None:
        self.turns = Turns(3, of_one_user=2)
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, *, by_agent: bool = False) -> None:
        """``name``: of the user, and a number."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, by_agent))
        await self.settled()

    async def _run(self, name: str, by_agent: bool) -> None:
        user = name.partition(" ")[0]
        if not by_agent:
            enter(Caller(user, Role.USER, ""))
        with working_for(user):
            async with self.turns.taken():
                self.running.append(name)
                await self._ends[name].wait()
                self.running.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await self.settled()

    async def settled(self) -> None:
        """All tasks have gone as far as they can."""
        for _ in range(20):
            await asyncio.sleep(0)


def run(scenario: Callable[[Work], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scenario(Work())

    asyncio.run(main())


def test_one_user_does_not_take_all_turns() -> None:
    async def scenario(work: Work) -> None:
        for name in ("ann 1", "ann 2", "ann 3", "bob 1", "cho 1"):
            await work.begin(name)
        assert work.running == ["ann 1", "ann 2", "bob 1"]
        await work.end("bob 1")
        assert work.running == ["ann 1", "ann 2", "cho 1"], "one of ann's waits for another of hers"
        await work.end("ann 1")
        assert work.running == ["ann 2", "cho 1", "ann 3"]
        for name in ("ann 2", "cho 1", "ann 3"):
            await work.end(name)
        assert not work.running

    run(scenario)


def test_what_the_agent_does_for_a_job_counts_for_its_user() -> None:
    async def scenario(work: Work) -> None:
        await work.begin("ann 1")
        await work.begin("ann 2", by_agent=True)
        await work.begin("ann 3", by_agent=True)
        await work.begin("bob 1", by_agent=True)
        assert work.running == ["ann 1", "ann 2", "bob 1"]
        work.tasks["ann 3"].cancel()
        await work.settled()
        await work.end("ann 1")
        await work.begin("ann 4")
        assert work.running == ["ann 2", "bob 1", "ann 4"], "who leaves the queue takes nothing"
        for name in ("ann 2", "bob 1", "ann 4"):
            await work.end(name)

    run(scenario)
