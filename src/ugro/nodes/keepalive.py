"""Keepalives of one link: whether the peer answers, the round-trip time, and the offset of its clock."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ugro.core.node import LinkQuality
from ugro.core.support.clock import boot_clock_s
from ugro.remote import wire

INTERVAL_S = 2.0
# Together with one tick this detects a hung node within 10 s.
SILENCE_S = 8.0
ANSWER_IN_TIME_S = 1.0
_TICK_S = 1.0
_SET_S = 1.0  # a clock that differs by more was set
_REMEMBERED = 30  # one minute of pings


@dataclass(slots=True)
class _Ping:
    number: int
    sent: float
    rtt_s: float | None = None
    offset_s: float | None = None  # of the node's clock from ours
    ours_s: float = 0.0  # of our wall clock from the clock of our boot, at that time


class Keepalive:
    def __init__(
        self,
        send: Callable[[int], None],
        on_silence: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._on_silence = on_silence
        self._clock = clock
        self._pings: deque[_Ping] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._last_answered = 0
        self.revived_at: float | None = None  # when a peer that had been silent last answered again
        self._heard_at = self._clock()
        self._tick_at = self._heard_at
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._heard_at = self._clock()
        self._ping()
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        self._heard_at = self._clock()

    def answered(self, number: int, node_clock: float | None) -> None:
        """Each ping is answered at most once, and in order."""
        if not self._last_answered < number <= self._count:
            raise wire.ProtocolError(f"unexpected answer to ping {number}")
        self._last_answered = number
        now = self._clock()
        for ping in reversed(self._pings):
            if ping.number == number:
                ping.rtt_s = now - ping.sent
                if ping.rtt_s > ANSWER_IN_TIME_S:
                    self.revived_at = now
                if node_clock is not None and math.isfinite(node_clock):
                    self._note_clock(ping, node_clock - (time.time() - ping.rtt_s / 2))
                return

    def _note_clock(self, ping: _Ping, offset_s: float) -> None:
        """If the node's clock was set, what was measured before no longer counts."""
        ping.ours_s = time.time() - boot_clock_s()
        for other in self._pings:
            if other.offset_s is not None and abs(_now_s(other, ping.ours_s) - offset_s) > _SET_S + (ping.rtt_s or 0.0):
                other.offset_s = None
        ping.offset_s = offset_s

    def quality(self) -> LinkQuality:
        answered = [ping for ping in self._pings if ping.rtt_s is not None]
        if not answered:
            return LinkQuality()
        now = self._clock()
        due = [ping for ping in self._pings if ping.rtt_s is not None or now - ping.sent > ANSWER_IN_TIME_S]
        late = sum(1 for ping in due if ping.rtt_s is None or ping.rtt_s > ANSWER_IN_TIME_S)
        # The quickest answer bounds the clock's error best.
        timed = [ping for ping in answered if ping.offset_s is not None]
        best = min(timed, key=lambda ping: ping.rtt_s or 0.0, default=None)
        offset_s = None if best is None else _now_s(best, time.time() - boot_clock_s())
        rtts = [ping.rtt_s for ping in answered[-5:] if ping.rtt_s is not None]
        return LinkQuality(statistics.median(rtts), late / len(due), offset_s)

    def _ping(self) -> None:
        self._count += 1
        self._pings.append(_Ping(self._count, self._clock()))
        self._send(self._count)

    def _schedule(self) -> None:
        self._tick_at = self._clock() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._tick_at > INTERVAL_S:
            # This process was suspended or stopped, not the peer: the peer's time starts again.
            self._heard_at = now
        if now - self._heard_at > SILENCE_S:
            self._on_silence(now - self._heard_at)
            return
        if now - self._pings[-1].sent >= INTERVAL_S - _TICK_S / 10:
            self._ping()
        self._schedule()


def _now_s(ping: _Ping, ours_s: float) -> float:
    """The offset that it measured, from our clock as it is now: that may have been set since."""
    assert ping.offset_s is not None
    by_s = ours_s - ping.ours_s
    return ping.offset_s - by_s if abs(by_s) > _SET_S else ping.offset_s
