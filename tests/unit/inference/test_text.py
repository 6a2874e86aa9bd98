from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.services.inference.sequence import GrowingText, prefill_groups


def decode(tokens: Sequence[int]) -> str:
    """Each token is a byte, as in the worst byte-level tokenizer."""
    return bytes(tokens).decode("utf-8", errors="replace")


def streamed(text: GrowingText, tokens: Sequence[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(text.add(token))
        if text.is_stopped:
            return pieces
    return [*pieces, text.end()]


@given(st.text(max_size=40), st.text(max_size=8))
def test_pieces_of_a_text_are_the_text_and_hold_no_half_character(text: str, prompt: str) -> None:
    pieces = streamed(GrowingText(decode, prompt.encode()), text.encode())
    assert "".join(pieces) == text


@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_neither_hang_nor_vanish(content: bytes) -> None:
    assert "".join(streamed(GrowingText(decode), content)) == decode(content)


@pytest.mark.parametrize("last", ["😀", "€", "é", "\ufffd", "x"])
@pytest.mark.parametrize("count", range(6))
def test_a_character_after_some_that_say_unknown_is_whole(count: int, last: str) -> None:
    """U+FFFD is what the half of a character looks like, too."""
    said = "\ufffd" * count + last
    assert "".join(streamed(GrowingText(decode), said.encode())) == said


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    pieces = streamed(GrowingText(decode), b"\xff" * 40 + b"fine")
    assert "".join(pieces).endswith("fine")
    assert any(pieces[:20])


@pytest.mark.parametrize(
    ("said", "stops", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aab", ["ab"], "a"),
        ("ENDEN", ["END"], ""),
        ("almost EN", ["END"], "almost EN"),
        ("é and more", ["é"], ""),
        ("nothing", ["x", "yz"], "nothing"),
    ],
)
def test_a_stop_text_ends_it_and_no_part_of_it_is_shown(said: str, stops: list[str], shown: str) -> None:
    pieces = streamed(GrowingText(decode, stops=stops), said.encode())
    assert "".join(pieces) == shown
    assert all(shown.startswith("".join(pieces[:at])) for at in range(len(pieces)))


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_stops_cut_where_a_search_in_the_whole_text_would(said: str, stops: list[str]) -> None:
    pieces = streamed(GrowingText(decode, stops=stops), said.encode())
    # By time: the first stop text that is complete ends it.
    ends = [(said.find(stop) + len(stop), said.find(stop)) for stop in stops if stop in said]
    first = min((end for end, _ in ends), default=None)
    cut = min((at for end, at in ends if end == first), default=len(said))
    assert "".join(pieces) == said[:cut]


def test_prompts_of_like_lengths_are_computed_together_and_others_are_not() -> None:
    assert prefill_groups([], 100) == []
    assert prefill_groups([10, 12, 9], 100) == [3]
    assert prefill_groups([10, 10, 10], 20) == [2, 1]
    assert prefill_groups([500], 100) == [1]
    assert prefill_groups([4, 4, 90], 1000) == [2, 1]


@given(st.lists(st.integers(1, 300), max_size=20))
def test_padding_at_most_doubles_the_work(lengths: list[int]) -> None:
    sizes = prefill_groups(lengths, 1000)
    assert sum(sizes) == len(lengths)
    for size in sizes:
        group, lengths = lengths[:size], lengths[size:]
        assert size == 1 or size * max(group) <= min(1000, 2 * sum(group))
