"""Frames survive any cutting, and nothing but frames passes."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.node import wire
from ugro.node.wire import Decoder, ProtocolError, frame, message, parse

KINDS = st.sampled_from(sorted(wire.KINDS))
NUMBERS = st.integers(0, 2**32 - 1)
FRAMES = st.lists(st.tuples(KINDS, NUMBERS, st.binary(max_size=300)), max_size=8)
JSON = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[begin:end] for begin, end in pairwise(at)]


@given(FRAMES, st.lists(st.integers(0), max_size=10))
def test_frames_arrive_whole_and_in_order_however_the_stream_is_cut(
    frames: list[wire.Frame], cuts: list[int]
) -> None:
    decoder = Decoder()
    stream = b"".join(frame(*one) for one in frames)
    assert [found for piece in pieces(stream, cuts) for found in decoder.feed(piece)] == frames


@given(JSON)
def test_a_message_is_read_as_it_was_written(value: dict[str, object]) -> None:
    [(kind, number, payload)] = Decoder().feed(message(wire.RESULT, 7, value))
    assert (kind, number, parse(payload)) == (wire.RESULT, 7, value)


@given(st.integers(0, 255).filter(lambda kind: kind not in wire.KINDS), NUMBERS)
def test_an_unknown_kind_is_refused_at_its_header(kind: int, number: int) -> None:
    with pytest.raises(ProtocolError, match="not a frame"):
        list(Decoder().feed(struct.pack(">IBI", 5, kind, number)))


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    assert list(Decoder().feed(struct.pack(">IBI", wire.MAX_PAYLOAD, wire.OUT, 1))) == []
    with pytest.raises(ProtocolError, match="not a frame"):
        list(Decoder().feed(struct.pack(">IBI", wire.MAX_PAYLOAD + 1, wire.OUT, 1)))


@given(st.binary(max_size=2000))
def test_random_bytes_are_frames_or_a_protocol_error(noise: bytes) -> None:
    try:
        found = list(Decoder().feed(noise))
    except ProtocolError:
        return
    assert all(kind in wire.KINDS and len(payload) <= wire.MAX_PAYLOAD for kind, _, payload in found)


def test_frames_before_a_broken_one_are_still_delivered() -> None:
    feed = Decoder().feed(frame(wire.OUT, 1, b"good") + b"\xff" * 9)
    assert next(feed) == (wire.OUT, 1, b"good")
    with pytest.raises(ProtocolError):
        next(feed)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 500_000,
        "{}".encode("utf-16"),
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_what_is_no_json_object_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"not (JSON|a JSON object)"):
        parse(payload)


def test_a_complaint_about_garbage_stays_short() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(b"x" * wire.MAX_PAYLOAD)
    assert len(str(caught.value)) < 200


def test_a_message_over_the_limit_is_not_made() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        message(wire.CALL, 1, {"text": "x" * wire.MAX_PAYLOAD})


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have_is_not_sent(number: float) -> None:
    with pytest.raises(ProtocolError, match="cannot be encoded as JSON"):
        message(wire.RESULT, 1, {"ratio": number})


def test_a_value_nested_without_end_is_not_sent() -> None:
    nested: dict[str, object] = {}
    for _ in range(200_000):
        nested = {"a": nested}
    with pytest.raises(ProtocolError, match="cannot be encoded as JSON"):
        message(wire.RESULT, 1, nested)
    while nested:  # taken apart by hand: freeing it at once recurses as deeply
        nested = nested["a"]  # type: ignore[assignment]
