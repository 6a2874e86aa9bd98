"""Keepalives on a clock of the test's own: minutes pass in no time, and nothing depends on the machine's load."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

import pytest

from ugro.kernel.links.link import ANSWER_IN_TIME_S, INTERVAL_S, SILENCE_S, Keepalive
from ugro.node import wire


class LeapingSelector(selectors.SelectSelector):
    """Where nothing is ready, time leaps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # any

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.leaps = LeapingSelector()
        super().__init__(self.leaps)

    def time(self) -> float:
        return self.leaps.now


class Peer:
    """The other side: answers at once, late or not at all."""

    def __init__(self, loop: LeapingLoop) -> None:
        self._loop = loop
        self.pings: list[float] = []
        self.silent_s: list[float] = []
        self.noticed_at = 0.0
        self.answer_after_s: float | None = 0.0
        self.clock_offset_s = 0.0
        self.keepalive = Keepalive(self._receive, self._note_silence, clock=loop.time)

    def _note_silence(self, silent_s: float) -> None:
        self.noticed_at = self._loop.time()
        self.silent_s.append(silent_s)

    def _receive(self, number: int) -> None:
        self.pings.append(self._loop.time())
        if self.answer_after_s is not None:
            self._loop.call_later(self.answer_after_s, self._answer, number)

    def _answer(self, number: int) -> None:
        self.keepalive.heard()
        self.keepalive.answered(number, time.time() + self.clock_offset_s)


def played(scenario: Callable[[Peer], Any]) -> Peer:
    loop = LeapingLoop()

    async def play() -> Peer:
        peer = Peer(loop)
        await scenario(peer)
        peer.keepalive.stop()
        return peer

    try:
        return loop.run_until_complete(play())
    finally:
        loop.close()


def test_a_peer_that_answers_is_pinged_on_and_on_and_never_called_silent() -> None:
    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(60)

    peer = played(scenario)
    assert peer.silent_s == []
    assert len(peer.pings) == pytest.approx(60 / INTERVAL_S, abs=2)


@pytest.mark.parametrize("hangs_after_s", [0.0, 0.1, 0.9, 1.0, 1.9, 2.0, 7.3, 30.5])
def test_a_peer_that_falls_silent_is_noticed_within_ten_seconds_whenever_it_does(hangs_after_s: float) -> None:
    hung_at = 1000 + hangs_after_s

    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(hangs_after_s)
        peer.answer_after_s = None
        await asyncio.sleep(20)

    peer = played(scenario)
    assert hung_at < peer.noticed_at <= hung_at + 9.5
    assert peer.silent_s[0] > SILENCE_S


def test_a_silent_peer_is_reported_once() -> None:
    async def scenario(peer: Peer) -> None:
        peer.answer_after_s = None
        peer.keepalive.start()
        await asyncio.sleep(100)

    assert len(played(scenario).silent_s) == 1


def test_output_counts_as_a_sign_of_life_when_answers_queue_behind_it() -> None:
    async def scenario(peer: Peer) -> None:
        peer.answer_after_s = None
        peer.keepalive.start()
        for _ in range(60):
            await asyncio.sleep(1)
            peer.keepalive.heard()

    assert played(scenario).silent_s == []


def test_after_our_own_sleep_the_peer_gets_its_time_anew() -> None:
    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(1.5)
        peer.answer_after_s = None
        peer._loop.leaps.now += 3600  # this machine was suspended
        await asyncio.sleep(SILENCE_S - 2)
        assert peer.silent_s == []
        await asyncio.sleep(4)

    assert len(played(scenario).silent_s) == 1


def test_the_quality_is_the_recent_round_trip_and_the_clock_of_the_quickest_answer() -> None:
    async def scenario(peer: Peer) -> None:
        peer.clock_offset_s, peer.answer_after_s = 5.0, 0.010
        peer.keepalive.start()
        await asyncio.sleep(9)

    quality = played(scenario).keepalive.quality()
    assert quality.rtt_s == pytest.approx(0.010, abs=1e-6)
    assert quality.loss_ratio == 0.0
    assert quality.clock_offset_s == pytest.approx(5.0, abs=0.5)


def test_late_and_missing_answers_count_as_loss_and_pings_under_way_do_not() -> None:
    ratios: list[float] = []

    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(20.5)
        peer.answer_after_s = ANSWER_IN_TIME_S + 0.2
        await asyncio.sleep(0.9)
        ratios.append(peer.keepalive.quality().loss_ratio)
        await asyncio.sleep(20)
        ratios.append(peer.keepalive.quality().loss_ratio)

    played(scenario)
    assert ratios[0] == 0.0
    assert ratios[1] == pytest.approx(0.5, abs=0.1)


def test_a_node_whose_clock_is_set_has_the_new_offset_at_the_next_answer() -> None:
    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(10)
        peer.clock_offset_s, peer.answer_after_s = -7200.0, 0.010  # slower than all before
        await asyncio.sleep(2.5)
        assert peer.keepalive.quality().clock_offset_s == pytest.approx(-7200.0, abs=0.5)

    played(scenario)


def test_a_clock_that_is_no_number_is_not_believed() -> None:
    async def scenario(peer: Peer) -> None:
        peer.clock_offset_s = float("nan")
        peer.keepalive.start()
        await asyncio.sleep(1)
        assert peer.keepalive.quality().clock_offset_s is None
        assert peer.keepalive.quality().rtt_s is not None

    played(scenario)


def test_an_answer_to_a_ping_never_sent_or_answered_before_is_no_answer() -> None:
    async def scenario(peer: Peer) -> None:
        peer.keepalive.start()
        await asyncio.sleep(1)
        before = peer.keepalive.quality()
        for number in (0, 1, 77, 2**32 - 1):
            with pytest.raises(wire.ProtocolError, match=f"ping {number}$"):
                peer.keepalive.answered(number, 0.0)
        assert peer.keepalive.quality() == before

    played(scenario)
