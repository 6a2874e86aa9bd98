"""The index beside a log: when bytes came home and which never did; and the signal that wakes who follows it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ugro.kernel.files.results.log_mirror import LogIndex, LogIndexWriter, last_lines, line_begin
from ugro.kernel.files.results.log_stream import _Stream
from ugro.kernel.support.aio import ChangeSignal
from ugro.node import wire


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


def index_of(log: Path, text: str) -> LogIndex:
    log.with_suffix(".times").write_text(text)
    index = LogIndex(log)
    index.refresh()
    return index


def test_since_begins_where_bytes_came_at_that_time_or_later(log: Path) -> None:
    index = index_of(log, "time 100.000 0\ntime 110.500 50\ntime 3600.000 80\n")
    assert [index.offset_at(at, 99) for at in (0, 100.9, 101.1, 110, 1800, 3600, 4000)] == [0, 0, 50, 50, 80, 80, 99]


def test_a_log_that_came_whole_came_when_it_was_written(log: Path) -> None:
    index = LogIndex(log)
    index.refresh()
    assert index.offset_at(50, 3) == 3, "it is not there at all"
    log.write_text("all")
    os.utime(log, (100, 100))
    assert [index.offset_at(at, 3) for at in (0, 100.9, 101.1)] == [0, 0, 3]


def test_a_half_written_line_counts_when_it_is_whole(log: Path) -> None:
    index = index_of(log, "time 100.000 0\ngap 10 2")
    assert index.gap_at(10) is None
    log.with_suffix(".times").write_text("time 100.000 0\ngap 10 20\n")
    index.refresh()
    assert (index.gap_at(10), index.gap_at(19), index.gap_at(20)) == ((10, 20), (10, 20), None)
    assert (index.next_gap(0), index.next_gap(10)) == (10, None)
    assert (index.begin_after(9), index.begin_after(30)) == (0, 20)


def test_a_gap_that_is_noted_again_is_one_gap(log: Path) -> None:
    writer = LogIndexWriter(log)
    writer.note(5, 10)
    writer.note(5, 30)
    index = LogIndex(log)
    index.refresh()
    assert index.gap_at(29) == (5, 30)


def test_times_are_noted_at_most_once_a_second(log: Path) -> None:
    writer = LogIndexWriter(log)
    for offset in range(50):
        writer.note(offset, offset)
    assert len(log.with_suffix(".times").read_text().splitlines()) == 1


@pytest.mark.parametrize(("lines", "shown"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (9, "a\nb\nc\n")])
def test_the_tail_is_whole_lines(log: Path, lines: int, shown: str) -> None:
    log.write_text("a\nb\nc\n")
    assert log.read_text()[last_lines(log, 6, lines, 0) :] == shown


def test_the_tail_has_a_last_line_without_an_end_and_passes_blocks(log: Path) -> None:
    log.write_text("first\n" + "x" * 200_000 + "\nlast")
    assert last_lines(log, log.stat().st_size, 1, 0) == 200_007
    assert last_lines(log, log.stat().st_size, 2, 0) == 6


def test_a_line_is_shown_from_its_begin(log: Path) -> None:
    log.write_text("one\ntwo\nthree")
    assert [line_begin(log, at, 0) for at in (0, 2, 4, 6)] == [0, 0, 4, 4]


def frames(stream: _Stream) -> list[tuple[int, bytes]]:
    return [(kind, payload) for kind, _, payload in wire.Decoder().feed(b"".join(stream.read()))]


def test_a_reader_jumps_over_a_gap_and_says_how_much_is_missing(log: Path) -> None:
    log.write_bytes(b"begin\n" + bytes(94) + b"end\n")
    index_of(log, "gap 6 100\n")
    stream = _Stream(1, 1, 0, "gpu1", log)
    (announced, _), first = frames(stream)
    assert (announced, first) == (wire.CALL, (wire.OUT, b"begin\n"))
    [(kind, payload)] = frames(stream)
    assert kind == wire.CALL
    assert wire.parse(payload) == {"attempt": 1, "rank": 0, "node": "gpu1", "offset": 100, "dropped_bytes": 94}
    assert frames(stream) == [(wire.OUT, b"end\n")]
    assert frames(stream) == []


def test_the_tail_does_not_reach_into_a_gap(log: Path) -> None:
    log.write_bytes(bytes(100) + b"a\nb\n")
    index_of(log, "gap 0 100\n")
    assert _Stream(1, 1, 0, "gpu1", log).begin_of_tail(10) == 100


def test_a_log_that_is_not_there_yet_has_nothing_to_say(log: Path) -> None:
    stream = _Stream(1, 1, 0, "gpu1", log)
    assert (stream.begin_of_tail(3), stream.begin_since(5.0)) == (0, 0)
    assert [kind for kind, _ in frames(stream)] == [wire.CALL]
    assert frames(stream) == []


def test_a_change_between_a_look_and_a_wait_is_not_missed() -> None:
    async def work() -> None:
        signal = ChangeSignal()
        seen = signal.count
        signal.notify()
        assert await signal.wait(seen, 0.0)
        assert not await signal.wait(signal.count, 0.01)

    asyncio.run(work())


def test_a_signal_wakes_all_who_wait() -> None:
    async def work() -> None:
        signal = ChangeSignal()
        waiting = [asyncio.create_task(signal.wait(0, 10)) for _ in range(3)]
        leaving = asyncio.create_task(signal.wait(0, 10))
        await asyncio.sleep(0)
        leaving.cancel()
        signal.notify()
        assert await asyncio.gather(*waiting) == [True, True, True]

    asyncio.run(work())
