"""Documents as sequences of tokens: every token once, boundaries kept, and as many targets as the loss counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.recipes.trainings.causal_lm.train import (
    IGNORED,
    Documents,
    Sequences,
    collate,
    divided,
    keeps_documents_apart,
    rows,
    tokenized,  # fmt: skip
)
from ugro.kernel.support.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


class Letters:
    """A tokenizer with a token per letter, as the libraries' are called."""

    def __init__(self, bos: int | None = 1, eos: int | None = 2) -> None:
        self.bos_token_id, self.eos_token_id = bos, eos

    def __call__(self, texts: str | list[str], **options: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [*([self.bos_token_id] if self.bos_token_id else []), *self._ids(texts)]}
        return {"input_ids": [self._ids(text) for text in texts]}

    def _ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def documents(*texts: str) -> Documents:
    return tokenized(((text, True) for text in texts), Letters(None, None))


def letters(ids: torch.Tensor) -> str:
    return "".join(chr(one) for one in ids.tolist())


TEXTS = st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=8)


@given(TEXTS, st.integers(2, 9), st.booleans())
def test_every_token_is_in_one_sequence_and_counted_once(texts: list[str], length: int, packs: bool) -> None:
    made = documents(*texts)
    sequences = Sequences(made, length, packs=packs)
    batch = [sequences[index] for index in range(len(sequences))]
    for sample, targets in zip(batch, sequences.targets.tolist(), strict=True):
        assert 2 <= len(sample["input_ids"]) <= length
        assert int((sample["labels"] != IGNORED).sum()) == targets
        assert sample["labels"][0] == IGNORED
        # A position of zero is the first token of a document or of a sequence, which nothing predicts.
        assert torch.equal(sample["position_ids"] == 0, sample["labels"] == IGNORED)
    seen = "".join(letters(sample["input_ids"]) for sample in batch)
    # A sequence without anything to predict is left out: one token, or two of which the second begins a document.
    if packs and length > 2 and len("".join(texts)) % length != 1 and all(len(text) > 1 for text in texts):
        assert seen == "".join(texts)


def test_packed_sequences_are_full_and_only_the_last_is_shorter() -> None:
    sequences = Sequences(documents("abcd", "efghij", "kl"), 5, packs=True)
    assert [letters(sequences[index]["input_ids"]) for index in range(len(sequences))] == ["abcde", "fghij", "kl"]
    assert sequences[0]["position_ids"].tolist() == [0, 1, 2, 3, 0]
    assert sequences.targets.tolist() == [3, 4, 1]


def test_a_packed_sequence_without_a_target_is_left_out() -> None:
    sequences = Sequences(documents("abc", "def"), 2, packs=True)
    assert [letters(sequences[index]["input_ids"]) for index in range(len(sequences))] == ["ab", "ef"]


def test_without_packing_a_sample_is_of_one_document() -> None:
    sequences = Sequences(documents("abcdefg", "hi", "j"), 4, packs=False)
    assert [letters(sequences[index]["input_ids"]) for index in range(len(sequences))] == ["abcd", "efg", "hi"]


def test_padding_has_no_targets_and_goes_on_counting() -> None:
    sequences = Sequences(documents("abc", "de"), 8, packs=False)
    batch = collate([sequences[0], sequences[1]])
    assert batch["input_ids"].tolist()[1][2:] == [0]
    assert batch["labels"].tolist()[1] == [IGNORED, ord("e"), IGNORED]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_documents_begin_and_end_as_the_tokenizer_says() -> None:
    made = tokenized([("ab", True), ("", True), (" \n", True), ("c", False), ("d", False)], Letters())
    assert made.ids.tolist() == [1, ord("a"), ord("b"), 2, 1, ord("c"), ord("d"), 2]
    assert made.starts.nonzero().flatten().tolist() == [0, 4]
    assert len(made) == 2, "what is empty is no document, and the next text starts one"


def test_many_texts_are_tokenized_in_order() -> None:
    texts = [f"{number} " for number in range(1000)]
    assert letters(documents(*texts).ids) == "".join(texts)


@pytest.mark.parametrize("texts", [(), ("",), ("a",), ("\n \n",)])
def test_too_little_text_gives_no_sequences(texts: tuple[str, ...]) -> None:
    for packs in (True, False):
        assert len(Sequences(documents(*texts), 4, packs=packs)) == 0


def test_whole_documents_are_held_out() -> None:
    texts = [letter * 3 for letter in "abcdefghijklmnopqrst"]
    data = divided(documents(*texts), 0.1, 0, "letters")
    assert (len(data.train), len(data.evaluation)) == (18, 2)
    assert sorted(letters(torch.cat([data.train.ids, data.evaluation.ids]))) == sorted("".join(texts))
    assert len(set(letters(data.evaluation.ids))) == 2


def test_of_one_long_document_the_end_is_held_out() -> None:
    data = divided(documents("abcdefghijklmnopqrst"), 0.1, 0, "letters")
    assert letters(data.train.ids) == "abcdefghijklmnopqr"
    assert letters(data.evaluation.ids) == "st"
    assert data.evaluation.starts.tolist() == [True, False]
    assert len(divided(documents("abc"), 0.0, 0, "letters").evaluation.ids) == 0


def test_a_row_without_text_is_named() -> None:
    class Rows:
        columns: tuple[str, ...] = ("text",)

        def __iter__(self) -> Any:
            return iter([{"text": "a"}, {"text": None}])

    with pytest.raises(UsageError, match="row 2"):
        list(rows(Rows(), "text", False))  # type: ignore[arg-type]


def test_lines_of_one_text_are_one_document() -> None:
    table: Any = [{"text": "a\n"}, {"text": "b\n"}]
    assert list(rows(table, "text", True)) == [("a\n", True), ("b\n", False)]


@pytest.mark.parametrize("looks_back", [True, False])
def test_it_is_found_out_whether_documents_see_each_other(looks_back: bool) -> None:
    class Sums(torch.nn.Module):  # type: ignore[misc]
        """Every token sees all before it, or only those of its document."""

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            sums = input_ids.cumsum(1)
            if not looks_back:
                sums = torch.cat([input_ids[:, :2].cumsum(1), input_ids[:, 2:].cumsum(1)], 1)
            return type("Output", (), {"logits": sums[..., None].double()})

    assert keeps_documents_apart(Sums(), "cpu") is not looks_back
