"""Micro-batches of one round are equally large, and all samples are in one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ugro.train.rules.partition import chosen, is_whole, rounds


@given(st.integers(1, 500), st.integers(1, 64))
def test_all_samples_are_in_micro_batches_no_larger_and_no_more_than_asked_for(total: int, wanted: int) -> None:
    found = rounds(total, wanted)
    assert sum(count * size for count, size in found) == total
    assert max(size for _, size in found) == -(-total // min(total, wanted))
    assert sum(count for count, _ in found) <= wanted
    assert len(found) <= 2
    assert len(found) == 1 or found[1][1] < found[0][1]


def test_a_batch_is_cut_evenly_where_that_is_possible() -> None:
    assert [chosen(total, 3) for total in (48, 64, 60, 24, 12)] == [12, 8, 12, 12, 12]
    assert chosen(49, 3) == 7
    assert chosen(13, 3) == 13
    assert chosen(2, 3) == 2


@given(st.integers(1, 300), st.integers(2, 6))
def test_interleaved_stages_get_whole_rounds_if_the_batch_allows_it(total: int, ranks: int) -> None:
    count = chosen(total, ranks, 2)
    assert 1 <= count <= total
    if total % ranks == 0:
        assert is_whole(count, ranks)
