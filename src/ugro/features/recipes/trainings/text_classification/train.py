"""Fine-tunes a model to classify texts (BERT, RoBERTa, Llama, …), with LoRA or all of it, on unequal GPUs or CPUs.

    ugro launch --model bert-base --dataset imdb --nodes 3
    python train.py --model ./my-bert --dataset reviews.csv
    python train.py --tiny                             # alone, in seconds, without a download
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

import ugro.train as ut
from ugro.kernel.support.errors import UsageError
from ugro.train.recipe import command_line as flags
from ugro.train.recipe import dataset, output
from ugro.train.recipe import dataset as files
from ugro.train.recipe import inputs as tiny
from ugro.train.recipe import training as evaluation
from ugro.train.recipe import training as lora
from ugro.train.recipe.command_line import Named, Names, ends_clearly, say, size_of
from ugro.train.recipe.dataset import explained, together
from ugro.train.recipe.inputs import Labels
from ugro.train.recipe.output import Facts, Hardware
from ugro.train.recipe.training import Precision, Updates

LR_LORA, LR_FULL = 3e-4, 2e-5
TOKENIZED_AT_ONCE = 256  # texts


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    precision = Precision.of(run, arguments.dtype)
    lora.check(arguments, precision)
    names = Names.of(__file__, arguments)
    data = together(run, lambda: load_data(names, arguments), "the data")
    count = f"{len(data.train):,} texts, {len(data.labels)} classes; {len(data.evaluation):,} to evaluate on"
    say(run, f"{names.data}: {count}")
    tokenizer, model = together(run, lambda: load_model(names, arguments, precision, data.labels), "the model")
    length = fitting_length(run, model, tokenizer, arguments.seq_length)

    model = lora.prepared(model, arguments, "SEQ_CLS")
    wrapped = run.wrap(model)
    say(run, f"each step exchanges {size_of(lora.trained_bytes(model))} of gradients")
    train, held_out = (Tokenized(texts, tokenizer, length) for texts in (data.train, data.evaluation))
    loader = run.loader(
        train, global_batch=arguments.batch_size, collate_fn=train.collate, num_workers=arguments.workers
    )
    updates = Updates(run, model, arguments, precision, len(loader), LR_FULL if arguments.full else LR_LORA)
    results = evaluation.Results()
    run.keep(model=lora.kept(model), results=results, **updates.kept())

    for _ in run.epochs(updates.epochs):
        for batch in updates.batches(loader):
            updates.step(lambda part: wrapped(**on(run.device, part)).loss, batch)
        results.scores = evaluate(run, model, held_out, precision)
        run.checkpoint()
    save(run, model, tokenizer, names, Outcome(arguments, data, updates, results))
    run.close()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    small = {"seq_length": 32, "batch_size": 16, "epochs": 2, "lr": 3e-3, "merge": True, "lora_targets": "all-linear"}
    return flags.parse(parser(), small, argv)


def parser() -> argparse.ArgumentParser:
    made = flags.new(__doc__)
    flags.add_text(made, seq_length=256)
    made.add_argument("--label-column", help="column with the label (default: label)")
    return made


# --- data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, numbers: Sequence[int]) -> Texts:
        return Texts([self.texts[number] for number in numbers], [self.labels[number] for number in numbers])


@dataclass(frozen=True)
class Data:
    train: Texts
    evaluation: Texts
    labels: Labels


def load_data(names: Names, arguments: argparse.Namespace) -> Data:
    if names.dataset is None:
        pairs = tiny.sentences(400)
        labels = Labels.of((label for _, label in pairs), None)
        return divided(Texts([text for text, _ in pairs], [labels.number(one) for _, one in pairs]), labels, 0.1, 0)
    found = dataset.tables(names.dataset, files.TABLES)
    chosen = dataset.chosen(found, names.dataset, arguments.eval_split)
    label = dataset.label_column(chosen.train, names.dataset, arguments.label_column)
    text = dataset.text_column(chosen.train, names.dataset, arguments.text_column, label)
    labels = Labels.of(chosen.train.column(label), chosen.train.label_names(label))
    train = read(chosen.train, (text, label), labels, names.dataset)
    if chosen.evaluation is None:
        return divided(train, labels, chosen.held_out, arguments.seed)
    return Data(train, read(chosen.evaluation, (text, label), labels, names.dataset), labels)


def read(table: dataset.Table, columns: tuple[str, str], labels: Labels, named: Named) -> Texts:
    texts, numbers = [], []
    for row_number, row in enumerate(table, start=1):
        text, label = (row.get(column) for column in columns)
        if not isinstance(text, str):
            kind = type(text).__name__
            raise UsageError(f"{named.name}, row {row_number}: column {columns[0]!r} has {kind} instead of a text")
        texts.append(text)
        numbers.append(labels.number(label))
    return Texts(texts, numbers)


def divided(texts: Texts, labels: Labels, part: float, seed: int) -> Data:
    train, held_out = dataset.held_out(len(texts), part, seed)
    return Data(texts.select(train), texts.select(held_out), labels)


class Tokenized(Dataset):  # type: ignore[misc]
    def __init__(self, texts: Texts, tokenizer: Any, length: int) -> None:
        self.labels = texts.labels
        self.tokenizer = tokenizer
        self.ids: list[list[int]] = []
        for begin in range(0, len(texts), TOKENIZED_AT_ONCE):
            some = texts.texts[begin : begin + TOKENIZED_AT_ONCE]
            self.ids += tokenizer(some, truncation=True, max_length=length)["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.ids[index], self.labels[index]

    def collate(self, samples: Sequence[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        """Padded to the longest text of the batch, with a mask."""
        padded = self.tokenizer.pad({"input_ids": [ids for ids, _ in samples]}, return_tensors="pt")
        return {**padded, "labels": torch.tensor([label for _, label in samples])}


def on(device: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


# --- model ------------------------------------------------------------------------------------------------------


def load_model(names: Names, arguments: argparse.Namespace, precision: Precision, labels: Labels) -> tuple[Any, Any]:
    """The tokenizer and the model with a new head, from the cache, a folder or the hub."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(arguments.seed)  # the same new weights on every rank
    if names.model is None:
        return tiny_model(labels)
    options = {**lora.load_options(arguments, precision), **labels.configuration(), "ignore_mismatched_sizes": True}
    with explained("model", names.model):
        tokenizer = AutoTokenizer.from_pretrained(names.model.place, trust_remote_code=arguments.trust_remote_code)
        model = AutoModelForSequenceClassification.from_pretrained(names.model.place, **options)
    if tokenizer.pad_token is None:  # as of GPT-2 and Llama
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model


def tiny_model(labels: Labels) -> tuple[Any, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = tiny.tokenizer(text for text, _ in tiny.sentences(200))
    size = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.1, **labels.configuration(),
    )  # fmt: skip
    return tokenizer, BertForSequenceClassification(size)


def fitting_length(run: ut.Run, model: Any, tokenizer: Any, wanted: int) -> int:
    most = int(min(getattr(model.config, "max_position_embeddings", None) or wanted, tokenizer.model_max_length))
    if most < wanted:
        say(run, f"texts of {most} tokens instead of {wanted}: the model has no more positions")
    return min(most, wanted)


# --- evaluation and results -------------------------------------------------------------------------------------


def evaluate(run: ut.Run, model: Any, held_out: Tokenized, precision: Precision) -> dict[str, float]:
    if not len(held_out):
        return {}
    counts = evaluation.Counts(model.config.num_labels)
    with evaluation.evaluating(model), precision.autocast():
        for batch in evaluation.own_batches(run, held_out, held_out.collate):
            moved = on(run.device, batch)
            counts.add(model(**moved).logits, moved["labels"])
    scores = counts.scores(run)
    evaluation.report(run, scores)
    return scores


@dataclass(frozen=True)
class Outcome:
    arguments: argparse.Namespace
    data: Data
    updates: Updates
    results: evaluation.Results


def save(run: ut.Run, model: Any, tokenizer: Any, names: Names, outcome: Outcome) -> None:
    arguments, labels = outcome.arguments, outcome.data.labels.names
    is_adapter = not (arguments.full or arguments.merge)
    facts = Facts(
        task=names.task, kind="lora" if is_adapter else "full", name=f"{names.base or 'tiny-bert'} trained with UGRO",
        base=names.model, dataset=names.dataset,
        data={
            "training": f"{len(outcome.data.train):,} texts",
            "evaluation": f"{len(outcome.data.evaluation):,} texts",
            "classes": ", ".join(labels),
        },
        arguments=arguments, hardware=Hardware.of(run), training=outcome.updates.facts(),
        scores=outcome.results.scores, usage=usage(names.base, len(labels), is_adapter),
    )  # fmt: skip
    path = output.write(run, facts, output.saver(model, tokenizer, names.base, merges=arguments.merge), labels)
    say(run, f"saved {path}")


def usage(base: str | None, classes: int, is_adapter: bool) -> str:
    if not is_adapter:
        return 'from transformers import pipeline\n\nprint(pipeline("text-classification", "model")("A fine example."))'
    return f"""
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
base = AutoModelForSequenceClassification.from_pretrained("{base}", num_labels={classes})
model = PeftModel.from_pretrained(base, "model")
print(model(**tokenizer("A fine example.", return_tensors="pt")).logits.argmax(-1))
"""


if __name__ == "__main__":
    ends_clearly(main)
