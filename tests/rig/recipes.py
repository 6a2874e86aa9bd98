"""Small models and data for recipes, made by the real libraries from configurations; and a look at what was trained.

    python -m tests.rig.recipes make FOLDER
    python -m tests.rig.recipes tables FOLDER          makes datasets of the library there, prints how they are read
    python -m tests.rig.recipes apart FOLDER           prints how far a packed document is from the same one alone
    python -m tests.rig.recipes use MODEL [BASE]       prints what loading and running a trained model gives, as JSON
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.rig import ranks

SCRIPTS = ranks.ROOT / "src" / "ugro" / "recipes"
VARIABLES = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def script(name: str) -> str:
    return str(SCRIPTS / name / "train.py")


def ask(*words: str) -> str:
    """Of this module, in a process of its own: the libraries take seconds to import, and warn."""
    env = {**os.environ, **VARIABLES, "PYTHONPATH": f"{ranks.ROOT}:{ranks.ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", "-m", "tests.rig.recipes", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    verb, folder, *more = sys.argv[1:]
    {"make": make, "tables": tables, "apart": apart, "use": use}[verb](Path(folder), *more)


# --- making -----------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    texts = documents()
    write_data(folder, texts)
    torch.manual_seed(3)
    for name, model in models(len(tokenizer(texts))).items():
        model.save_pretrained(folder / name)
        if name == "resnet":
            about = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}}
            (folder / name / "preprocessor_config.json").write_text(json.dumps(about))
        else:
            tokenizer(texts).save_pretrained(folder / name)


def tokenizer(texts: list[str]) -> Any:
    from ugro.train.recipe import inputs as tiny

    return tiny.tokenizer(texts, 300)


def models(words: int) -> dict[str, Any]:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
    )  # fmt: skip

    sizes = {"vocab_size": words, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_key_value_heads=2, initializer_range=0.1)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=words, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
        "bert": BertForMaskedLM(
            BertConfig(**sizes, **heads, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
        "resnet": ResNetForImageClassification(
            ResNetConfig(embedding_size=8, hidden_sizes=[16, 16], depths=[1, 1], num_labels=7)
        ),
    }


def documents() -> list[str]:
    """Of very different lengths, so that batches differ in how much there is to predict."""
    drawn = random.Random(5)
    words = ["the", "fox", "owl", "whale", "sees", "hears", "likes", "a", "forest", "night", "sea", "and", "again"]
    return [" ".join(drawn.choice(words) for _ in range(drawn.choice((1, 2, 3, 30)))) for _ in range(120)]


def write_data(folder: Path, texts: list[str]) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts))
    with (folder / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("review", "label"), *((text, "wild" if "fox" in text else "tame") for text in texts)]
        )
    drawn = random.Random(6)
    for number, colour in enumerate(("red", "blue")):
        place = folder / "pictures" / colour
        place.mkdir(parents=True, exist_ok=True)
        for count in range(24):
            pixels = bytes(drawn.randrange(100) + 100 * (one % 3 == 2 * number) for one in range(3 * 40 * 30))
            (place / f"{count}.ppm").write_bytes(b"P6\n40 30\n255\n" + pixels)


def tables(folder: Path) -> None:
    """One saved, two saved together, and a copy of a dataset of the hub."""
    import datasets

    from ugro.train.recipe import dataset
    from ugro.train.recipe import dataset as files
    from ugro.train.recipe.command_line import Named

    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    one = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=kinds)
    one.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(folder / "two")
    (folder / "hub" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        one.to_parquet(folder / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    paths = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("train", "test"))
    front = f"---\nconfigs:\n- config_name: plain\n  data_files:\n{paths}---\n"
    (folder / "hub" / "README.md").write_text(front)
    found = {}
    for name in ("one", "two", "hub"):
        read = dataset.tables(Named(name, str(folder / name), True, {}), files.TABLES)
        found[name] = {split: [list(table), table.label_names("label")] for split, table in read.items()}
    sys.stdout.write("\n" + json.dumps(found))


# --- looking ----------------------------------------------------------------------------------------------------


def apart(folder: Path) -> None:
    """The largest difference between a document's scores in a packed sequence and alone, and to those unpacked."""
    import torch
    from transformers import AutoModelForCausalLM

    from ugro.features.recipes.trainings.causal_lm.train import Documents, Sequences, collate, keeps_documents_apart

    found = {}
    for name in ("llama", "gpt2"):
        model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
        first, second = torch.arange(5, 12), torch.arange(20, 29)
        starts = torch.zeros(16, dtype=torch.bool)
        starts[[0, 7]] = True
        packed = Sequences(Documents(torch.cat([first, second]).int(), starts), 16, packs=True)
        batch = {key: value for key, value in collate([packed[0], packed[0]]).items() if key != "labels"}
        with torch.no_grad():
            together = model(**batch, use_cache=False).logits[0, 7:]
            alone = model(input_ids=second[None], use_cache=False).logits[0]
            mixed = model(input_ids=torch.cat([first, second])[None], use_cache=False).logits[0, 7:]
        found[name] = {
            "packed": float((together - alone).abs().max()),
            "mixed": float((mixed - alone).abs().max()),
            "said": keeps_documents_apart(model, "cpu"),
        }
    sys.stdout.write(json.dumps(found))


def use(folder: Path, base: str | None = None) -> None:
    import torch
    import transformers

    about = json.loads((folder / "ugro.json").read_text())
    kinds = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "text-classification": transformers.AutoModelForSequenceClassification,
        "image-classification": transformers.AutoModelForImageClassification,
    }
    kind = kinds[about["task"]]
    options = {} if about["labels"] is None else {"num_labels": len(about["labels"])}
    found: dict[str, Any] = {"card": card(folder)}
    inputs = {"pixel_values": torch.zeros(1, 3, 32, 32)}
    if about["task"] != "image-classification":
        inputs = dict(transformers.AutoTokenizer.from_pretrained(folder)("the fox sees", return_tensors="pt"))
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        if base is None:
            model = kind.from_pretrained(folder, use_safetensors=True).eval()
        else:
            from peft import PeftModel

            model = PeftModel.from_pretrained(kind.from_pretrained(base, **options), folder).eval()
            with model.disable_adapter():
                found["without"] = model(**inputs).logits.flatten().tolist()
        found["logits"] = model(**inputs).logits.flatten().tolist()
    found["labels"] = dict(model.config.id2label)
    sys.stdout.write(json.dumps(found))


def card(folder: Path) -> dict[str, Any]:
    """As the hub reads it."""
    cards = import_module("huggingface_hub").ModelCard
    return dict(cards.load(folder / "README.md").data.to_dict())


if __name__ == "__main__":
    main()
