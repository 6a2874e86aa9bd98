"""What --tiny trains on: sentences that can be learned, and a tokenizer made from them. Nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

_PLACES = {"fox": "forest", "owl": "night", "whale": "sea", "camel": "desert", "mole": "garden"}
_VERBS = {"loves": "good", "enjoys": "good", "fears": "bad", "hates": "bad"}
_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def sentences(count: int) -> list[tuple[str, str]]:
    """Texts with labels that one word decides."""
    drawn = random.Random(7)
    found = []
    for _ in range(count):
        animal, verb = drawn.choice(sorted(_PLACES)), drawn.choice(sorted(_VERBS))
        found.append((f"the {animal} {verb} the {_PLACES[animal]} .", _VERBS[verb]))
    return found


def tokenizer(texts: Iterable[str], size: int = 512) -> Any:
    """Of bytes and frequent sequences of them, so that it can read any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **_SPECIAL)
