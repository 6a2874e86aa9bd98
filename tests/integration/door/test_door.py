"""A service's door with real HAProxy: who is let in, who gets a request, and what becomes of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest

from tests.integration.conftest import in_loop
from tests.rig.door import Load, open_door
from ugro.features.services.model import NewServer, ServerState
from ugro.kernel.support.errors import NotAllowed, UsageError


@in_loop
async def test_a_request_waits_for_the_first_replica_and_replicas_come_and_go_under_load() -> None:
    """The one that runs in ``make test``: from nothing to a replaced replica."""
    async with open_door() as rig:
        waiting = asyncio.create_task(rig.request("/stream"))
        await rig.until(lambda stats, _: stats.held == 1)
        await rig.add_replica("one", 0.01)
        assert (await waiting).body.startswith(b"data: one 0\n\n")
        load = Load(rig.port, 50)
        running = asyncio.create_task(load.run(120))
        await rig.until(lambda *_: load.names["one"] > 10)
        await rig.add_replica("two", 0.01)
        await rig.door.drain("one")
        await rig.until(lambda _, servers: not servers["one"].sessions)
        await rig.door.remove("one")
        rig.kill_replica("one")
        await rig.until(lambda *_: load.names["two"] > 10)
        load.is_enough = True
        await running
        assert load.failures == []
        stats = await rig.door.stats()
        assert stats.requests == len(load.seconds) + 1
        assert stats.errors == stats.held == stats.queued == 0
        assert stats.servers["two"].requests == load.names["two"]
        assert 0.008 < stats.servers["two"].latency.p50_s < 10
        assert list(await rig.door.servers()) == ["two"]


@pytest.mark.proof
@in_loop
async def test_many_requests_wait_whatever_their_size_and_more_than_allowed_are_refused() -> None:
    async with open_door(most_waiting=20) as rig:
        large = b"x" * 1_000_000
        waiting = [asyncio.create_task(rig.request(method="POST", body=large)) for _ in range(20)]
        await rig.until(lambda stats, _: stats.held == 20)
        refused = await rig.request()
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert refused.document["error"]["message"] == "20 requests wait already"
        await rig.add_replica("one", 0.01)
        answers = await asyncio.gather(*waiting)
        assert {(answer.status, answer.document["bytes"]) for answer in answers} == {(200, 1_000_000)}
        assert (await rig.door.stats()).held == 0


@pytest.mark.proof
@in_loop
async def test_a_request_waits_no_longer_than_it_may() -> None:
    async with open_door(wait_s=0.5) as rig:
        answer = await rig.request()
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert answer.document["error"]["message"] == "no replica is ready"
        assert answer.seconds >= 0.5
    async with open_door(wait_s=0.0) as rig:
        assert (await rig.request()).status == 503


@pytest.mark.proof
@in_loop
async def test_a_client_that_stops_waiting_leaves_no_request_behind() -> None:
    async with open_door() as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await rig.until(lambda stats, _: stats.held == 1)
        writer.close()
        await rig.until(lambda stats, _: stats.held == 0)


@pytest.mark.proof
@in_loop
async def test_keys_are_needed_and_can_be_revoked_while_it_runs() -> None:
    keys = {hashlib.sha256(key.encode()).hexdigest(): name for key, name in (("sk-a", "ann"), ("sk-b", "bob"))}
    async with open_door(secret="inner", needs_key=True) as rig:
        await rig.add_replica("one")
        assert (await rig.request()).status == 401
        await rig.door.set_keys(keys)
        for wrong in ({}, {"authorization": "Bearer sk-c"}, {"authorization": "sk-a"}, {"authorization": "Basic sk-a"}):
            answer = await rig.request(headers=wrong)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.document["error"]["type"] == "invalid_request_error"
        answer = await rig.request(headers={"authorization": "Bearer sk-a", "x-forwarded-for": "6.6.6.6"})
        assert answer.status == 200
        seen = answer.document["headers"]
        assert (seen["authorization"], seen["x-forwarded-for"]) == ("Bearer inner", "127.0.0.1")
        assert seen["x-forwarded-proto"] == "http"
        assert seen["x-request-id"] == answer.headers["x-request-id"]
        await rig.door.set_keys({digest: name for digest, name in keys.items() if name == "bob"})
        assert (await rig.request(headers={"authorization": "Bearer sk-a"})).status == 401
        assert (await rig.request(headers={"authorization": "Bearer sk-b"})).status == 200
        assert (await rig.door.stats()).denied == 6
        assert b"sk-" not in (rig.folder / "state" / "door.json").read_bytes()
        for path in (rig.folder / "door").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.proof
@in_loop
async def test_a_request_id_of_the_client_is_kept_if_it_is_one() -> None:
    async with open_door() as rig:
        await rig.add_replica("one")
        kept = await rig.request(headers={"x-request-id": "mine-1"})
        assert kept.headers["x-request-id"] == kept.document["headers"]["x-request-id"] == "mine-1"
        replaced = await rig.request(headers={"x-request-id": "a b"})
        assert len(replaced.headers["x-request-id"]) == 36


@pytest.mark.proof
@in_loop
async def test_bodies_and_headers_have_limits() -> None:
    async with open_door(most_body_bytes=2_000_000) as rig:
        await rig.add_replica("one")
        assert (await rig.request(method="POST", body=b"x" * 1_000_000)).document["bytes"] == 1_000_000
        for length in (2_000_001, 1 << 32, (1 << 64) - 1):
            too_large = await rig.request(method="POST", headers={"content-length": str(length)})
            assert too_large.status == 413
            assert "2000000 bytes" in too_large.document["error"]["message"]
        unknown = await rig.request(method="POST", headers={"transfer-encoding": "chunked"})
        assert unknown.status == 411
        assert (await rig.request(headers={"x-much": "y" * 80_000})).status == 400


@pytest.mark.proof
@in_loop
async def test_a_slow_client_takes_no_place_of_a_replica() -> None:
    """The replica has one place; a client that sends its request slowly does not take it."""
    async with open_door() as rig:
        server = await rig.start_replica("one")
        await rig.door.add(replace(server, limit=1))
        slow = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(5)]
        for _, writer in slow:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
        assert (await rig.request()).status == 200
        reader, writer = slow[0]
        writer.write(b"x" * 996)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        reader, _ = slow[1]
        async with asyncio.timeout(40):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        for _, writer in slow:
            writer.close()


@pytest.mark.proof
@in_loop
async def test_streams_come_piece_by_piece_and_web_sockets_pass() -> None:
    async with open_door(answer_s=3.0) as rig:
        await rig.add_replica("one", 1.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        arrivals = []
        for number in range(10):
            assert f"one {number}".encode() in await reader.readuntil(b"\n\n\r\n")
            arrivals.append(asyncio.get_running_loop().time())
        assert arrivals[-1] - arrivals[0] > 8.5, "ten seconds, longer than an answer may pause"
        assert await reader.readuntil(b"\r\n\r\n") == b"0\r\n\r\n"
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        writer.write(b"GET /socket HTTP/1.1\r\nHost: x\r\n" + upgrade + key + b"\r\n")
        assert b" 101 " in (await reader.readuntil(b"\r\n\r\n"))
        for size in (1, 100_000):
            writer.write(b"z" * size)
            assert await reader.readexactly(size) == b"z" * size
        writer.close()


@pytest.mark.proof
@in_loop
async def test_an_answer_of_a_replica_is_never_replaced() -> None:
    async with open_door() as rig:
        await rig.add_replica("one")
        await rig.add_replica("two")
        answers = [await rig.request("/fail") for _ in range(10)]
        assert {answer.status for answer in answers} == {500}
        assert {answer.name for answer in answers} == {"one", "two"}
        stats = await rig.door.stats()
        assert (stats.errors, sum(one.errors for one in stats.servers.values())) == (10, 10)


@pytest.mark.proof
@in_loop
async def test_a_canary_gets_its_share_and_what_it_drops_goes_to_the_others() -> None:
    async with open_door() as rig:
        for name in ("one", "two", "three"):
            await rig.add_replica(name)
        await rig.door.add(replace(await rig.start_replica("new"), canary=True))
        names = Counter[str]()
        for share, least, most in ((0.0, 0, 0), (0.2, 40, 85), (1.0, 300, 300)):
            await rig.door.share_canary(share)
            names = Counter([(await rig.request()).name for _ in range(300)])
            assert least <= names["new"] <= most, share
        rig.kill_replica("new")
        answers = [await rig.request(method="POST", body=b"x") for _ in range(20)]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.name for answer in answers}) == 3


@pytest.mark.proof
@in_loop
async def test_requests_wait_at_the_door_for_a_replica_with_a_limit() -> None:
    async with open_door() as rig:
        server = await rig.start_replica("one", 0.2)
        await rig.door.add(replace(server, limit=2))
        running = [asyncio.create_task(rig.request()) for _ in range(6)]
        seen = await rig.until(lambda stats, _: stats.queued == 4)
        assert (seen.sessions, seen.held, seen.servers["one"].sessions) == (6, 0, 2)
        await rig.door.add(replace(server, limit=4, weight=7))
        assert {answer.status for answer in await asyncio.gather(*running)} == {200}
        assert (await rig.door.servers())["one"].weight == 7


@pytest.mark.proof
@in_loop
async def test_what_cannot_be_done_is_said_and_changes_nothing() -> None:
    async with open_door() as rig:
        server = await rig.add_replica("one", 0.5)
        for wrong in (
            replace(server, name="a b"),
            replace(server, name="waiting"),
            replace(server, name="x", address="host; shutdown"),
            replace(server, name="x", weight=0),
            replace(server, name="x", port=70_000),
            replace(server, port=1),
        ):
            with pytest.raises(UsageError):
                await rig.door.add(wrong)
        with pytest.raises(UsageError):
            await rig.door.set_weight("nobody", 3)
        with pytest.raises(UsageError):
            await rig.door.share_canary(2)
        with pytest.raises(UsageError):
            await rig.door.set_keys({"short": "me"})
        running = asyncio.create_task(rig.request())
        await rig.until(lambda _, servers: servers["one"].sessions == 1)
        with pytest.raises(NotAllowed, match="one has 1 requests"):
            await rig.door.remove("one")
        assert (await running).status == 200
        await rig.door.remove("nobody")
        assert list(await rig.door.servers()) == ["one"]
        assert json.loads(await rig._ask(b'{"do": "nothing"}\n'))["kind"] == "invalid"
        assert json.loads(await rig._ask(b"no JSON\n"))["kind"] == "invalid"


@pytest.mark.proof
@in_loop
async def test_a_replica_that_fails_its_health_checks_gets_nothing_until_it_is_well() -> None:
    async with open_door(health_path="/health", health_interval_s=0.3) as rig:
        await rig.add_replica("one")
        await rig.door.add(NewServer("gone", "127.0.0.1", 1))
        await rig.until(lambda _, servers: servers["gone"].state is ServerState.DOWN)
        await rig.until(lambda _, servers: servers["one"].state is ServerState.READY)
        assert {(await rig.request()).name for _ in range(10)} == {"one"}
