"""What a training needs in memory: counted exactly where it can be, and compared with real models (proof)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ugro.features.recipes.rules import Shape, shape_of
from ugro.features.recipes.rules_memory import Mode, Training, known_config, need, trained_parameters
from ugro.features.recipes.trainings import catalog


def shape(hub_id: str) -> Shape:
    config = known_config(hub_id)
    assert config is not None, hub_id
    found = shape_of(config)
    assert found is not None, hub_id
    return found


@pytest.mark.parametrize(
    ("hub_id", "published"),
    [
        ("openai-community/gpt2", 124_439_808),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("huggyllama/llama-7b", 6_738_415_616),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("microsoft/resnet-50", 25_557_032),
        ("google/vit-base-patch16-224", 86_567_656),
    ],
)
def test_well_known_models_have_their_published_number_of_parameters(hub_id: str, published: int) -> None:
    assert shape(hub_id).parameters == published


def test_most_models_that_recipes_name_are_known() -> None:
    named = [hub for recipe in catalog.all_recipes() for hub in recipe.models.values()]
    unknown = [hub for hub in named if known_config(hub) is None]
    assert len(unknown) <= 3, unknown
    assert all(shape(hub).parameters > 10**6 for hub in named if hub not in unknown)


def test_lora_needs_a_thousandth_of_the_gradients() -> None:
    llama = shape("huggyllama/llama-7b")
    lora = Training(Mode.LORA, samples=1, seq_length=512, value_bytes=2, is_on_cpu=False)
    assert trained_parameters(llama, lora) == 8_388_608
    small, large = need(llama, lora), need(llama, replace(lora, mode=Mode.FULL))
    assert large.gradients == 4 * llama.parameters
    assert large.optimizer == 8 * llama.parameters
    assert large.gradients / small.gradients > 800
    assert small.weights == pytest.approx(2 * llama.parameters, rel=0.01)
    four_bits = need(llama, replace(lora, mode=Mode.QLORA))
    assert four_bits.weights < 0.35 * small.weights


def test_checkpointing_and_shorter_sequences_need_less() -> None:
    llama = shape("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    usual = Training(Mode.LORA, samples=4, seq_length=1024)
    assert need(llama, replace(usual, has_checkpointing=True)).activations < 0.15 * need(llama, usual).activations
    assert need(llama, replace(usual, seq_length=512)).activations == need(llama, usual).activations // 2
    longest = need(llama, replace(usual, seq_length=2048))
    assert need(llama, replace(usual, seq_length=10**6)) == longest, "it has no more positions"


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "new"}, {"model_type": "llama"}, {"model_type": "gpt2", "n_embd": "x"}]
)
def test_nothing_is_claimed_about_what_is_not_known(config: dict[str, Any]) -> None:
    assert shape_of(config) is None


def _real_configs() -> list[Any]:
    import transformers as hf

    return [
        hf.LlamaConfig(num_hidden_layers=3, num_key_value_heads=8, tie_word_embeddings=True, mlp_bias=True),
        hf.MistralConfig(num_hidden_layers=2),
        hf.Qwen2Config(num_hidden_layers=2),
        hf.Qwen3Config(num_hidden_layers=2),
        hf.GPT2Config(),
        hf.GPTNeoXConfig(num_hidden_layers=2),
        hf.BertConfig(num_labels=4),
        hf.RobertaConfig(num_labels=3),
        hf.DistilBertConfig(num_labels=3),
        hf.ViTConfig(num_labels=10),
        hf.ResNetConfig(num_labels=10),
        hf.ResNetConfig(layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
    ]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_parameters_are_those_of_real_models_and_adapters() -> None:
    import torch
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    for config in _real_configs():
        found = shape_of(config.to_dict())
        assert found is not None, config.model_type
        makes = {
            "causal-lm": hf.AutoModelForCausalLM,
            "text-classification": hf.AutoModelForSequenceClassification,
            "image-classification": hf.AutoModelForImageClassification,
        }[found.task]
        with torch.device("meta"):
            model = makes.from_config(config)
        assert sum(one.numel() for one in model.parameters()) == found.parameters, config.model_type
        if found.usual:
            task = "CAUSAL_LM" if found.task == "causal-lm" else "SEQ_CLS"
            with torch.device("meta"):
                adapted = get_peft_model(model, LoraConfig(r=8, task_type=task, target_modules=list(found.usual)))
            trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
            assert trained == trained_parameters(found, Training(Mode.LORA, 1, rank=8)), config.model_type


def _kept_bytes(model: Any, **inputs: Any) -> int:
    """What autograd keeps of a forward pass, without the parameters themselves."""
    import torch

    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(**inputs)
    return sum(size for size, _ in kept.values())


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [Mode.FULL, Mode.LORA])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_activations_are_within_a_tenth_of_what_autograd_keeps(kind: str, mode: Mode) -> None:
    import torch
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4}
    config: Any = {
        "llama": lambda: hf.LlamaConfig(vocab_size=64, **sizes),
        "gpt2": lambda: hf.GPT2Config(vocab_size=64, n_embd=128, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=1),
        "bert": lambda: hf.BertConfig(vocab_size=64, **sizes),
    }[kind]()
    is_text = kind == "bert"
    makes = hf.AutoModelForSequenceClassification if is_text else hf.AutoModelForCausalLM
    model = makes.from_config(config).train()
    if mode is Mode.LORA:
        task = "SEQ_CLS" if is_text else "CAUSAL_LM"
        model = get_peft_model(model, LoraConfig(r=8, task_type=task, fan_in_fan_out=kind == "gpt2"))
    words = torch.randint(0, 64, (4, 128))
    labels = torch.zeros(4, dtype=torch.long) if is_text else words
    measured = _kept_bytes(model, input_ids=words, labels=labels)
    found = shape_of(config.to_dict())
    assert found is not None
    estimated = need(found, Training(mode, samples=4, seq_length=128, rank=8)).activations
    assert estimated == pytest.approx(measured, rel=0.1)
