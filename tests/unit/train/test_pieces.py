"""Where the samples of a batch are: learnt from collating another number of them, and found again by their values."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import UsageError
from ugro.train.samples import REORDERED, Collate, Handed, Parts, sizes

torch = pytest.importorskip("torch")

# torch says once that it found no NumPy; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")

SAMPLES = 6
Pair = namedtuple("Pair", "x y")


@dataclass
class Named:
    x: Any
    names: list[str]
    scale: float = 2.0


def handed(collate: Callable[[Any], Any], samples: list[Any]) -> tuple[Any, Handed]:
    batch, rules = Collate(collate, is_weighted=False)(samples)
    return batch, Handed(batch, rules, len(samples))


def cut(collate: Callable[[Any], Any], samples: list[Any], passed: Callable[[Any], Any] = lambda batch: batch) -> Any:
    """The third and the fourth sample."""
    batch, known = handed(collate, samples)
    return Parts(passed(batch), known).part(2, 4)


@given(st.integers(1, 1000), st.integers(1, 50))
def test_pieces_are_whole_and_nearly_equal(samples: int, count: int) -> None:
    found = sizes(samples, count)
    assert sum(found) == samples
    assert len(found) == min(samples, count)
    assert max(found) - min(found) <= 1


ROWS = [torch.arange(SAMPLES) + 10 * number for number in range(SAMPLES)]  # as many numbers as there are samples
LETTERS = list("abcdef")


@pytest.mark.parametrize("dimension", [0, 1])
def test_samples_are_found_where_they_are_also_if_sequences_are_as_long_as_the_batch(dimension: int) -> None:
    found = cut(lambda rows: torch.stack(rows, dimension), ROWS)
    assert torch.equal(found, torch.stack(ROWS[2:4], dimension))


def test_what_is_the_same_for_all_samples_stays_whole() -> None:
    mask, classes = torch.ones(SAMPLES, SAMPLES).tril(), torch.arange(float(SAMPLES))
    x, found_mask, found_classes, flag = cut(lambda rows: (torch.stack(rows), mask, classes.clone(), True), ROWS)
    assert (x.shape, flag) == ((2, SAMPLES), True)
    assert torch.equal(found_mask, mask)
    assert torch.equal(found_classes, classes)


def test_batches_of_any_shape_are_cut() -> None:
    pair = cut(lambda rows: Pair(torch.stack(rows), [int(row[0]) for row in rows]), ROWS)
    assert (type(pair), pair.y) == (Pair, [20, 30])
    named = cut(lambda letters: Named(torch.zeros(len(letters)), letters), LETTERS)
    assert (type(named), named.x.shape, named.names, named.scale) == (Named, (2,), ["c", "d"], 2.0)
    nested = cut(lambda rows: UserDict({"deep": {"rows": [torch.stack(rows), None]}, "text": "one"}), ROWS)
    assert (type(nested), nested["deep"]["rows"][0].shape, nested["text"]) == (UserDict, (2, SAMPLES), "one")
    boxes = cut(
        lambda rows: tuple(zip(*[(row[: 1 + at], {"box": at}) for at, row in enumerate(rows)], strict=True)), ROWS
    )
    assert [[len(one) for one in boxes[0]], boxes[1]] == [[3, 4], ({"box": 2}, {"box": 3})]


def test_what_is_moved_converted_or_taken_apart_is_found_again() -> None:
    def passed(batch: Any) -> Any:
        letters = tuple(batch.pop("letters"))
        known = batch.pop("three"), batch.pop("half").clone()
        return [{**batch, "rows": batch["rows"].clone().double()}, letters, *known, True, None, "name"]

    def collate(rows: list[Any]) -> dict[str, Any]:
        letters = list(LETTERS[: len(rows)])
        return {"rows": torch.stack(rows), "letters": letters, "three": 3, "half": torch.tensor(0.5)}

    rest, letters, number, half, *plain = cut(collate, ROWS, passed)
    assert torch.equal(rest["rows"], torch.stack(ROWS[2:4]).double())
    assert (letters, number, float(half)) == (("c", "d"), 3, 0.5)
    assert plain == [True, None, "name"]


@pytest.mark.parametrize(
    ("passed", "what"),
    [
        (lambda batch: batch.t(), "6 × 6"),
        (lambda batch: batch.t_(), "6 × 6"),
        (lambda batch: batch.clone().t_(), "6 × 6"),
        (lambda batch: batch * 2, "6 × 6"),
        (lambda batch: (batch, torch.ones(SAMPLES)), "batch[1] (6)"),
        (lambda batch: {"x": batch, "more": object()}, "batch['more'] is a object"),
        # As a count of samples would be, of which a part has fewer.
        (lambda batch: (batch, len(batch)), "batch[1] is a int, which may be about all samples"),
        (lambda batch: (batch, torch.tensor(6.0)), "batch[1] (a number)"),
    ],
)
def test_what_the_loader_did_not_hand_out_is_not_cut(passed: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(UsageError) as raised:
        cut(torch.stack, [row.clone() for row in ROWS], passed)
    assert what in str(raised.value)


@pytest.mark.parametrize(
    "collate",
    [
        torch.cat,
        lambda rows: torch.nn.utils.rnn.pack_sequence(rows),
        lambda rows: torch.nn.utils.rnn.pack_sequence([row[:1] for row in rows]),
        lambda rows: torch.stack(rows) @ torch.stack(rows).T,
        lambda rows: {"rows": torch.stack(rows), "count": len(rows)},
        lambda rows: {"rows": torch.stack(rows), "ends": torch.tensor([len(rows)])},
        lambda rows: {number: row for number, row in enumerate(rows)},
        lambda rows: (torch.stack(rows), object()),
    ],
)
def test_batches_that_are_not_made_of_samples_are_not_cut(collate: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="cannot be divided") as raised:
        cut(collate, ROWS)
    assert raised.value.hint
    batch, known = handed(collate, ROWS)
    assert Parts(batch, known).part(0, SAMPLES) is batch, "as long as nothing has to be cut, all of it is fine"


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_step_gets_all_samples_and_no_fewer(dimension: int) -> None:
    batch, known = handed(lambda rows: (torch.stack(rows, dimension), torch.zeros(len(rows))), ROWS)
    x, y = batch
    fewer = (x.narrow(dimension, 0, 4), y[:4])
    with pytest.raises(UsageError, match="handed out 6 samples, and the step gets 4"):
        Parts(fewer, known)
    shorter = x.narrow(1 - dimension, 0, 4)
    assert Parts((shorter, y), known).batch[0] is shorter, "sequences may be cut short"
    assert Parts((x[:0].sum(), y), known).samples == SAMPLES


def test_without_a_loader_nothing_is_cut() -> None:
    batch = torch.zeros(4, 4)
    whole = Parts(batch, None)
    assert whole.samples == 1
    assert whole.part(0, 1) is batch
    with pytest.raises(UsageError, match=r"not from run\.loader"):
        whole.part(0, 0)


def test_a_collate_function_may_change_samples_draw_and_fail() -> None:
    def changing(samples: list[dict[str, Any]]) -> Any:
        return torch.stack([sample.pop("x") for sample in samples]) + torch.rand(())

    random.seed(1)
    torch.manual_seed(1)
    expected, draw = torch.rand(()), random.random()
    random.seed(1)
    torch.manual_seed(1)
    batch, known = handed(changing, [{"x": torch.zeros(2)} for _ in range(3)])
    assert float(batch[0, 0]) == float(expected), "the script's random numbers were used"
    assert random.random() == draw
    assert Parts(batch, known).part(0, 2).shape == (2, 2)

    def choosy(samples: list[Any]) -> Any:
        assert len(samples) == 4, "four"
        return torch.stack(samples)

    batch, known = handed(choosy, ROWS[:4])
    assert batch.shape == (4, SAMPLES)
    with pytest.raises(UsageError, match="AssertionError: four"):
        Parts(batch, known).part(0, 1)


def test_an_order_of_its_own_is_noticed_where_samples_have_weights() -> None:
    def ordered(rows: list[Any]) -> Any:
        return torch.stack(sorted(rows, key=lambda row: -int(row[0])))

    assert Collate(ordered, is_weighted=True)(ROWS)[1] == REORDERED
    assert Collate(ordered, is_weighted=False)(ROWS)[1] == {(): 0}
    assert Collate(torch.stack, is_weighted=True)(ROWS)[1] == {(): 0}


def test_samples_that_collating_has_left_out_are_noticed_if_ranks_are_weighted_by_what_they_were_given() -> None:
    def without_some(rows: list[Any]) -> dict[str, Any]:
        kept = [row for row in rows if row[0] != 20]
        return {"rows": torch.stack(kept, 1), "names": ["one"] * len(kept)}

    with pytest.raises(UsageError, match="left out 1 of 6 samples"):
        handed(without_some, ROWS)[1].expect_complete()


def test_a_part_with_entries_of_its_own_is_not_taken_for_samples_that_were_left_out() -> None:
    """Of boxes, of which the first sample has one by chance."""

    def boxes(rows: list[Any]) -> dict[str, Any]:
        few = [torch.ones(1 if row[0] == 0 else 0, 4) for row in rows]
        return {"rows": torch.stack(rows), "boxes": torch.cat(few)}

    handed(boxes, ROWS)[1].expect_complete()
    handed(lambda rows: torch.cat([row[: 1 + row[0]] for row in rows]), ROWS)[1].expect_complete()
