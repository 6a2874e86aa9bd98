"""Columns and bins: what goes in comes out, however odd, and few bytes are between."""

from __future__ import annotations

import json
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ugro.kernel.telemetry import bins as binning
from ugro.kernel.telemetry import rules as records
from ugro.kernel.telemetry.bins import BadColumn, pack_real, pack_whole, unpack_real, unpack_whole

STEP = some.integers(-(2**53), 2**53)


@given(some.lists(STEP))
def test_whole_numbers_come_back(values: list[int]) -> None:
    assert unpack_whole(pack_whole(values)) == values


@given(some.lists(some.floats(width=64, allow_nan=True)) | some.lists(some.floats(width=32, allow_nan=True)))
def test_real_numbers_come_back_bit_by_bit(values: list[float]) -> None:
    found = unpack_real(pack_real(values))
    # A NaN of 32 bits is quiet; which of the many it is matters to nobody.
    assert [_bits(one) for one in found] == [_bits(one) for one in values]


def _bits(value: float) -> bytes:
    return struct.pack("<d", math.nan if math.isnan(value) else value)


def test_an_even_grid_takes_next_to_nothing() -> None:
    assert len(pack_whole(list(range(0, 400_000, 100)))) < 100
    assert len(pack_real([0.5] * 4000)) < 200


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x01\x04" + bytes(20) + b"not zlib", b"\x00\x63" + bytes(30)])
def test_a_damaged_column_is_an_error_of_its_own(content: bytes) -> None:
    with pytest.raises(BadColumn):
        unpack_whole(content)


@given(
    some.lists(some.tuples(some.integers(-1000, 1000), some.floats(-1e6, 1e6) | some.just(math.nan)), min_size=1),
    some.sampled_from([1, 2, 8, 64, 512]),
    some.integers(1, 5),
)
def test_bins_say_the_same_however_they_were_put_together(
    points: list[tuple[int, float]], width: int, parts: int
) -> None:
    whole = _bins(points, width)
    pieces = [_bins(points[at::parts], 1 if at % 2 else width) for at in range(parts) if points[at::parts]]
    merged = binning.together(pieces, width)
    assert (merged.numbers, merged.counts, merged.odd) == (whole.numbers, whole.counts, whole.odd)
    assert (merged.lows, merged.highs, merged.times_ms) == (whole.lows, whole.highs, whole.times_ms)
    assert merged.sums == pytest.approx(whole.sums, rel=1e-6, abs=1e-3)
    assert binning.unpack(whole.pack()) == whole


def _bins(points: list[tuple[int, float]], width: int) -> binning.Bins:
    rows = sorted(points, key=lambda point: point[0])
    # One time for a step: whichever part it is in, the first is the same.
    return binning.of_points(
        [step for step, _ in rows], [step + 5000 for step, _ in rows], [value for _, value in rows], width
    )


def test_dense_bins_are_halved_as_sparse_ones_are_regrouped() -> None:
    chance = random.Random(1)
    for first in (0, 1, -7):
        steps = list(range(first, first + 1001))
        values = [chance.gauss(0, 1) for _ in steps]
        fine = binning.of_points(steps, steps, values, 1)
        for width in (2, 4, 32):
            wide, exact = binning.together([fine], width), binning.of_points(steps, steps, values, width)
            assert (wide.numbers, wide.lows, wide.highs, wide.counts) == (
                exact.numbers, exact.lows, exact.highs, exact.counts
            )  # fmt: skip


def _line(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_values_may_stand_in_a_map_or_beside_the_step() -> None:
    inner = records.read(_line(step=3, time=1700000000.25, rank=2, attempt=1, values={"loss": 0.5, "n": 7}))
    assert inner == records.Record(3, 1700000000250, 2, {"loss": 0.5, "n": 7.0})
    flat = records.read(_line(step=3, time=1, loss=0.5, note="text", is_best=True, none=None))
    assert flat == records.Record(3, 1000, 0, {"loss": 0.5})


def test_records_of_a_kind_are_named_by_it_and_nested_numbers_by_their_path() -> None:
    found = records.read(_line(kind="profile", step=1, forward=0.1, ranks={"0": {"share": 3}}, own_s=[0.5, None, 2]))
    assert found is not None
    own = {"profile/own_s/0": 0.5, "profile/own_s/2": 2.0}
    assert found.values == {"profile/forward": 0.1, "profile/ranks/0/share": 3.0, **own}


def test_what_a_run_logs_keeps_its_own_names() -> None:
    found = records.read(_line(kind="log", step=1, time=1, rank=0, attempt=1, epoch=0, values={"loss": 0.5}))
    assert found is not None
    assert found.values == {"loss": 0.5}


def test_numbers_that_json_has_no_word_for_are_texts() -> None:
    found = records.read(b'{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": NaN, "e": "other"}')
    assert found is not None
    assert list(found.values) == ["a", "b", "c", "d"]
    assert math.isnan(found.values["a"])
    assert (found.values["b"], found.values["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"loss": 1}', b'{"step": "1", "loss": 1}', b'{"step": true, "loss": 1}',
        b'{"step": 1e3, "loss": 1}', b'{"step": 99999999999999999999, "loss": 1}', b'{"step": 1}',
        b"[" * 100_000, b'{"step": 1, "values": {}}', b'{"step": 1, "' + b"k" * 300 + b'": 1}',
    ],
)  # fmt: skip
def test_what_is_no_record_is_passed_over(line: bytes) -> None:
    assert records.read(line) is None


def test_a_bad_line_among_many_spoils_no_other_and_two_on_one_line_are_none() -> None:
    good = b'{"step": 1, "loss": 1.5}'
    for bad in (b"{", good + b"," + good, b"", b"\xff"):
        assert [record.step for record in records.read_all([good, bad, good])] == [1, 1]


def test_a_senseless_time_or_rank_is_none_and_what_it_says_of_its_attempt_counts_for_nothing() -> None:
    found = records.read(b'{"step": 1, "time": "now", "rank": -3, "attempt": "x", "loss": 1}')
    assert found == records.Record(1, 0, 0, {"loss": 1.0})
    assert records.read(b'{"step": 1, "time": 1e400, "loss": 1}') == found
