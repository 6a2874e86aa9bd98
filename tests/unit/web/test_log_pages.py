"""Logs by pages: whatever is in them, between pages nothing is lost and nothing comes twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from ugro.web.pages.log import Found, Position, find, line_after
from ugro.web.pages.log_pages import (
    PAGE_BYTES,
    Line,
    Logs,
    Page,
    cursor_at,
    offset_at,
    page_after,
    page_before,
    times_between,
)

_WORDS = [b"step 17 loss 0.25", b"", b"\xc3\xa4\xe2\x82\xac" * 40, b"x" * 300, b"\xff\xfe no text", b"\x1b[31mred\x1b"]


def _write(path: Path, content: bytes, *, began: float = 1000.0, every: int = 2000) -> Path:
    """With an index of a line for each ``every`` bytes, a second apart."""
    path.write_bytes(content)
    lines = [f"time {began + at / every:.3f} {at}\n" for at in range(0, len(content), every)]
    path.with_suffix(".times").write_text("".join(lines))
    return path


def _text(seed: int, size: int, *, long_lines: float = 0.003) -> bytes:
    chance = random.Random(seed)
    parts: list[bytes] = []
    while sum(map(len, parts)) < size:
        parts.append(b"y" * 20_000 + b"\n" if chance.random() < long_lines else chance.choice(_WORDS) + b"\n")
    return b"".join(parts)


def _backwards(logs: Logs) -> list[Line]:
    page = page_before(logs)
    lines = list(page.lines)
    while any(page.begin.values()):
        cursor = page.begin
        page = page_before(logs, cursor)
        assert page.begin != cursor, "a page must come nearer to the beginning"
        lines = [*page.lines, *lines]
    return lines


def _onwards(logs: Logs) -> list[Line]:
    page = page_after(logs, {})
    lines = list(page.lines)
    while page.end != page.sizes and not page.lines[-1].is_open:
        cursor = page.end
        page = page_after(logs, cursor)
        assert page.end != cursor, "a page must come nearer to the end"
        lines += page.lines
    return lines


def _joined(lines: Sequence[Line], rank: int) -> str:
    return "".join(line.text + ("" if line.is_cut or line.is_open else "\n") for line in lines if line.rank == rank)


@pytest.mark.parametrize("seed", range(4))
def test_a_log_read_by_pages_from_either_end_is_the_log(tmp_path: Path, seed: int) -> None:
    content = _text(seed, 250_000)
    logs = {0: _write(tmp_path / "rank_0.log", content)}

    for lines in (_backwards(logs), _onwards(logs)):
        assert _joined(lines, 0) == content.decode("utf-8", "replace")
        assert [line.offset for line in lines] == sorted({line.offset for line in lines})


def test_many_ranks_are_read_in_the_order_of_time_without_loss(tmp_path: Path) -> None:
    contents = {rank: _text(rank, 40_000 * (rank + 1), long_lines=0) for rank in range(5)}
    logs = {rank: _write(tmp_path / f"rank_{rank}.log", text, every=3000 + rank) for rank, text in contents.items()}

    for lines in (_backwards(logs), _onwards(logs)):
        for rank, content in contents.items():
            assert _joined(lines, rank) == content.decode("utf-8", "replace")
        times = [line.at or 0.0 for line in lines]
        # Within a second, pages may put one rank's lines before another's.
        assert all(later >= earlier - 1 for earlier, later in pairwise(times))


def test_a_page_of_a_huge_log_reads_little_of_it(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    with log.open("wb") as file:
        file.truncate(1 << 32)
        file.seek((1 << 32) - 11)
        file.write(b"\nlast line\n")

    page = page_before({0: log})

    assert page.lines[-1].text == "last line"
    assert sum(len(line.text) for line in page.lines) <= PAGE_BYTES
    assert page.begin[0] >= (1 << 32) - PAGE_BYTES


def test_a_line_that_is_being_written_comes_again_when_it_is_longer(tmp_path: Path) -> None:
    log = _write(tmp_path / "rank_0.log", b"one\n 50 %")

    page = page_before({0: log})
    assert [(line.text, line.is_open) for line in page.lines] == [("one", False), (" 50 %", True)]
    log.write_bytes(b"one\n 50 % 100 %\ntwo\n")
    page = page_after({0: log}, page.end)

    assert [(line.text, line.is_open) for line in page.lines] == [(" 50 % 100 %", False), ("two", False)]
    assert page.end == page.sizes


def test_what_never_came_home_is_told_where_it_stood(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    head, tail = b"head\n" * 3, b"tail\n" * 6_000
    with log.open("wb") as file:
        file.write(head)
        file.seek(1_000_000)
        file.write(tail)
    log.with_suffix(".times").write_text(f"time 5.000 0\ngap {len(head)} 1000000\ntime 9.000 1000000\n")

    for lines in (_backwards({0: log}), _onwards({0: log})):
        assert [line.dropped_bytes for line in lines if line.dropped_bytes] == [1_000_000 - len(head)]
        assert [line.text for line in lines if not line.dropped_bytes] == ["head"] * 3 + ["tail"] * 6_000
        assert (lines[0].at, lines[-1].at) == (5.0, 9.0)


def test_a_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"

    assert page_before({0: log}) == Page((), {0: 0}, {0: 0}, {0: 0})
    assert find({0: log}, "x", Position(0, 0), is_backwards=False) == Found(None, None, 0)


def test_a_place_in_the_middle_begins_with_its_line_and_takes_the_others_along_in_time(tmp_path: Path) -> None:
    logs = {
        0: _write(tmp_path / "rank_0.log", b"first line\n" * 1000, every=1100),
        1: _write(tmp_path / "rank_1.log", b"second\n" * 1000, every=700),
    }

    cursor = cursor_at(logs, 0, 5505)

    assert cursor == {0: 5500, 1: 3500}


def test_the_index_is_searched_and_not_read(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.with_suffix(".times").write_text("".join(f"time {at}.000 {at * 10}\n" for at in range(100_000)))

    found = times_between(log, 500_000, 500_100)

    assert found.at(500_005) == 50_000.0
    assert found.at(500_099) == 50_009.0
    assert len(found.offsets) < 60
    assert offset_at(log, 77_777.5) == 777_770


def test_a_text_is_found_onwards_and_back_line_by_line_and_rank_by_rank(tmp_path: Path) -> None:
    logs = {
        0: _write(tmp_path / "rank_0.log", b"a\nFound twice: found\nb\nfound\n"),
        1: _write(tmp_path / "rank_1.log", b"z\n" * 2_000_000 + b"found\n"),
    }
    places, at = [], Position(0, 0)
    while (match := _search_all(logs, at, is_backwards=False)) is not None:
        places.append(match)
        at = line_after(logs, match)

    assert places == [Position(0, 2), Position(0, 23), Position(1, 4_000_000)]
    back, at = [], Position(1, 1 << 60)
    while (match := _search_all(logs, at, is_backwards=True)) is not None:
        back.append(match)
        at = match
    assert back == places[::-1]


def _search_all(logs: Logs, at: Position, *, is_backwards: bool) -> Position | None:
    """In steps of a MiB, as a page does it in larger ones."""
    found = find(logs, "FOUND", at, is_backwards=is_backwards, limit_bytes=1 << 20)
    while found.match is None and found.next is not None:
        found = find(logs, "FOUND", found.next, is_backwards=is_backwards, limit_bytes=1 << 20)
    return found.match
