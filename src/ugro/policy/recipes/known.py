"""The configurations of well-known models, as far as their memory depends on them: those that are not on any disk."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def known_config(hub_id: str) -> Config | None:
    return _KNOWN.get(hub_id)


def _llama(sizes: str, words: int, positions: int, kind: str = "llama", **more: Any) -> Config:
    """``sizes``: width, width of the MLP, layers, heads, heads of keys and values."""
    hidden, inner, layers, heads, keys = map(int, sizes.split())
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words,
        "max_position_embeddings": positions, **more,
    }  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "vocab_size": 50257, "n_positions": 1024}


def _bert(words: int, kind: str = "bert", hidden: int = 768, layers: int = 12, heads: int = 12) -> Config:
    positions, types = (512, 2) if kind == "bert" else (514, 1)
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": words, "max_position_embeddings": positions,
        "type_vocab_size": types,
    }  # fmt: skip


def _resnet(*depths: int, layer: str = "bottleneck", sizes: tuple[int, ...] = (256, 512, 1024, 2048)) -> Config:
    return {"model_type": "resnet", "layer_type": layer, "hidden_sizes": sizes, "depths": depths, "num_labels": 1000}


_DISTILBERT = {
    "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
    "max_position_embeddings": 512,
}  # fmt: skip
_VIT = {
    "model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_labels": 1000,
}  # fmt: skip
_TIED: Config = {"tie_word_embeddings": True}

_KNOWN: dict[str, Config] = {
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "HuggingFaceTB/SmolLM2-135M": _llama("576 1536 30 9 3", 49152, 8192, **_TIED),
    "HuggingFaceTB/SmolLM2-360M": _llama("960 2560 32 15 5", 49152, 8192, **_TIED),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama("2048 5632 22 32 4", 32000, 2048),
    "Qwen/Qwen2.5-0.5B": _llama("896 4864 24 14 2", 151936, 32768, "qwen2", **_TIED),
    "Qwen/Qwen2.5-1.5B": _llama("1536 8960 28 12 2", 151936, 131072, "qwen2", **_TIED),
    "Qwen/Qwen2.5-7B": _llama("3584 18944 28 28 4", 152064, 131072, "qwen2"),
    "huggyllama/llama-7b": _llama("4096 11008 32 32 32", 32000, 2048),
    "huggyllama/llama-13b": _llama("5120 13824 40 40 40", 32000, 2048),
    "meta-llama/Llama-2-7b-hf": _llama("4096 11008 32 32 32", 32000, 4096),
    "meta-llama/Llama-3.1-8B": _llama("4096 14336 32 32 8", 128256, 131072),
    "meta-llama/Llama-3.2-1B": _llama("2048 8192 16 32 8", 128256, 131072, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _llama("3072 8192 28 24 8", 128256, 131072, head_dim=128, **_TIED),
    "mistralai/Mistral-7B-v0.1": _llama("4096 14336 32 32 8", 32000, 32768, "mistral"),
    "google-bert/bert-base-uncased": _bert(30522),
    "google-bert/bert-base-cased": _bert(28996),
    "google-bert/bert-large-uncased": _bert(30522, hidden=1024, layers=24, heads=16),
    "FacebookAI/roberta-base": _bert(50265, "roberta"),
    "FacebookAI/xlm-roberta-base": _bert(250002, "xlm-roberta"),
    "distilbert/distilbert-base-uncased": _DISTILBERT,
    "microsoft/resnet-18": _resnet(2, 2, 2, 2, layer="basic", sizes=(64, 128, 256, 512)),
    "microsoft/resnet-50": _resnet(3, 4, 6, 3),
    "microsoft/resnet-101": _resnet(3, 4, 23, 3),
    "google/vit-base-patch16-224": _VIT,
}
