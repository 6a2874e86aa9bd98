"""Tiny models made from a configuration, with a real tokenizer: folders as transformers and the recipes write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box and judge my vow"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(*, has_template: bool = True) -> Any:
    """Byte-level, so that any text has tokens and a character may take several of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS] * 4, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")
    found.chat_template = _TEMPLATE if has_template else None
    return found


def llama_config(vocabulary: int, **options: Any) -> Any:
    from transformers import LlamaConfig

    chosen = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Wide enough that the likeliest token is likelier than the others by far more than rounding errors.
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(vocab_size=vocabulary, **{**chosen, **options})


def llama(folder: Path, *, has_template: bool = True, seed: int = 0, **options: Any) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    words = tokenizer(has_template=has_template)
    return _saved(LlamaForCausalLM(llama_config(len(words), **options)), words, folder)


def bert(folder: Path, labels: tuple[str, ...] = ("bad", "good", "so-so")) -> Path:
    """A classifier, as the recipe for texts writes it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    words = tokenizer()
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        num_labels=len(labels),
        initializer_range=0.5,
    )
    _saved(BertForSequenceClassification(config), words, folder)
    return describe(folder, task="text-classification", kind="full", labels=list(labels))


def resnet(folder: Path, labels: tuple[str, ...] = ("cat", "dog")) -> Path:
    """A classifier of images, as the recipe for images writes it."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=len(labels))
    model = ResNetForImageClassification(config).eval()
    model.save_pretrained(folder)
    steps = {"size": {"shortest_edge": 32}, "crop_pct": 0.875, "do_resize": True, "do_normalize": True}
    written = {"image_processor_type": "ConvNextImageProcessor", **steps}
    (folder / "preprocessor_config.json").write_text(json.dumps(written), encoding="utf-8")
    return describe(folder, task="image-classification", kind="full", labels=list(labels))


def adapter(folder: Path, base: Path) -> Path:
    """A LoRA adapter that changes what the base model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return describe(folder, task="causal-lm", kind="lora", base="tiny-llama", base_path=str(base))


def describe(folder: Path, **about: Any) -> Path:
    (folder / "ugro.json").write_text(json.dumps({"format": 1, **about}), encoding="utf-8")
    return folder


def _saved(model: Any, words: Any, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
