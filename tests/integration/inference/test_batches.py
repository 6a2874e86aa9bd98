"""The engine's arithmetic: rows that join and leave compute what each would compute alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rig import models

pytestmark = pytest.mark.proof
SAME = 1e-5  # some models compute parts with 32 bits; a wrong mask or position makes a difference of 0.01 and more


def gpt2(words: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=words, n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.4)
    )


def llama(words: int) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(models.llama_config(words))


def mistral(words: int) -> Any:
    """A window that is shorter than most texts."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=words, num_key_value_heads=2, sliding_window=8, initializer_range=0.4, **sizes)
    return MistralForCausalLM(config)


def bloom(words: int) -> Any:
    """No positions at all: a bias by distance."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=words, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4))


def qwen(words: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=words, num_key_value_heads=2, head_dim=8, initializer_range=0.4, **sizes)
    )


class Alone:
    """What a model says to a prompt when nobody else is there, by transformers' own means."""

    def __init__(self, model: Any, prompt: Sequence[int], count: int) -> None:
        import torch

        tokens, self.logits = list(prompt), []
        for _ in range(count):
            self.logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
            tokens.append(int(self.logits[-1].argmax()))
        self.tokens = tokens[len(prompt) :]


@pytest.mark.parametrize("make", [llama, gpt2, mistral, bloom, qwen])
def test_rows_that_join_and_leave_compute_what_each_computes_alone(make: Any) -> None:
    import torch

    from ugro.features.services.inference.generation import Rows

    torch.manual_seed(3)
    chance = random.Random(5)
    model = make(120).double().eval()
    prompts = [[chance.randrange(120) for _ in range(length)] for length in (3, 17, 9, 30, 1, 12)]
    ends = [12, 40, 3, 25, 30, 1]
    joins = {0: [0, 1], 4: [2], 7: [3, 4, 5]}
    with torch.inference_mode():
        alone = [Alone(model, prompt, end) for prompt, end in zip(prompts, ends, strict=True)]
        rows = Rows()
        present: list[int] = []
        said: dict[int, list[int]] = {at: [] for at in range(len(prompts))}

        def check(at: int, logits: Any) -> None:
            assert float((logits - alone[at].logits[len(said[at])]).abs().max()) < SAME
            said[at].append(int(logits.argmax()))

        step = 0
        while step <= max(joins) or present:
            if new := joins.get(step):
                for at, logits in zip(new, rows.prefill(model, [prompts[at] for at in new]), strict=True):
                    present.append(at)
                    check(at, logits)
            stay = [row for row, at in enumerate(present) if len(said[at]) < ends[at]]
            present = [present[row] for row in stay]
            rows.keep(stay)
            if present:
                for at, logits in zip(present, rows.step(model, [said[at][-1] for at in present]), strict=True):
                    check(at, logits)
            step += 1
    assert list(said.values()) == [each.tokens for each in alone]


def test_padding_never_shows_even_if_it_is_no_number() -> None:
    """The mask multiplies what it hides by 0, and 0 × NaN is NaN: a hidden column must hold numbers."""
    import torch

    from ugro.features.services.inference.generation import Rows

    torch.manual_seed(0)
    model = llama(50).double().eval()
    with torch.inference_mode():
        rows = Rows()
        rows.prefill(model, [[1, 2, 3, 4, 5, 6, 7], [1]])
        rows.keep([1])
        rows.prefill(model, [[3] * 90])
        assert not rows.step(model, [4, 4]).isnan().any()
        assert rows.lengths == [2, 91]


def test_a_model_that_computes_nonsense_fails_its_text_and_not_the_server(llama: Path) -> None:
    """NaN in one row, out of memory in one prefill: those are answered with an error, the others go on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ugro.features.services.inference.generation import Generator
    from ugro.features.services.inference.guard import Metrics
    from ugro.features.services.inference.options import Limits
    from ugro.features.services.inference.sequence import Sampling

    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    original = model.forward

    def forward(input_ids: Any, **options: Any) -> Any:
        if input_ids.shape[1] == 5:
            raise torch.OutOfMemoryError("no memory left")
        found = original(input_ids=input_ids, **options)
        if (input_ids == 13).any():
            found.logits[(input_ids == 13).any(dim=1)] = float("nan")
        return found

    model.forward = forward

    async def main() -> list[tuple[int, str | None]]:
        generator = Generator(model, AutoTokenizer.from_pretrained(llama), Limits(max_batch=4), Metrics())
        generator.start(lambda reason: None)
        prompts = [(7, 8, 9), (7, 13, 9), (7, 8, 9, 9, 9), (6, 6)]
        wishes = [generator.wish(prompt, Sampling(0, logit_bias={1: -100.0}), 20) for prompt in prompts]
        tokens = [0] * 4
        errors: list[str | None] = [None] * 4
        async for piece in generator.ask(wishes, 1, ()).pieces():
            tokens[piece.index] += piece.tokens
            errors[piece.index] = piece.error or errors[piece.index]
        generator.close()
        return list(zip(tokens, errors, strict=True))

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert [count for count, _ in found] == [20, 0, 0, 20]
    assert ["NaN" in (error or "") for _, error in found] == [False, True, False, False]
    assert "out of memory" in (found[2][1] or "")


def test_rows_go_on_when_there_is_no_memory_for_more() -> None:
    """The larger tensors are made after the model has computed: what runs must not count rows that are not there."""
    import torch

    from ugro.features.services.inference.generation import Rows

    torch.manual_seed(0)
    model = llama(50).double().eval()
    with torch.inference_mode():
        rows = Rows()
        rows.prefill(model, [[1, 2, 3]])
        alone = Alone(model, [1, 2, 3], 2)
        wide = _Wide(model)
        with pytest.raises(RuntimeError):
            rows.prefill(wide, [[4, 5, 6, 7]])
        assert rows.lengths == [3]
        assert float((rows.step(model, [alone.tokens[0]])[0] - alone.logits[1]).abs().max()) < SAME


class _Wide:
    """A model whose keys are wider than any memory, once they are copied."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device

    def __call__(self, past_key_values: Any, **options: Any) -> Any:
        found = self._model(past_key_values=past_key_values, **options)
        for layer in past_key_values.layers:
            layer.values = layer.values[..., :1].expand(*layer.values.shape[:-1], 1 << 50)
        return found

    def forward(self, input_ids: Any, position_ids: Any) -> None:
        """What the model takes is read from here."""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nothing_is_drawn_from_logits_that_are_no_numbers(value: float) -> None:
    import torch

    from ugro.features.services.inference.generation import choose, random_numbers
    from ugro.features.services.inference.sequence import Sampling

    class Row:
        sampling, generated = Sampling(), list[int]()
        generator = random_numbers(Sampling(seed=1), "cpu")

    logits = torch.zeros(2, 8)
    logits[0] = value
    found = choose(logits, [Row(), Row()])
    assert found[0] is None
    assert found[1] in range(8)


def test_a_text_is_embedded_as_alone_whatever_is_beside_it_and_wherever_its_tokenizer_pads() -> None:
    import torch
    from transformers import GPT2Config, GPT2Model

    from ugro.features.services.inference.loading import Loaded
    from ugro.features.services.inference.service import predictor_of

    torch.manual_seed(0)
    words = models.tokenizer()
    words.padding_side = "left"  # as many causal models have it
    config = GPT2Config(vocab_size=len(words), n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4)
    embedder = predictor_of(Loaded(GPT2Model(config).eval(), words, "embed", False))
    [(alone, _)] = embedder.predict(["a fox"])
    (beside, _), _ = embedder.predict(["a fox", "the quick brown fox jumps over a lazy dog"])
    assert beside == pytest.approx(alone, abs=1e-5)


def test_more_texts_than_may_ever_wait_are_refused_for_good(llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ugro.features.services.inference.generation import Generator
    from ugro.features.services.inference.guard import Metrics, Refused
    from ugro.features.services.inference.options import Limits
    from ugro.features.services.inference.sequence import Sampling

    words = AutoTokenizer.from_pretrained(llama)
    generator = Generator(AutoModelForCausalLM.from_pretrained(llama).eval(), words, Limits(queue=3), Metrics())
    wish = generator.wish((7, 8), Sampling(0), 4)
    with pytest.raises(Refused, match="at most 3") as refused:
        generator.ask([wish, wish], 2, ())
    assert refused.value.status == 400
