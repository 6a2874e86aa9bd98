"""Ranks that agree on their next group: threads here, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.rig.waiting import wait_until
from ugro.kernel.support.errors import UgroError
from ugro.train.elastic_meeting import Formed, LeftBehind, Meeting, Rules

torch = pytest.importorskip("torch")

GRACE_S = 0.2
RULES = Rules(min_ranks=1, timeout_s=30.0, grace_s=GRACE_S)


@pytest.fixture
def port() -> Iterator[int]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def at_once() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def founders(port: int, ranks: int = 3, rules: Rules = RULES) -> list[Meeting]:
    made = [Meeting("127.0.0.1", port, rank, rules) for rank in range(ranks)]
    for one in made:
        one.members = frozenset(range(ranks))
        assert not one.joins
    return made


def form(pool: ThreadPoolExecutor, meetings: list[Meeting]) -> list[Future[Formed]]:
    return [pool.submit(one.form, one.number + 1, takes=True) for one in meetings]


def test_those_who_are_left_agree(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, one, _ = founders(port)
    found = [future.result(20) for future in form(at_once, [zero, one])]
    assert [formed.ranks for formed in found] == [(0, 1), (0, 1)]
    assert found[0].number == 1


def test_one_whose_process_answers_is_waited_for_until_its_script_comes(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, one, two = founders(port)
    for meeting in (zero, one, two):
        meeting.listen()
    early = form(at_once, [zero, one])
    wait_until(lambda: two.is_called, 20)
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * GRACE_S:
        assert not early[0].done()
        threading.Event().wait(0.02)
    late = form(at_once, [two])
    assert {future.result(20).ranks for future in (*early, *late)} == {(0, 1, 2)}


def test_one_that_works_for_longer_than_the_limit_for_silence_is_waited_for(
    port: int, at_once: ThreadPoolExecutor
) -> None:
    limit_s = 2.0
    zero, one, two = founders(port, rules=Rules(min_ranks=1, timeout_s=limit_s, grace_s=GRACE_S))
    for meeting in (zero, one, two):
        meeting.listen()
    early = form(at_once, [zero, one])
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * limit_s:
        two.spoke()
        assert not early[0].done()
        threading.Event().wait(0.05)
    late = form(at_once, [two])
    assert {future.result(20).ranks for future in (*early, *late)} == {(0, 1, 2)}


def test_one_that_comes_too_late_has_no_place(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, one, two = founders(port)
    for future in form(at_once, [zero, one]):
        assert future.result(20).ranks == (0, 1)
    with pytest.raises(LeftBehind, match="without rank 2"):
        two.form(1, takes=True)


def test_a_process_that_was_started_again_joins_when_the_others_take_it(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, one, _ = founders(port)
    for future, meeting in zip(form(at_once, [zero, one]), (zero, one), strict=True):
        meeting.joined(future.result(20))
        meeting.listen()
    again = Meeting("127.0.0.1", port, 2, RULES)
    assert again.joins
    joining = at_once.submit(again.join)
    wait_until(lambda: zero.has_joiners and one.has_joiners, 20)
    found = [future.result(20) for future in (*form(at_once, [zero, one]), joining)]
    assert {formed.ranks for formed in found} == {(0, 1, 2)}
    assert [member.joins for member in found[0].members] == [False, False, True]
    zero.joined(found[0])
    assert not zero.has_joiners


def test_one_that_joins_does_not_come_to_a_group_that_has_broken(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, _ = founders(port, 2)
    again = Meeting("127.0.0.1", port, 1, RULES)
    zero.listen()
    joining = at_once.submit(again.join)
    wait_until(lambda: zero.has_joiners, 20)
    broken = at_once.submit(zero.form, 1, takes=True).result(20)
    assert joining.result(20).number == broken.number == 1
    joining = at_once.submit(again.join, 2)
    wait_until(lambda: zero.has_joiners, 20)
    assert not joining.done()
    assert at_once.submit(zero.form, 2, takes=True).result(20).ranks == (0, 1)
    assert joining.result(20).number == 2


def test_nobody_joins_while_the_others_are_at_an_exchange(port: int, at_once: ThreadPoolExecutor) -> None:
    zero, _ = founders(port, 2)
    again = Meeting("127.0.0.1", port, 1, RULES)
    joining = at_once.submit(again.join)
    zero.listen()
    wait_until(lambda: zero.has_joiners, 20)
    assert at_once.submit(zero.form, 1, takes=False).result(20).ranks == (0,)
    assert not joining.done()
    zero.joined(Formed(1, ()))
    zero.members = frozenset({0})
    assert at_once.submit(zero.form, 2, takes=True).result(30).ranks == (0, 1)
    assert joining.result(20).number == 2


def test_fewer_than_the_job_needs_do_not_go_on(port: int) -> None:
    zero, *_ = founders(port, rules=Rules(min_ranks=2, timeout_s=30.0, grace_s=GRACE_S))
    with pytest.raises(UgroError, match="1 are left, fewer than the 2"):
        zero.form(1, takes=True)


def test_one_group_is_formed_however_often_ranks_come_at_the_same_time(port: int, at_once: ThreadPoolExecutor) -> None:
    meetings = founders(port, 6)
    for number in range(1, 6):
        found = [future.result(20) for future in form(at_once, meetings)]
        assert {(formed.number, formed.ranks) for formed in found} == {(number, (0, 1, 2, 3, 4, 5))}
        for formed, meeting in zip(found, meetings, strict=True):
            meeting.joined(formed)
