"""What a node says of its runs is bounded, whatever it says."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.rig.liar import forged
from ugro.kernel.jobs.engine.runs import RankRecord, parse_news, parse_status
from ugro.kernel.support.errors import RemoteFailure

_NOW = {"boot_id": "b", "clock_s": 1.5}


def news(**document: Any) -> bytes:
    return json.dumps({"now": _NOW, "runs": [], **document}).encode()


def exit_of(**record: Any) -> dict[str, Any]:
    return forged(1, exit={"outcome": "failed", **record})


def log_of(content: bytes, size: int | None = None) -> dict[str, Any]:
    return {"content": base64.b64encode(content).decode(), "size": len(content) if size is None else size}


@pytest.mark.parametrize("attempt", [0, -1, 1.0, True, "1", None, 10**9 + 1, 10**30])
def test_a_run_has_an_attempt_that_can_be(attempt: Any) -> None:
    with pytest.raises(RemoteFailure, match="invalid run status"):
        parse_status({**forged(1), "attempt": attempt})


@pytest.mark.parametrize("rank", [-1, 1.5, "0", 10**6, 2**70, None])
def test_a_rank_is_a_small_number(rank: Any) -> None:
    for status in (exit_of(ranks=[{"rank": rank}]), forged(1, state={"ranks": [{"rank": rank}]})):
        with pytest.raises(RemoteFailure, match="invalid run status"):
            parse_status(status)


def test_a_run_has_no_more_ranks_than_a_node_can_have() -> None:
    with pytest.raises(RemoteFailure, match="5000 ranks"):
        parse_status(exit_of(ranks=[{"rank": 0}] * 5000))


def test_figures_that_cannot_be_are_unknown() -> None:
    record = {"rank": 0, "code": 2**80, "signal": "9", "ended_at": 1e300}
    assert parse_status(exit_of(ranks=[record])).ranks == (RankRecord(0),)
    assert parse_status(exit_of(failure={"rank": 2**80})).failed_rank is None


def test_the_last_lines_of_a_log_are_as_many_as_an_exit_record_can_have() -> None:
    lines = [f"{number} {'x' * 1000}" for number in range(500)]
    tail = parse_status(exit_of(failure={"tail": lines})).tail
    assert tail == tuple(lines[-len(tail) :])
    assert 60_000 < sum(map(len, tail)) < 65_536


def test_reasons_are_short() -> None:
    assert len(parse_status(exit_of(reason="x" * 10**6)).reason or "") == 2000


def test_logs_come_with_the_exit_only_if_they_are_small() -> None:
    assert parse_status(forged(1, logs={"0": log_of(b"x" * 8192)})).logs == ((0, b"x" * 8192),)
    assert parse_status(forged(1, logs={"0": log_of(b"x" * 5000), "1": log_of(b"x" * 5000)})).logs is None
    with pytest.raises(RemoteFailure, match="not as long as it says"):
        parse_status(forged(1, logs={"0": log_of(b"x", size=10)}))


def test_what_it_says_of_other_ranks_is_left_out() -> None:
    ranks = [{"rank": rank, "code": 1} for rank in range(4)]
    record = {"outcome": "failed", "ranks": ranks, "failure": {"rank": 3}}
    logs = {str(rank): log_of(b"x") for rank in range(4)}
    status = parse_status(forged(1, exit=record, state={"ranks": ranks}, logs=logs))
    assert status.of_ranks(range(4)) is status
    placed = status.of_ranks(range(1, 3))
    assert placed.known_ranks == (1, 2)
    assert placed.failed_rank is None
    assert placed.logs == ((1, b"x"), (2, b"x"))


def test_a_run_that_cannot_be_read_does_not_hide_the_others() -> None:
    found = parse_news(news(runs=[forged(1), {"job": "2"}, 7, forged(3)], gone=["4.1"]))
    assert [status.job for status in found.runs] == ["1", "3"]
    assert len(found.invalid) == 2
    assert found.gone == ("4.1",)


@pytest.mark.parametrize(
    "payload",
    [
        news(runs=[{}] * 1025),
        news(gone=["1.1"] * 1025),
        news(now={"boot_id": "b", "clock_s": -1}),
        news(now={"boot_id": "b" * 200, "clock_s": 1}),
        news().replace(b"1.5", b"1e999"),
        news().replace(b"1.5", b"NaN"),
        b"[" * 100_000,
        b"[]",
        b"{}",
    ],
)
def test_a_message_that_cannot_be_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteFailure, match="invalid report"):
        parse_news(payload)


def test_a_run_that_goes_on_tells_which_ranks_are_lost_and_who_trains() -> None:
    lost = [{"rank": 1, "signal": 9, "starts": 2}]
    members = {"number": 3, "ranks": [0, 2]}
    found = parse_status(forged(1, state={"ranks": [], "changes": 4, "lost": lost, "members": members}))
    assert (found.lost, found.members) == ((RankRecord(1, signal=9, starts=2),), (0, 2))
    assert (found.group, found.changes) == (3, 4)
    assert parse_status(exit_of(members=members)).members == (0, 2)
    assert found.of_ranks(range(1)).lost == ()


@pytest.mark.parametrize("members", [{"number": 3, "ranks": [-1]}, {"number": -5, "ranks": [1]}, {"ranks": [0] * 5000}])
def test_members_that_cannot_be_are_refused(members: Any) -> None:
    with pytest.raises(RemoteFailure, match="invalid run status"):
        parse_status(exit_of(members=members))
