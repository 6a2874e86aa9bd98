"""Fine-tunes a causal language model (Llama, GPT-2, Qwen, …), with LoRA or all of it, on unequal GPUs or CPUs.

    ugro launch --model tinyllama --dataset wikitext --nodes 3
    python train.py --model ./my-llama --dataset notes.txt
    python train.py --tiny                             # alone, in seconds, without a download
"""

from __future__ import annotations

import argparse
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from ugro.train.recipe.command_line import Names, ends_clearly, say, size_of
from ugro.train.recipe.dataset import explained, together
from ugro.train.recipe.output import Facts, Hardware
from ugro.train.recipe.training import Precision, Updates

IGNORED = -100  # a label that transformers leaves out of the loss
LR_LORA, LR_FULL = 2e-4, 2e-5
TOKENIZED_AT_ONCE = 256  # rows


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    precision = Precision.of(run, arguments.dtype)
    lora.check(arguments, precision)
    names = Names.of(__file__, arguments)
    tokenizer, model = together(run, lambda: load_model(names, arguments, precision), "the model")
    arguments.seq_length = fitting_length(run, model, arguments.seq_length)
    data = together(run, lambda: load_data(names, arguments, tokenizer), "the data")
    say(run, data.words)

    model = lora.prepared(model, arguments, "CAUSAL_LM")
    wrapped = run.wrap(model)
    say(run, f"each step exchanges {size_of(lora.trained_bytes(model))} of gradients")
    packing = words_on_packing(model, run.device) if arguments.packing else "one"
    say(run, f"documents in a sequence: {packing}")
    train = Sequences(data.train, arguments.seq_length, packs=arguments.packing)
    held_out = Sequences(data.evaluation, arguments.seq_length, packs=arguments.packing)
    check(train, names)
    loader = run.loader(
        train, global_batch=arguments.batch_size, weights=train.targets, collate_fn=collate,
        num_workers=arguments.workers,
    )  # fmt: skip
    updates = Updates(run, model, arguments, precision, len(loader), LR_FULL if arguments.full else LR_LORA)
    results = evaluation.Results()
    run.keep(model=lora.kept(model), results=results, **updates.kept())

    for _ in run.epochs(updates.epochs):
        for batch in updates.batches(loader):
            updates.step(lambda part: wrapped(**on(run.device, part)).loss, batch)
        results.scores = evaluate(run, model, held_out, precision)
        run.checkpoint()
    save(run, model, tokenizer, names, Outcome(arguments, train, held_out, data, updates, results, packing))
    run.close()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    small = {"seq_length": 32, "batch_size": 8, "epochs": 2, "lr": 1e-2, "merge": True, "lora_targets": "all-linear"}
    return flags.parse(parser(), small, argv)


def parser() -> argparse.ArgumentParser:
    made = flags.new(__doc__)
    flags.add_text(made, seq_length=1024)
    made.add_argument(
        "--packing", action=argparse.BooleanOptionalAction, default=True,
        help="fill sequences with several documents, which do not see each other; without it, they are padded",
    )  # fmt: skip
    return made


# --- model ------------------------------------------------------------------------------------------------------


def load_model(names: Names, arguments: argparse.Namespace, precision: Precision) -> tuple[Any, Any]:
    """The tokenizer and the model, from the cache, a folder or the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(arguments.seed)  # the same new weights on every rank
    if names.model is None:
        return tiny_model()
    options = lora.load_options(arguments, precision)
    with explained("model", names.model):
        tokenizer = AutoTokenizer.from_pretrained(names.model.place, trust_remote_code=arguments.trust_remote_code)
        return tokenizer, AutoModelForCausalLM.from_pretrained(names.model.place, **options)


def tiny_model() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny.tokenizer(text for text, _ in tiny.sentences(200))
    size = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2,
    )  # fmt: skip
    return tokenizer, LlamaForCausalLM(size)


def fitting_length(run: ut.Run, model: Any, wanted: int) -> int:
    most = getattr(model.config, "max_position_embeddings", None) or wanted
    if most < wanted:
        say(run, f"sequences of {most} tokens instead of {wanted}: the model has no more positions")
    return min(most, wanted)


def words_on_packing(model: Any, device: Any) -> str:
    is_apart = keeps_documents_apart(model, device)
    return "several; they do not see each other" if is_apart else "several; later ones see earlier ones"


def keeps_documents_apart(model: Any, device: Any) -> bool:
    """Whether a document in a packed sequence is computed as if it were alone; most architectures can."""
    places = torch.tensor([[0, 1, 0, 1]] * 2, device=device)
    words = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 3]], device=device)  # the first documents differ
    with evaluation.evaluating(model):
        one, other = model(input_ids=words, position_ids=places, use_cache=False).logits[:, 2:]
    return bool(torch.equal(one, other))


# --- data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Token ids of all documents in a row, and where documents start. It takes five bytes per token."""

    ids: torch.Tensor  # int32
    starts: torch.Tensor  # bool

    def __len__(self) -> int:
        return int(self.starts.sum())

    def select(self, numbers: Sequence[int]) -> Documents:
        number_of = torch.cumsum(self.starts, 0) - 1
        wanted = torch.zeros(len(self), dtype=torch.bool)
        wanted[torch.tensor(numbers, dtype=torch.long)] = True
        mask = wanted[number_of]
        return Documents(self.ids[mask], self.starts[mask])

    def cut(self, place: int) -> tuple[Documents, Documents]:
        after = self.starts[place:].clone()
        after[:1] = True
        return Documents(self.ids[:place], self.starts[:place]), Documents(self.ids[place:], after)


@dataclass(frozen=True)
class Data:
    train: Documents
    evaluation: Documents
    words: str


def load_data(names: Names, arguments: argparse.Namespace, tokenizer: Any) -> Data:
    if names.dataset is None:
        made = tokenized(((text, True) for text, _ in tiny.sentences(600)), tokenizer)
        return divided(made, 0.1, arguments.seed, "data made by this script")
    found = dataset.tables(names.dataset, files.TEXTS | files.TABLES)
    chosen = dataset.chosen(found, names.dataset, arguments.eval_split)
    column = dataset.text_column(chosen.train, names.dataset, arguments.text_column)
    has_lines = names.dataset.about.get("rows") == "lines"
    train = tokenized(rows(chosen.train, column, has_lines), tokenizer)
    if chosen.evaluation is None:
        return divided(train, chosen.held_out, arguments.seed, f"{names.dataset.name}, evaluated on {chosen.words}")
    evaluation_ = tokenized(rows(chosen.evaluation, column, has_lines), tokenizer)
    return described(train, evaluation_, f"{names.dataset.name}, evaluated on {chosen.words}")


def rows(table: dataset.Table, column: str, has_lines: bool) -> Iterator[tuple[str, bool]]:
    """Texts, and whether a document starts with them. ``has_lines``: all rows are lines of one text."""
    for number, row in enumerate(table):
        text = row.get(column)
        if not isinstance(text, str):
            raise UsageError(f"row {number + 1}: column {column!r} has {type(text).__name__} instead of a text")
        yield text, number == 0 if has_lines else bool(row.get(files.STARTS, True))


def tokenized(texts: Iterable[tuple[str, bool]], tokenizer: Any) -> Documents:
    """Every document begins and ends with the tokens that the tokenizer has for that."""
    ids, starts = array("i"), bytearray()
    first, last = _edges(tokenizer)
    is_empty = False
    texts = iter(texts)
    while chunk := list(itertools.islice(texts, TOKENIZED_AT_ONCE)):
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenizer([text for text, _ in chunk], **options)["input_ids"]
        for found, (text, begins) in zip(encoded, chunk, strict=True):
            is_start = begins or is_empty
            is_empty = is_start and not text.strip()  # the document, as far as it was read
            if is_empty:
                continue
            new = [*(last if ids else ()), *first, *found] if is_start else found
            starts += bytes(len(new))
            if is_start:
                starts[len(ids) + (len(last) if ids else 0)] = 1
            ids.extend(new)
    if ids:
        ids.extend(last)
        starts += bytes(len(last))
        starts[0] = 1
    return Documents(torch.tensor(ids, dtype=torch.int32), torch.tensor(starts, dtype=torch.bool))


def _edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    usual = tokenizer("a")["input_ids"]
    return [begin] if begin is not None and usual[:1] == [begin] else [], [end] if end is not None else []


def divided(documents: Documents, part: float, seed: int, name: str) -> Data:
    """Whole documents are held out; of a few long ones, the end of the text."""
    if part and len(documents) * part >= 1:
        train, held_out = dataset.held_out(len(documents), part, seed)
        return described(documents.select(train), documents.select(held_out), name)
    return described(*documents.cut(round(len(documents.ids) * (1 - part))), name)


def described(train: Documents, evaluation_: Documents, name: str) -> Data:
    words = f"{name}: {len(train):,} documents, {len(train.ids):,} tokens"
    return Data(train, evaluation_, f"{words}; {len(evaluation_.ids):,} tokens to evaluate on")


class Sequences(Dataset):  # type: ignore[misc]
    """Samples of at most ``length`` tokens: packed, full sequences, or parts of one document each.

    A token is predicted from those before it in its document and sequence. The first one has none, so sequences
    differ in how many predictions they have: ``targets``.
    """

    def __init__(self, documents: Documents, length: int, *, packs: bool) -> None:
        self.ids, self.starts = documents.ids, documents.starts
        edges = [0] if packs else torch.nonzero(self.starts).flatten().tolist()
        edges.append(len(self.ids))
        begins = torch.tensor([at for first, end in pairwise(edges) for at in range(first, end, length)]).long()
        ends = torch.cat([begins, torch.tensor([len(self.ids)])])[1:]
        counted = torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(self.starts, 0)])
        firsts = counted[ends] - counted[begins] + (~self.starts[begins]).long()  # tokens that nothing predicts
        targets = ends - begins - firsts
        has_targets = targets > 0
        self.begins, self.ends, self.targets = begins[has_targets], ends[has_targets], targets[has_targets]

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        part = slice(int(self.begins[index]), int(self.ends[index]))
        ids, starts = self.ids[part].long(), self.starts[part].clone()
        starts[0] = True
        places = torch.arange(len(ids))
        return {
            "input_ids": ids,
            "labels": torch.where(starts, IGNORED, ids),
            "position_ids": places - torch.cummax(torch.where(starts, places, 0), 0).values,
        }


def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded at the end, where no token sees it. No mask: with one, transformers would not look for documents."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        "input_ids": torch.stack([_padded(sample["input_ids"], longest, 0) for sample in samples]),
        "labels": torch.stack([_padded(sample["labels"], longest, IGNORED) for sample in samples]),
        "position_ids": torch.stack([_counted_on(sample["position_ids"], longest) for sample in samples]),
    }


def _padded(values: torch.Tensor, length: int, filling: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filling)


def _counted_on(places: torch.Tensor, length: int) -> torch.Tensor:
    more = torch.arange(1, length - len(places) + 1)
    return torch.cat([places, places[-1] + more])


def on(device: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return {**moved, "use_cache": False}


def check(train: Sequences, names: Names) -> None:
    if not len(train):
        raise UsageError(f"{names.data}: no text to train on", hint="a document needs at least two tokens")


# --- evaluation and results -------------------------------------------------------------------------------------


def evaluate(run: ut.Run, model: Any, held_out: Sequences, precision: Precision) -> dict[str, float]:
    """The mean over all predictions of all ranks."""
    if not len(held_out):
        return {}
    loss = targets = 0.0
    with evaluation.evaluating(model), precision.autocast():
        for batch in evaluation.own_batches(run, held_out, collate):
            count = int((batch["labels"] != IGNORED).sum())
            loss += float(model(**on(run.device, batch)).loss) * count
            targets += count
    loss, targets = evaluation.summed(run, [loss, targets])
    scores = {"loss": loss / targets, "perplexity": math.exp(min(loss / targets, 700))}
    evaluation.report(run, scores)
    return scores


@dataclass(frozen=True)
class Outcome:
    arguments: argparse.Namespace
    train: Sequences
    held_out: Sequences
    data: Data
    updates: Updates
    results: evaluation.Results
    packing: str


def save(run: ut.Run, model: Any, tokenizer: Any, names: Names, outcome: Outcome) -> None:
    arguments = outcome.arguments
    is_adapter = not (arguments.full or arguments.merge)
    base = names.base
    facts = Facts(
        task=names.task, kind="lora" if is_adapter else "full", name=f"{base or 'tiny-llama'} trained with UGRO",
        base=names.model, dataset=names.dataset,
        data={
            "training": f"{len(outcome.train):,} sequences, {len(outcome.data.train.ids):,} tokens",
            "evaluation": f"{len(outcome.held_out):,} sequences, {len(outcome.data.evaluation.ids):,} tokens",
            "documents in a sequence": outcome.packing,
        },
        arguments=arguments, hardware=Hardware.of(run),
        training=outcome.updates.facts(), scores=outcome.results.scores,
        usage=usage(base, is_adapter),
    )  # fmt: skip
    path = output.write(run, facts, output.saver(model, tokenizer, base, merges=arguments.merge))
    say(run, f"saved {path}")


def usage(base: str | None, is_adapter: bool) -> str:
    load = (
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\nmodel = PeftModel.from_pretrained(base, "model")'
        if is_adapter
        else 'model = AutoModelForCausalLM.from_pretrained("model")'
    )
    return f"""
{"from peft import PeftModel" if is_adapter else ""}
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
{load}
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
"""


if __name__ == "__main__":
    ends_clearly(main)
