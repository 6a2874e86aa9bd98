"""The loop over nodes that sleep, with a real store: what it begins, refuses and forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rig.waiting import wait_until
from ugro.features.power.model import Act, OwnerReport, PowerRule, Then, When
from ugro.features.power.nodes import NodeLooks
from ugro.features.power.service import PowerService, Sleepers
from ugro.kernel.agent.clock import Clock
from ugro.kernel.jobs.scheduling.scheduler import NodeWishes
from ugro.kernel.links.model import Facts, NodeSpec
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed


def refuse(what: str) -> None:
    raise NotAllowed(f"the agent is in safe mode, {what}")


def with_power(folder: Path, test: Callable[[PowerService, Any], Coroutine[Any, Any, None]]) -> None:
    """A node that a command wakes: it makes a file ``woken``."""

    async def run() -> None:
        store = Store(folder / "state.db")
        await store.open()
        try:
            node = SimpleNamespace(spec=NodeSpec("n1", power=PowerRule(resume=("touch", "woken"))))
            inventory = SimpleNamespace(find=lambda name: None, named=lambda name: node)
            cluster: Any = SimpleNamespace(inventory=inventory, path=folder / "cluster.yaml")
            engine: Any = SimpleNamespace(safe_mode=SimpleNamespace(check=refuse))
            scheduler_input: Any = SimpleNamespace()
            sleepers = Sleepers(store.power, cluster, Clock().reading)
            watch: Any = SimpleNamespace()
            await test(PowerService(store, cluster, engine, scheduler_input, sleepers, watch), node)
        finally:
            await store.close()

    asyncio.run(run())


def test_an_act_that_finds_the_one_before_it_still_ending_is_done_later(tmp_path: Path) -> None:
    async def test(power: PowerService, node: Any) -> None:
        may_end = asyncio.Event()

        async def ends_slowly() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                await may_end.wait()

        power._work.do(("act", "n1"), ends_slowly)
        await asyncio.sleep(0)
        power._work.cancel(("act", "n1"))
        power._begin(node, Act.RESUME)
        may_end.set()
        await asyncio.wait([power._work._tasks["act", "n1"]])
        await asyncio.sleep(0)  # it is taken out
        power._begin(node, Act.RESUME)
        await asyncio.to_thread(wait_until, (tmp_path / "woken").exists, 60, "the node to be woken")
        await power._work.close()

    with_power(tmp_path, test)


def test_nothing_is_suspended_or_woken_by_hand_in_safe_mode(tmp_path: Path) -> None:
    """Nobody would do it: the node would go to sleep, or wake, in words alone."""

    async def test(power: PowerService, node: Any) -> None:
        for act in Act:
            with pytest.raises(NotAllowed, match="neither suspends nor wakes"):
                await power.request("n1", act)

    with_power(tmp_path, test)


def test_a_node_without_a_rule_is_learned_again_when_it_has_one(tmp_path: Path) -> None:
    async def test(power: PowerService, node: Any) -> None:
        power._memory("n1")
        link: Any = object()
        power._learned["n1"] = link
        await power._forget(set())
        assert "n1" not in power._learned, "what was known of it was forgotten"

    with_power(tmp_path, test)


class Machine:
    """A node and a login to it, as ``NodeLooks`` sees them; nothing else would keep it awake."""

    def __init__(self) -> None:
        self.node, self.login = (
            SimpleNamespace(
                spec=NodeSpec(name, power=PowerRule(suspend_after_s=60.0)),
                link=SimpleNamespace(spec=NodeSpec(name), work=(), uses=0),
                machine=None,
                error=None,
            )
            for name in ("gpu1", "ann@gpu1")
        )
        inventory = SimpleNamespace(logins=(self.login,))
        facts = Facts(0.0, 9.0, (0.1, 0.1, 0.0), 0.0, 1, 1)
        report = SimpleNamespace(report=SimpleNamespace(facts=facts, drained=None))
        cluster: Any = SimpleNamespace(
            inventory=inventory, config=SimpleNamespace(power=SimpleNamespace(exclude=()))
        )
        engine: Any = SimpleNamespace(live=SimpleNamespace(holding=lambda: ()))
        scheduler_input: Any = SimpleNamespace(
            reports=SimpleNamespace(of=lambda node: report), holds=SimpleNamespace(reason=lambda name: None)
        )
        self.looks = NodeLooks(cluster, engine, scheduler_input, lambda node: True)
        nobody = OwnerReport(When.ACTIVE, Then.DRAIN, 60.0)
        owners: Any = SimpleNamespace(report=lambda name: nobody, keep_up=lambda: None)
        self.looks._owners = owners
        self.look()

    def look(self) -> None:
        node: Any = self.node
        self.looks.keep_up([node], set())

    def busy(self) -> str | None:
        node: Any = self.node
        found = self.looks.busy(node, NodeWishes())
        return found.words if found else None

    def was_busy_since_last(self) -> bool:
        """Whether the last look has put its sleep off."""
        node: Any = self.node
        before, self.looks.of(node).busy_s = self.looks.of(node).busy_s, -1.0
        return before != -1.0


def test_a_node_is_kept_awake_by_what_is_done_through_a_login() -> None:
    machine = Machine()
    assert machine.busy() is None
    machine.login.link.work = ("files.pull",)
    assert machine.busy() == "is sending files"
    machine.login.link.work = ()
    assert machine.was_busy_since_last()
    machine.look()
    assert not machine.was_busy_since_last()
    machine.login.link.uses += 1
    machine.look()
    assert machine.was_busy_since_last()
    machine.look()
    assert not machine.was_busy_since_last(), "the same use counts once"
    machine.login.link = None
    machine.look()
    assert not machine.was_busy_since_last(), "a login that is closed is no use"
