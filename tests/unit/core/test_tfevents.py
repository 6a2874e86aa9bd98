"""Scalars out of TensorBoard's event files: whole records only, whoever wrote them and however far they are."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.metric_files import event, field, fixed, record, simple, varint
from ugro.features.trackers.tfevents import Damaged, Scalar, masked, masked_all, parse

# The first records of a file that torch.utils.tensorboard wrote: a version, then a plain value, then two tensors.
WRITTEN_BY_TORCH = bytes.fromhex(
    "4800000000000000fe92489d0934e98bb2a2beda411a0d627261696e2e4576656e743a32522e0a2c74656e736f72626f6172642e7375"
    "6d6d6172792e7772697465722e6576656e745f66696c655f77726974657214bc13f9"
    "1e00000000000000d9dc12320911f18bb2a2beda412a130a110a0a6c6f73732f747261696e150000803f833441f8"
    "290000000000000037ff5f0009a6f18bb2a2beda412a1e0a1c0a03616363420808012a04000000004a0b0a090a077363616c61727328080a87"
    "2d000000000000003c418afb0903f28bb2a2beda412a220a200a0364626c420c08023208000000000000f03f4a0b0a090a077363616c617273"
    "5d10c87c"
)


def test_a_checksum_is_crc_32c_as_the_format_masks_it() -> None:
    crc = 0xE3069283  # of these digits, as every description of CRC-32C has it
    assert masked(b"123456789") == (((crc >> 15 | crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def test_checksums_of_many_are_those_of_each() -> None:
    chance = random.Random(1)
    contents = [chance.randbytes(length) for length in (0, 1, 7, 40, 41) for _ in range(50)] + [b"x" * 99]
    chance.shuffle(contents)
    assert masked_all(contents) == [masked(content) for content in contents]
    assert masked_all([]) == []


def test_one_damaged_record_among_many_ends_the_reading_there() -> None:
    records = [simple("loss", step, step / 2) for step in range(100)]
    records[60] = records[60][:-6] + b"\x17" + records[60][-5:]
    found, size = parse(b"".join(records))
    assert [one.step for one in found] == list(range(60))
    assert size == sum(map(len, records[:60]))


def test_what_torch_wrote_is_read() -> None:
    found, size = parse(WRITTEN_BY_TORCH)
    assert size == len(WRITTEN_BY_TORCH)
    assert [(one.tag, one.value) for one in found] == [("loss/train", 1.0), ("acc", 0.0), ("dbl", 1.0)]
    assert {one.step for one in found} == {0}
    assert all(1_700_000_000 < one.time_unix < 2_000_000_000 for one in found)


@given(st.floats(width=32), st.integers(-(2**63), 2**63 - 1), st.text(max_size=20))
def test_any_value_comes_back(value: float, step: int, tag: str) -> None:
    [found], _ = parse(simple(tag, step, value))
    assert (found.tag, found.step, found.time_unix) == (tag, step, 1.5)
    assert found.value == value or (math.isnan(value) and math.isnan(found.value))


def tensor(kind: int, content: bytes, shape: bytes = b"") -> bytes:
    return field(8, field(1, kind) + (field(2, shape) if shape else b"") + content)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tensor(1, field(4, struct.pack("<f", 2.5))), 2.5),
        (tensor(2, field(4, struct.pack("<d", 0.1))), 0.1),
        (tensor(3, field(4, struct.pack("<i", -7))), -7.0),
        (tensor(9, field(10, varint(-7))), -7.0),
        (tensor(9, field(10, 12)), 12.0),
        (tensor(1, fixed(5, "<f", 0.5)), 0.5),
        (tensor(1, b""), 0.0),
    ],
)
def test_a_number_in_a_tensor_is_one_however_it_stands_there(value: bytes, expected: float) -> None:
    [found], _ = parse(event("x", 1, value))
    assert found.value == expected


@pytest.mark.parametrize(
    "value",
    [
        field(4, field(1, 64)),  # a picture
        field(5, fixed(1, "<d", 0.0)),  # a histogram
        tensor(7, field(8, b"text")),
        tensor(1, field(4, struct.pack("<2f", 1, 2)), shape=field(2, field(1, 2))),
        tensor(1, field(4, b"abc")),
    ],
)
def test_what_is_no_scalar_is_passed_over(value: bytes) -> None:
    first, last = simple("a", 1, 1.0), simple("b", 2, 2.0)
    found, size = parse(first + event("x", 1, value) + last)
    assert [one.tag for one in found] == ["a", "b"]
    assert size == len(first + event("x", 1, value) + last)


@given(st.lists(st.integers(0, 400), max_size=12))
def test_a_file_that_grows_is_read_once_wherever_it_is_cut(cuts: list[int]) -> None:
    whole = b"".join(simple("loss", step, step / 2) for step in range(6))
    found: list[Scalar] = []
    offset = 0
    for cut in [*sorted(cuts), len(whole)]:
        new, size = parse(whole[offset:cut])
        found, offset = found + new, offset + size
    assert [(one.step, one.value) for one in found] == [(step, step / 2) for step in range(6)]
    assert offset == len(whole)


@given(st.integers(0, 44), st.integers(1, 255))
def test_a_damaged_record_is_told_and_those_before_it_are_kept(place: int, change: int) -> None:
    good, bad = simple("loss", 1, 0.5), bytearray(simple("loss", 2, 0.5))
    bad[place % len(bad)] ^= change
    found, size = parse(good + bytes(bad) + good)
    assert [one.step for one in found] == [1]
    assert size == len(good)
    with pytest.raises(Damaged):
        parse(bytes(bad) + good)


@given(st.binary(max_size=60))
def test_no_content_of_a_whole_record_is_too_strange(content: bytes) -> None:
    _, size = parse(record(content))
    assert size == len(record(content))
