"""The crash points once more, with the state in PostgreSQL; and its server killed while the agent stands at them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.proof.place import Place
from tests.proof.test_crash_points import EXPECTED, LATER, killed_at, ready, submit_all
from tests.rig import postgres
from tests.rig.judge import Final, Task
from tests.rig.postgres import PostgresServer
from tests.rig.postgres_relay import PostgresRelay
from tests.rig.waiting import wait_until
from ugro.kernel.store.address import PostgresAddress, write_address
from ugro.kernel.support.process import POINTS
from ugro.kernel.support.state_dir import StateDir

pytestmark = pytest.mark.proof
_REACHED_S = 60
_MOST_MORE = 30  # each takes a commit at least
# Before and after each kind of commit.
STANDS_AT = (
    "submit.asked", "submit.recorded", "start.recorded", "start.asked", "running.recorded", "cancel.recorded",
    "stop.answered", "conclude.begun", "conclude.recorded", "finish.begun", "finish.recorded",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    postgres.needed()
    server = PostgresServer()
    yield server
    server.stop()


class PostgresPlace(Place):
    def __init__(self, server: PostgresServer, address: PostgresAddress | None = None) -> None:
        super().__init__(3)
        self._server = server
        write_address(StateDir(self.home), address or server.address_of(self.home))

    def sql(self, statement: str) -> list[Any]:
        return self._server.sql(statement, database=self._server.database_of(self.home))


@pytest.mark.parametrize("point", [*POINTS, *LATER])
def test_an_agent_that_is_killed_at_any_step_goes_on_where_it_was(server: PostgresServer, point: str) -> None:
    killed_at(point, PostgresPlace(server))


@pytest.mark.parametrize("point", STANDS_AT)
def test_a_server_that_dies_at_any_step_of_the_agent_changes_nothing(server: PostgresServer, point: str) -> None:
    with PostgresPlace(server) as place:
        agent = ready(place.agent(f"{point}:pause"))
        with ThreadPoolExecutor(1) as pool:
            commands = pool.submit(hand_in, place)
            wait_until(lambda: agent.stands_still, _REACHED_S, f"the agent to stand still at {point}")
            server.kill()
            agent.let_go()
            server.start()
            commands.result(_REACHED_S)
        finals = place.finals()
        assert finals == EXPECTED, place.seen(f"the server died at {point}")
        place.judge(finals)


def hand_in(place: Place) -> None:
    submit_all(place)
    place.wait_begun("doomed")
    place.cancel("doomed")


@pytest.mark.parametrize("commit", range(1, 31, 3))
def test_a_connection_that_is_cut_in_a_commit_changes_nothing(server: PostgresServer, commit: int) -> None:
    """Whichever commit of the agent it is: every third one of the first 30, made by the server or not."""
    with PostgresRelay(server) as relay:
        relay.cut("unanswered" if commit % 2 else "unseen", commit)
        path = Path(relay.folder)
        with PostgresPlace(server, relay.address_of(path)) as place:
            ready(place.agent())
            hand_in(place)
            more = hand_in_until_cut(place, relay)
            finals = place.finals()
            assert relay.cuts == 1, place.seen(f"there was no commit {commit}")
            assert finals == EXPECTED | more, place.seen(f"commit {commit} was cut")
            place.judge(finals)


def hand_in_until_cut(place: Place, relay: PostgresRelay) -> dict[str, Final]:
    """A busy machine makes many changes in one commit, and the mix may end before the one that is to be cut."""
    more: dict[str, Final] = {}
    for number in range(_MOST_MORE):
        if relay.cuts:
            break
        task = Task(f"more-{number}")
        place.submit(task)
        wait_until(lambda task=task: place.job(task.token).is_final, _REACHED_S, task.token)  # type: ignore[misc]
        more[task.token] = Final("succeeded", 1, 0)
    return more
