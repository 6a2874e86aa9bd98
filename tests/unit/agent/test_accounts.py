"""Looks into a user database that may be slow, or hang: what is known meanwhile, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from tests.rig.waiting import wait_until
from ugro.kernel.access.service import ASKED_AGAIN_S, KNOWN_S, Lookups, is_member, user_name


class Database:
    """``is_there``: it answers; otherwise who asks waits for it."""

    def __init__(self) -> None:
        self.names = {1001: "ann"}
        self.asked: list[int] = []
        self.threads: set[int] = set()
        self.is_there = threading.Event()
        self.is_there.set()
        self.now = 0.0

    def look(self, uid: int) -> str | None:
        self.asked.append(uid)
        self.threads.add(threading.get_ident())
        assert self.is_there.wait(30)
        return self.names.get(uid)


def with_database(scenario: Callable[[Database, Lookups[int, str]], Awaitable[None]]) -> None:
    database = Database()

    async def main() -> None:
        await scenario(database, Lookups(database.look, lambda: database.now, wait_s=0.05))

    try:
        asyncio.run(main())
        assert threading.get_ident() not in database.threads, "the loop waits for nobody"
    finally:
        database.is_there.set()


async def until(predicate: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, predicate, 20)


def test_what_a_user_id_is_called_is_asked_again_after_a_while() -> None:
    async def scenario(database: Database, names: Lookups[int, str]) -> None:
        assert (await names.of(1001), await names.of(1002)) == ("ann", None)
        database.names.update({1001: "bob", 1002: "cho"})
        database.now = ASKED_AGAIN_S - 1
        assert (await names.of(1001), await names.of(1002), database.asked) == ("ann", None, [1001, 1002])
        database.now = KNOWN_S
        assert names.known(1001) is None
        assert (await names.of(1001), await names.of(1002)) == ("bob", "cho"), "the id of an account is another's now"

    with_database(scenario)


def test_an_answer_that_grows_old_is_renewed_while_nobody_waits() -> None:
    async def scenario(database: Database, names: Lookups[int, str]) -> None:
        await names.of(1001)
        database.names[1001] = "bob"
        database.now = ASKED_AGAIN_S
        assert await names.of(1001) == "ann"
        await until(lambda: names.known(1001) == "bob")
        assert database.asked == [1001, 1001]

    with_database(scenario)


def test_a_database_that_hangs_lets_in_those_it_has_known_for_a_while_and_nobody_else() -> None:
    async def scenario(database: Database, names: Lookups[int, str]) -> None:
        await names.of(1001)
        database.is_there.clear()
        assert await names.of(1002) is None, "it has not answered in time"
        database.now = KNOWN_S - 1
        assert await names.of(1001) == "ann"
        database.now = KNOWN_S
        assert [await names.of(1001) for _ in range(3)] == [None] * 3
        assert database.asked == [1001, 1002, 1001], "one question at a time for each"
        for uid in range(100):
            database.now += 0.001
            await asyncio.wait([asyncio.ensure_future(names.of(uid))], timeout=0.001)
        assert len(database.threads) <= 18, "and not many at once"
        database.is_there.set()
        await until(lambda: names.known(1001) == "ann")
        assert await names.of(1001) == "ann"

    with_database(scenario)


def test_the_user_database_of_this_machine_is_read() -> None:
    assert user_name(0) == "root"
    assert user_name(2**31 - 7) is None
    assert is_member(("root", "root"))
    assert not is_member(("root", "there-is-no-such-group"))
