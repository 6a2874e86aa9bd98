"""Through which login a connection to a port of a node goes, and how many there may be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ugro.kernel.access.caller import enter
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Job
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.cluster import Cluster, KnownLogins
from ugro.kernel.links.logins import Logins
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Identity
from ugro.kernel.links.tunnels import MOST_OF_NODE, Tunnels, Wanted
from ugro.kernel.support.errors import NotAllowed, UgroError, Unreachable
from ugro.node import net as forward

ANN = Caller("ann", Role.USER, "pid 1")
OLGA = Caller("olga", Role.OPERATOR, "pid 2")
PORT = Wanted("gpu1", 8265)


@dataclass(eq=False)
class FakeNode:
    spec: NodeSpec
    link: Any = "open"
    error: Unreachable | None = None
    opens: bool = False
    machine: Any = field(default_factory=lambda: SimpleNamespace(user="ugro"))

    async def ready(self, timeout_s: float, *, patiently: bool) -> FakeLink:
        if not self.opens:
            raise Unreachable(f"through {self.spec.name}", cause="test")
        return FakeLink()


class FakeLink:
    """Whose node accepts each connection."""

    def duplex(self, method: str, params: dict[str, Any]) -> FakeLink:
        return FakeLink()

    async def opened(self) -> None:
        pass

    def cancel(self) -> None:
        pass


class FakeInventory:
    def __init__(self, account: str | None, *logins: FakeNode) -> None:
        self.known_logins = KnownLogins()
        self.node = FakeNode(NodeSpec("gpu1", account=account))
        self._logins = {login.spec.name: login for login in logins}

    def named(self, word: str) -> FakeNode:
        assert word == "gpu1"
        return self.node

    def find(self, name: str) -> FakeNode | None:
        return self.node if name == "gpu1" else self._logins.get(name)


async def _no_job(word: str) -> Job:
    pytest.fail(f"asked for job {word}")


def tunnels_to(inventory: FakeInventory) -> Tunnels:
    cluster = SimpleNamespace(inventory=inventory, config=SimpleNamespace(ssh=SimpleNamespace(connect_timeout=1)))
    logins = Logins(cast(RunTracker, SimpleNamespace(inventory=inventory)))
    return Tunnels(cast(Cluster, cluster), Identity("", 0), _no_job, logins.name_for)


def outcome(caller: Caller | None, inventory: FakeInventory, *, is_chosen_here: bool = False) -> str:
    """Which login it went through, or why it did not."""

    async def attempt() -> str:
        if caller is not None:
            enter(caller)
        tunnels = tunnels_to(inventory)
        with pytest.raises(UgroError) as refused:
            await tunnels.open(PORT, is_chosen_here=is_chosen_here)
        assert tunnels.count == 0
        kind = "refused: " if isinstance(refused.value, NotAllowed) else ""
        return kind + refused.value.message

    return asyncio.run(attempt())


def login(**more: Any) -> FakeNode:
    return FakeNode(NodeSpec("gpu1").login("ann"), **more)


def test_where_all_jobs_have_one_account_a_user_has_it_too() -> None:
    assert outcome(ANN, FakeInventory(None)) == "through gpu1"


def test_a_user_without_an_open_login_does_not_get_the_nodes_own() -> None:
    assert outcome(ANN, FakeInventory("{user}")) == "refused: gpu1 has no open login of ann's"


def test_a_user_gets_as_far_as_a_job_of_theirs_would() -> None:
    assert outcome(ANN, FakeInventory("{user}", login())) == "through ann@gpu1"
    denied = Unreachable("login denied", cause="login-denied")
    assert outcome(ANN, FakeInventory("{user}", login(link=None, error=denied))) == "login denied", "and is not dialled"


def test_an_account_that_is_the_nodes_own_needs_no_login() -> None:
    assert outcome(ANN, FakeInventory("ugro")) == "through gpu1"


@pytest.mark.parametrize("caller", [OLGA, None], ids=["operator", "the agent itself"])
def test_operators_and_the_agent_use_the_nodes_own(caller: Caller | None) -> None:
    assert outcome(caller, FakeInventory("{user}")) == "through gpu1"


def test_a_port_that_the_agent_has_chosen_is_reached_for_everybody_who_may_use_it() -> None:
    assert outcome(ANN, FakeInventory("{user}"), is_chosen_here=True) == "through gpu1"


def test_one_user_does_not_take_all_connections_to_a_node() -> None:
    async def fill(tunnels: Tunnels, user: str, *, shares_account: bool = False) -> tuple[list[Duplex], str]:
        """All that there is room for, and what is said about one more."""
        enter(Caller(user, Role.USER, "", shares_account=shares_account))
        found: list[Duplex] = []
        while len(found) <= forward.MOST:
            try:
                found.append(await tunnels.open(PORT))
            except NotAllowed as refused:
                return found, refused.message
        return found, "there is room for more"

    async def scenario() -> None:
        inventory = FakeInventory(None)
        tunnels = tunnels_to(inventory)
        for _ in range(forward.MOST):
            with pytest.raises(Unreachable):  # and it takes no room
                await tunnels.open(PORT)
        inventory.node.opens = True
        of_ann, refused = await fill(tunnels, "ann")
        assert (len(of_ann), refused) == (16, "you have 16 connections to gpu1, which is the most at once")
        of_bob, _ = await fill(tunnels, "bob")
        of_root, refused = await fill(tunnels, "root", shares_account=True)
        assert (len(of_bob), len(of_root)) == (16, 16), "the owner may have more, as far as there is room"
        assert refused == "48 connections to gpu1 are open, which is the most at once"
        for duplex in (*of_ann, *of_ann[:3], *of_bob):
            tunnels.close(duplex)
        assert len((await fill(tunnels, "ann"))[0]) == 16, "each that is closed makes room for one"
        assert len((await fill(tunnels, "root", shares_account=True))[0]) == 16

    assert MOST_OF_NODE < forward.MOST, "what the agent needs itself is not theirs to take"
    asyncio.run(scenario())
