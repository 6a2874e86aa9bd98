"""Which logins are open, and whose jobs they keep from a node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Placement, Share
from ugro.kernel.jobs.scheduling.fit import Seeker
from ugro.kernel.links.cluster import KnownLogins
from ugro.kernel.links.logins import Logins
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import Unreachable


@dataclass(eq=False)
class FakeNode:
    spec: NodeSpec
    machine: Any = field(default_factory=lambda: SimpleNamespace(user="ugro", boot_id="b"))
    link: Any = field(default_factory=lambda: SimpleNamespace(work=()))
    error: Unreachable | None = None
    is_resting: bool = False
    woken: int = 0

    def wake(self) -> None:
        self.woken += 1


class FakeInventory:
    def __init__(self, *names: str) -> None:
        self.nodes = {name: FakeNode(NodeSpec(name, account="{user}")) for name in names}
        self.open: dict[str, FakeNode] = {}
        self.known_logins = KnownLogins()

    def __iter__(self) -> Iterator[FakeNode]:
        return iter(self.nodes.values())

    @property
    def logins(self) -> tuple[FakeNode, ...]:
        return tuple(self.open.values())

    def find(self, name: str) -> FakeNode | None:
        found = self.nodes.get(name) or self.open.get(name)
        return self.open_login(name) if found is None and name in self.known_logins.used else found

    def opened_login(self, name: str) -> FakeNode | None:
        return self.open.get(name)

    def open_login(self, name: str) -> FakeNode | None:
        if name not in self.open and node_of(name) in self.nodes:
            self.open[name] = FakeNode(self.nodes[node_of(name)].spec.login(account_of(name)))
        return self.open.get(name)

    async def close_login(self, name: str) -> None:
        self.open.pop(name, None)


class FakeWatch:
    def __init__(self, inventory: FakeInventory) -> None:
        self.inventory = inventory
        self.busy: set[str] = set()
        self.refused: set[str] = set()

    def is_refused(self, name: str) -> bool:
        return name in self.refused

    def has_runs(self, name: str) -> bool:
        return name in self.busy

    def moment(self, name: str) -> object:
        return object()

    def silent_s(self, name: str) -> float:
        return 0.0


def made(*nodes: str) -> tuple[Logins, FakeInventory, FakeWatch]:
    inventory = FakeInventory(*nodes)
    watch = FakeWatch(inventory)
    return Logins(cast(RunTracker, watch), idle_s=-1.0), inventory, watch


def of(*users: str) -> set[Seeker]:
    return {Seeker(user) for user in users}


def refused() -> Unreachable:
    return Unreachable("login denied", cause="login-denied")


def test_a_node_that_sleeps_is_open_to_everybody_but_those_whom_it_refused() -> None:
    logins, inventory, _ = made("gpu1")
    node = inventory.nodes["gpu1"]
    logins.keep_up([], of("ann", "bob"))
    inventory.open["bob@gpu1"].link, inventory.open["bob@gpu1"].error = None, refused()
    awake = logins.missing(cast(Any, node), ["ann", "bob"], False)
    assert [one.user for one in awake] == ["bob"]
    for login in inventory.open.values():
        login.link, login.error = None, Unreachable("timed out", cause="timed-out")
    asleep = logins.missing(cast(Any, node), ["ann", "bob"], True)
    assert [one.user for one in asleep] == ["bob"]


def test_logins_rest_while_their_node_sleeps_and_are_dialled_when_it_is_awake() -> None:
    logins, inventory, _ = made("gpu1")
    logins.keep_up([], of("ann"))
    inventory.nodes["gpu1"].is_resting = True
    logins.keep_up([], of("ann", "bob"))
    assert list(inventory.open) == ["ann@gpu1"], "nobody is connected with a node that sleeps"
    assert inventory.open["ann@gpu1"].is_resting
    inventory.nodes["gpu1"].is_resting = False
    logins.keep_up([], of("ann"))
    assert inventory.open["ann@gpu1"].woken == 1


def test_only_logins_that_may_have_something_are_asked_at_the_start() -> None:
    logins, inventory, _ = made("gpu1")
    logins.remember({"ann@gpu1": False, "gone@gpu1": True}, _no_record)
    logins.keep_up([], [])
    assert list(inventory.open) == ["ann@gpu1"]
    assert inventory.find("gone@gpu1") is not None, "its results can be fetched all the same"


def test_a_login_is_asked_again_when_its_node_is_back() -> None:
    logins, inventory, _ = made("gpu1")
    logins.placed(Placement((Share("ann@gpu1"),)))
    logins.keep_up([], [])
    node = inventory.nodes.pop("gpu1")
    inventory.open.clear()
    logins.keep_up([], [])
    inventory.nodes["gpu1"] = FakeNode(node.spec)
    logins.keep_up([], [])
    assert list(inventory.open) == ["ann@gpu1"]


def test_a_login_stays_while_it_may_have_a_run_and_is_recorded_as_clear_when_it_is_closed() -> None:
    async def work() -> None:
        logins, inventory, watch = made("gpu1")
        cleared: list[str] = []

        async def clear(name: str) -> None:
            cleared.append(name)

        logins.remember({}, clear)
        logins.placed(Placement((Share("ann@gpu1"),)))
        logins.keep_up([], [])
        watch.busy.add("ann@gpu1")
        assert logins.keep_up([], []) == []
        watch.busy.clear()
        assert logins.keep_up([], []) == ["ann@gpu1"]
        await logins.close("ann@gpu1")
        assert (cleared, list(inventory.open)) == (["ann@gpu1"], [])

    asyncio.run(work())


def test_a_login_that_gets_a_job_while_it_is_closed_stays() -> None:
    async def work() -> None:
        logins, inventory, _ = made("gpu1")
        share = Placement((Share("ann@gpu1"),))

        async def clear(name: str) -> None:
            logins.placed(share)

        logins.remember({}, clear)
        logins.placed(share)
        logins.keep_up([], [])
        await logins.close("ann@gpu1")
        assert list(inventory.open) == ["ann@gpu1"]

    asyncio.run(work())


def test_a_login_stays_open_while_files_are_on_their_way() -> None:
    logins, inventory, _ = made("gpu1")
    logins.keep_up([], of("ann"))
    inventory.open["ann@gpu1"].link.work = ("files.read",)
    assert logins.keep_up([], []) == []
    inventory.open["ann@gpu1"].link.work = ()
    assert logins.keep_up([], []) == ["ann@gpu1"]


def test_a_login_that_was_empty_elsewhere_is_asked_when_its_node_is_reached_the_old_way_again() -> None:
    async def work() -> None:
        logins, inventory, _ = made("gpu1")
        logins.remember({}, _nothing)
        logins.placed(Placement((Share("ann@gpu1"),)))
        logins.keep_up([], [])
        await logins.close("ann@gpu1")
        inventory.nodes["gpu1"] = FakeNode(inventory.nodes["gpu1"].spec)
        logins.keep_up([], [])
        assert list(inventory.open) == ["ann@gpu1"]

    asyncio.run(work())


def test_a_job_that_was_taken_over_from_a_node_keeps_its_login() -> None:
    logins, inventory, watch = made("gpu1")
    job = cast(Any, SimpleNamespace(placement=Placement((Share("ann@gpu1"),))))
    logins.keep_up([job], [])
    watch.busy.add("ann@gpu1")
    assert logins.keep_up([], []) == [], "it has files that nobody has fetched"
    inventory.open.clear()
    assert inventory.find("ann@gpu1") is not None, "it can be opened again by its name"


def test_a_node_that_has_just_booted_is_not_another_machine_for_its_users() -> None:
    logins, inventory, _ = made("gpu1")
    node = inventory.nodes["gpu1"]
    logins.keep_up([], of("ann"))
    inventory.open["ann@gpu1"].machine = SimpleNamespace(user="ann", boot_id="new")
    node.link = None
    assert logins.missing(cast(Any, node), ["ann"], False) == ()
    node.link = SimpleNamespace(work=())
    [found] = logins.missing(cast(Any, node), ["ann"], False)
    assert found.is_lasting
    assert "another machine" in found.reason


def test_a_login_is_opened_only_on_nodes_that_the_waiting_jobs_may_use() -> None:
    logins, inventory, _ = made("gpu1", "gpu2", "gpu3")
    inventory.nodes["gpu3"].spec = replace(inventory.nodes["gpu3"].spec, labels=("fast",))
    logins.keep_up([], {Seeker("ann", only=("gpu2",)), Seeker("bob", labels=("fast",))})
    assert sorted(inventory.open) == ["ann@gpu2", "bob@gpu3"]
    logins.placed(Placement((Share("ann@gpu1"),)))
    assert logins.missing(cast(Any, inventory.nodes["gpu1"]), ["ann"], False)
    assert sorted(inventory.open) == ["ann@gpu2", "bob@gpu3"], "whether it could start there is no reason to dial"


def test_a_login_whose_account_is_gone_is_closed_and_not_taken_for_empty() -> None:
    async def work() -> None:
        logins, inventory, watch = made("gpu1")
        logins.remember({"ann@gpu1": False}, _no_record)
        logins.keep_up([], [])
        watch.busy.add("ann@gpu1")  # it does not say what it has
        assert logins.keep_up([], []) == []
        watch.refused.add("ann@gpu1")
        assert logins.keep_up([], []) == ["ann@gpu1"]
        await logins.close("ann@gpu1")
        assert (list(inventory.open), inventory.known_logins.unclear) == ([], {"ann@gpu1"})
        logins.keep_up([], [])
        assert not inventory.open, "it is not dialled again"
        inventory.nodes["gpu1"] = FakeNode(inventory.nodes["gpu1"].spec)
        logins.keep_up([], [])
        assert list(inventory.open) == ["ann@gpu1"], "it is, when its node is new"

    asyncio.run(work())


def test_a_cluster_without_accounts_has_no_logins_to_look_at() -> None:
    logins, inventory, _ = made("gpu1")
    found = [logins.are_possible]
    inventory.nodes["gpu1"].spec = NodeSpec("gpu1")
    found.append(logins.are_possible)
    logins.placed(Placement((Share("gpu1"),)))
    found.append(logins.are_possible)
    logins.remember({"ann@gpu1": True}, _no_record)  # from a time when it had
    found.append(logins.are_possible)
    assert found == [True, False, False, True]


def test_a_user_reaches_nodes_that_answer_through_logins_that_are_open() -> None:
    logins, inventory, _ = made("gpu1", "gpu2", "gpu3", "gpu4")
    inventory.nodes["gpu3"].spec = NodeSpec("gpu3")
    inventory.nodes["gpu4"].link = None
    logins.keep_up([], of("ann"))
    inventory.open["ann@gpu2"].link = None
    assert logins.reached("ann") == ["ann@gpu1", "gpu2", "gpu3"]
    assert logins.reached("bob") == ["gpu1", "gpu2", "gpu3"]


async def _nothing(name: str) -> None:
    """Nothing is recorded."""


async def _no_record(name: str) -> None:
    raise AssertionError(name)
