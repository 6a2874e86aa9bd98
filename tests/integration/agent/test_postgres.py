"""The state in PostgreSQL: one agent at a time, and a lost connection loses nothing and doubles nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rig import postgres
from tests.rig.postgres import PostgresServer, shared_server
from tests.rig.postgres_relay import Cut, PostgresRelay
from tests.rig.stores import in_store
from tests.rig.tiers import sample
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.moves import About, SmallLog
from ugro.kernel.store.address import PostgresAddress
from ugro.kernel.store.connection import ConnectionLost, newest_schema, tables
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import connect_plainly
from ugro.kernel.store.postgres import Postgres, export, load, mark_moved
from ugro.kernel.support.errors import NotAllowed, StoreAway, UgroError

T = TypeVar("T")
SPEC = JobSpec("train", ("true",))
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _installed() -> None:
    postgres.needed()


@pytest.fixture
def address(tmp_path: Path) -> PostgresAddress:
    return shared_server().address_of(tmp_path)


def with_store(backend: Postgres, work: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = Store(backend)
        await store.open()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def until_away(store: Store) -> None:
    await asyncio.to_thread(wait_until, lambda: store.away, PATIENCE_S, "the store to be away")


def database_in(address: PostgresAddress) -> str:
    return address.url.partition("@/")[2].partition("?")[0]


def sessions(server: PostgresServer, address: PostgresAddress) -> list[int]:
    """Of agents: the server's processes."""
    query = "SELECT pid, datname FROM pg_stat_activity WHERE application_name LIKE 'ugro%'"
    return [int(str(pid)) for pid, database in server.sql(query) if database == database_in(address)]


def test_a_second_agent_is_refused_and_told_who_uses_the_database(address: PostgresAddress) -> None:
    async def work(store: Store) -> None:
        other = Store(Postgres(address, patience_s=0.1))
        with pytest.raises(NotAllowed, match=f"is used by ugro agent {os.getpid()} on ") as refused:
            await other.open()
        await other.close()
        assert "pg_terminate_backend" in str(refused.value.hint)
        await store.next_generation()

    with_store(Postgres(address), work)
    assert with_store(Postgres(address), Store.next_generation) == 2, "its lock ended with it"


def test_a_session_that_was_cut_is_replaced_and_nothing_is_noticed(address: PostgresAddress) -> None:
    async def work(store: Store) -> None:
        server = shared_server()
        await store.jobs.submit(SPEC, "ann", "1")
        changes = store.changes
        [pid] = sessions(server, address)
        server.sql(f"SELECT pg_terminate_backend({pid})")
        assert [job.id for job in await store.jobs.newest(5)] == [1]
        await store.jobs.submit(SPEC, "ann", "2")
        assert store.changes > changes
        assert store.away is None

    with_store(Postgres(address), work)


@pytest.mark.parametrize("how", sample(["unseen", "unanswered", "half open"], "unanswered"))
def test_a_commit_whose_answer_is_lost_is_made_once(tmp_path: Path, how: Cut) -> None:
    async def work(store: Store) -> None:
        told: list[int] = []
        store.jobs.listen(lambda job: told.append(job.id))
        relay.cut(how)
        keys = [str(number) for number in range(20)]
        found = await asyncio.gather(*(store.jobs.submit(SPEC, "ann", key) for key in keys))
        assert relay.cuts == 1
        assert all(one.is_new for one in found)
        stored = await store.jobs.in_states([JobState.QUEUED])
        assert sorted(job.submit_key for job in stored) == sorted(keys)
        assert sorted(one.job.id for one in found) == [job.id for job in stored] == sorted(told)
        events = await store.jobs.events()
        assert len(events) == len(keys)

    with PostgresRelay(shared_server()) as relay:
        with_store(Postgres(relay.address_of(tmp_path)), work)


@pytest.mark.proof
def test_while_the_server_is_gone_the_store_waits_and_says_so(tmp_path: Path) -> None:
    server = PostgresServer()

    async def work(store: Store) -> None:
        await store.jobs.submit(SPEC, "ann", "before")
        server.kill()
        waiting = [asyncio.create_task(store.jobs.submit(SPEC, "ann", f"while {number}")) for number in range(5)]
        await until_away(store)
        assert "does not answer" in str(store.away)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(server.start)
        assert all(one.is_new for one in await asyncio.gather(*waiting))
        assert store.away is None
        found = await store.jobs.newest(10)
        assert sorted(job.submit_key for job in found) == ["before", *(f"while {number}" for number in range(5))]

    try:
        with_store(Postgres(server.address_of(tmp_path)), work)
    finally:
        server.stop()


@pytest.mark.proof
def test_a_server_that_is_killed_again_and_again_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    server = PostgresServer()
    is_over = threading.Event()

    def kill_and_start() -> None:
        for _ in range(5):
            server.kill()
            server.start()
        is_over.set()

    async def work(store: Store) -> None:
        killing = threading.Thread(target=kill_and_start)
        killing.start()
        number = 0
        while not is_over.is_set():
            found = await store.jobs.submit(SPEC, "ann", str(number))
            assert found.is_new, "it was made a second time"
            number += 1
        killing.join()
        stored = await store.jobs.in_states([JobState.QUEUED])
        assert sorted(int(job.submit_key or "") for job in stored) == list(range(number))

    try:
        with_store(Postgres(server.address_of(tmp_path)), work)
    finally:
        is_over.wait(PATIENCE_S)
        server.stop()


def test_an_agent_ends_if_another_has_taken_the_database_meanwhile(address: PostgresAddress) -> None:
    ended: list[UgroError] = []

    async def work(store: Store) -> None:
        server = shared_server()
        await store.next_generation()
        lost = sessions(server, address)
        other = Store(Postgres(address))
        server.sql(*(f"SELECT pg_terminate_backend({pid})" for pid in lost))
        await other.open()
        try:
            with pytest.raises(NotAllowed, match="is used by ugro agent"):
                await store.next_generation()
            with pytest.raises(StoreAway):
                await store.drained()
            assert await other.next_generation() == 2
        finally:
            await other.close()
        assert len(ended) == 1

    with_store(Postgres(address, on_taken=ended.append), work)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param("UPDATE ugro_store SET last = 'another'", "was used by another agent meanwhile", id="changed"),
        pytest.param("DROP TABLE ugro_store", "has lost its tables", id="dropped"),
        pytest.param("DELETE FROM ugro_store", "has lost its tables, or what is in ugro_store", id="emptied"),
    ],
)
def test_an_agent_ends_if_the_database_is_not_what_it_was(address: PostgresAddress, change: str, what: str) -> None:
    ended: list[UgroError] = []

    async def work(store: Store) -> None:
        server = shared_server()
        await store.next_generation()
        [pid] = sessions(server, address)
        server.sql(change, f"SELECT pg_terminate_backend({pid})", database=database_in(address))
        with pytest.raises(NotAllowed, match=what):
            await store.drained()
        assert len(ended) == 1

    with_store(Postgres(address, on_taken=ended.append), work)


@pytest.mark.proof
def test_an_agent_that_lost_its_database_ends_if_the_state_was_moved_meanwhile(tmp_path: Path) -> None:
    ended: list[UgroError] = []
    server = shared_server()
    direct, file = server.address_of(tmp_path), tmp_path / "state.db"

    async def work(store: Store) -> None:
        await store.next_generation()
        with relay.unreachable():
            server.sql(*(f"SELECT pg_terminate_backend({pid})" for pid in sessions(server, direct)))
            await until_away(store)
            with Postgres(direct).held():
                export(direct, file)
                mark_moved(direct, str(file))
        with pytest.raises(UgroError):
            await store.next_generation()
        [why] = ended
        assert f"its state was moved to {file}" in str(why)

    with PostgresRelay(server) as relay:
        with_store(Postgres(relay.address_of(tmp_path), on_taken=ended.append), work)
    with pytest.raises(NotAllowed, match=f"was moved to {file}") as refused:
        with_store(Postgres(direct), Store.next_generation)
    assert "ugro store migrate --to sqlite" in str(refused.value.hint)


def test_a_session_that_broke_unnoticed_is_a_lost_connection(address: PostgresAddress) -> None:
    """While a transaction was rolled back, for example. The database's thread would end with any other error."""
    backend, server = Postgres(address), shared_server()
    with backend.held():
        backend.begin()
        backend.look()
        server.sql(*(f"SELECT pg_terminate_backend({pid})" for pid in sessions(server, address)))
        backend.roll_back()
        with pytest.raises(ConnectionLost):
            backend.look()


@pytest.mark.proof
def test_a_database_without_its_row_is_refused_at_the_start(address: PostgresAddress) -> None:
    with_store(Postgres(address), Store.next_generation)
    shared_server().sql("DELETE FROM ugro_store", database=database_in(address))
    with pytest.raises(UgroError, match="has lost its tables") as refused:
        with_store(Postgres(address), Store.next_generation)
    assert refused.value.hint


@pytest.mark.proof
@pytest.mark.parametrize(("how", "is_there"), [("unanswered", True), ("unseen", False)])
def test_a_copy_whose_commit_was_not_answered_may_be_there_and_says_so(
    tmp_path: Path, how: Cut, is_there: bool
) -> None:
    in_store(tmp_path, submitted)
    server = shared_server()
    with PostgresRelay(server) as relay:
        target = Postgres(relay.address_of(tmp_path))
        with target.held():
            relay.cut(how)
            with pytest.raises(UgroError, match="the copy may be there or not") as failed:
                load(tmp_path / "state.db", target)
    assert "run it again" in str(failed.value.hint)
    found = "SELECT 1 FROM pg_tables WHERE tablename = 'jobs'"
    assert bool(server.sql(found, database=server.database_of(tmp_path))) == is_there


@pytest.mark.proof
def test_who_stops_does_not_wait_for_a_server_that_is_gone(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        relay.__exit__(None, None, None)  # nobody answers there any more
        waiting = asyncio.create_task(store.next_generation())
        await until_away(store)
        store.give_up()
        with pytest.raises(StoreAway, match="does not answer"):
            await waiting

    relay = PostgresRelay(shared_server())
    with_store(Postgres(relay.address_of(tmp_path)), work)


@pytest.mark.proof
def test_a_server_that_is_silent_is_reported_until_it_answers(address: PostgresAddress) -> None:
    async def work(store: Store) -> None:
        server = shared_server()
        [pid] = sessions(server, address)
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(store.next_generation())
            await until_away(store)
            assert "silent" in str(store.away)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await waiting == 1
        assert store.away is None

    with_store(Postgres(address, silent_s=0.2), work)


@pytest.mark.proof
def test_a_database_of_another_program_and_one_that_cannot_be_reached_are_refused(tmp_path: Path) -> None:
    server = shared_server()
    database = server.database_of(tmp_path)
    server.sql("CREATE TABLE accounts (id INTEGER)", database=database)
    with pytest.raises(UgroError, match="has tables of another program, such as accounts"):
        with_store(Postgres(PostgresAddress(server.url(database))), Store.next_generation)
    for url in (server.url("nowhere"), f"postgresql://ugro@/x?host={tmp_path}"):
        with pytest.raises(UgroError, match="cannot be used") as refused:
            with_store(Postgres(PostgresAddress(url)), Store.next_generation)
        assert refused.value.hint
    assert wait_until(lambda: not sessions(server, PostgresAddress(server.url(database))), what="no session to be left")


@pytest.mark.proof
def test_a_password_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    server = shared_server()
    database, secret = server.database_of(tmp_path), "s3cr3t ü"
    role = f"r{database}"
    server.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{secret}'", f"ALTER DATABASE {database} OWNER TO {role}")
    server.require_password(role)
    file = tmp_path / "password"
    file.write_text("wrong\n")
    file.chmod(0o600)
    address = PostgresAddress(server.url(database, role), file)
    with pytest.raises(UgroError, match="password authentication failed") as refused:
        with_store(Postgres(address), Store.next_generation)
    assert "wrong" not in f"{refused.value} {refused.value.hint}"
    file.write_text(f"{secret}\n")
    assert with_store(Postgres(address), Store.next_generation) == 1
    file.chmod(0o640)
    with pytest.raises(UgroError, match="others can read the password"):
        with_store(Postgres(address), Store.next_generation)


def test_both_engines_have_the_same_tables_columns_and_indexes(tmp_path: Path, address: PostgresAddress) -> None:
    with_store(Postgres(address), Store.next_generation)
    columns = (
        "SELECT table_name, column_name, is_nullable = 'NO' FROM information_schema.columns "
        "WHERE table_schema = 'public' AND table_name <> 'ugro_store' ORDER BY table_name, ordinal_position"
    )
    theirs = shared_server().sql(columns, database=database_in(address))
    indexes = (
        "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' "
        "AND indexname NOT IN (SELECT conname FROM pg_constraint)"
    )
    names = {str(name) for (name,) in shared_server().sql(indexes, database=database_in(address))}
    in_store(tmp_path, lambda store: store.resume("nobody"))
    with closing(connect_plainly(tmp_path / "state.db")) as db:
        ours = [
            (table.name, str(row["name"]), bool(row["notnull"] or row["pk"]))
            for table in sorted(tables(newest_schema("ugro.kernel.store")), key=lambda table: table.name)
            for row in db.execute(f"PRAGMA table_info({table.name})")
        ]
        assert theirs == ours
        query = "SELECT name FROM sqlite_master WHERE type = 'index' AND name NOT LIKE 'sqlite_%'"
        assert names == {row["name"] for row in db.execute(query)}


@pytest.mark.proof
def test_a_copy_there_and_back_is_the_same_row_by_row(tmp_path: Path, address: PostgresAddress) -> None:
    async def work(store: Store) -> None:
        [one, two] = [(await store.jobs.submit(SPEC, "ann", key)).job for key in ("1\0", "ü")]
        started = await store.jobs.start(one, Placement((Share("gpu1", gpus=(0,)),)), "fits")
        running = await store.jobs.move(started, JobState.RUNNING, "runs")
        await store.jobs.finish(running, SmallLog(one.id, 1, ((0, bytes(range(256))),)))
        await store.jobs.submit_many([(SPEC, "ann", f"many {number}", About()) for number in range(1005)])
        await store.notes.change(two.id, lambda note: replace(note, text="\U0010fffe 風扇", tags=("a",)))
        await store.jobs.standing.reserve(9000)

    in_store(tmp_path, work)
    state, back = tmp_path / "state.db", tmp_path / "back.db"
    target = Postgres(address)
    with target.held():
        counts = load(state, target)
    assert counts["jobs"] == 1007
    with pytest.raises(NotAllowed, match="is not empty"), target.held():
        load(state, target)
    with target.held():
        assert load(state, target, replaces=True) == counts
    assert export(address, back) == counts
    with closing(connect_plainly(state)) as one, closing(connect_plainly(back)) as other:
        for table in tables(newest_schema("ugro.kernel.store")):
            query = f"SELECT * FROM {table.name} ORDER BY {', '.join(table.key)}"
            assert list(map(tuple, one.execute(query))) == list(map(tuple, other.execute(query)))
        assert one.newest_id("jobs") == other.newest_id("jobs") == 9000
        assert one.newest_id("events", "seq") == other.newest_id("events", "seq")
    assert with_store(Postgres(address), submitted).id == 9001


async def submitted(store: Store) -> Job:
    return (await store.jobs.submit(SPEC, "ann", "new")).job
