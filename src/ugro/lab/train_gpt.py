"""A small GPT that learns to continue text. ``ugro demo`` trains it on unequal nodes, once with equal shares and once
with shares that follow the measurements.

It is a script as a user would write it with ``ugro.train``, and generates its own text. Rank 0 prints the progress in
lines that people and the demo read; all numbers were measured by the run itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut

LENGTH, WIDTH, HEADS, LAYERS = 32, 128, 4, 4
SAMPLES, GLOBAL_BATCH, EPOCHS = 1_536, 96, 3
SETTLED_STEPS = 8  # the shares have settled by then; results are measured after these steps
TOLD_EVERY = 4  # steps

_WHO = "the fox|a tired owl|the old miller|my brother|her neighbour|the quiet engineer|a small robot"
_DOES = "watches|follows|remembers|paints|carries|measures|does not trust"
_WHAT = "the river|two green lamps|a heavy book|the last train|an empty boat|the slow machine|its own shadow"
_WHERE = "in the rain|before dawn|behind the mill|without a word|near the harbour|all winter long"


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # a lab node has at most one core
    run = ut.init()
    letters, dataset = make_dataset()
    model = run.wrap(Gpt(len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.keep(model=model, optimizer=optimizer)
    loader = run.loader(dataset, global_batch=GLOBAL_BATCH)
    teller = Teller(run, arguments.epochs * len(loader))
    seen = torch.zeros(SAMPLES, dtype=torch.long)
    for _ in run.epochs(arguments.epochs):
        for text, number in loader:
            with run.step() as step:
                scores = model(text[:, :-1])
                loss = step.loss(nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()))
                step.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen[number] += 1
            teller.tell()
        run.checkpoint()
    if run.ranks > 1:
        torch.distributed.all_reduce(seen)
    run.close()
    teller.conclude(int(seen.min()), int(seen.max()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    return parser.parse_args()


# --- model and text ---------------------------------------------------------------------------------------------


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: Any) -> Any:
        return self.head(self.blocks(self.letters(text) + self.places, mask=self.mask, is_causal=True))


def make_text() -> str:
    """The same on every rank and in every attempt."""
    drawn = random.Random(7)
    parts = [words.split("|") for words in (_WHO, _DOES, _WHAT, _WHERE)]
    return "".join(" ".join(drawn.choice(part) for part in parts) + ". " for _ in range(1_500))


def make_dataset() -> tuple[str, Any]:
    """Pieces of the text, each with its number, so that uses can be counted."""
    text = make_text()
    letters = "".join(sorted(set(text)))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    begins = torch.randint(0, len(text) - LENGTH - 1, (SAMPLES, 1), generator=torch.Generator().manual_seed(7))
    return letters, torch.utils.data.TensorDataset(
        numbers[begins + torch.arange(LENGTH + 1)], torch.arange(SAMPLES)
    )


# --- reporting --------------------------------------------------------------------------------------------------


class Teller:
    """Prints what the run records about all ranks; on rank 0 only."""

    def __init__(self, run: ut.Run, steps: int) -> None:
        self._path = Path(os.environ.get("UGRO_OUTPUT", "ugro_output"), "metrics.jsonl") if run.is_main else None
        self._steps = steps
        self._offset = 0
        self._nodes: list[str] = []
        self._profiles: list[dict[str, Any]] = []

    def tell(self) -> None:
        for record in self._news():
            if record["kind"] == "run":
                self._nodes = record["nodes"]
            elif record["kind"] == "plan":
                shares = zip(self._nodes, record["shares"], strict=True)
                words = ", ".join(f"{node} {share}" for node, share in shares)
                say(f"from step {record['holds_from'] + 1}: {words}; {record['reason']}")
            elif record["kind"] == "profile":
                self._profiles.append(record)
                if len(self._profiles) % TOLD_EVERY == 0:
                    self._tell_steps(record["step"] + 1, self._profiles[-TOLD_EVERY:])

    def conclude(self, least_seen: int, most_seen: int) -> None:
        """Call this after the ranks have finished, when all records are written."""
        self.tell()
        # All steps, if the attempt was too short to settle.
        if settled := self._profiles[SETTLED_STEPS:] or self._profiles:
            result = {
                "steps": len(self._profiles),
                "measured_steps": len(settled),
                "samples_per_s": speed(settled),
                "waiting_ratio": waiting_ratio(settled),
                "final_loss": mean_loss(self._profiles[-2 * TOLD_EVERY :]),
                "nodes": self._nodes,
                "shares": self._profiles[-1]["shares"],
                "computing_s": means(settled, "own_s"),
                "waiting_s": means(settled, "waiting_s"),
                "seen": [least_seen, most_seen],
            }
            say(f"result {json.dumps(result)}")

    def _news(self) -> list[dict[str, Any]]:
        if self._path is None or not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def _tell_steps(self, step: int, newest: list[dict[str, Any]]) -> None:
        figures = f"loss {mean_loss(newest):.4f}, {speed(newest):.1f} samples/s, waiting {waiting_ratio(newest):.1%}"
        say(f"step {step} of {self._steps}: {figures}")


def speed(profiles: list[dict[str, Any]]) -> float:
    """Samples per second."""
    return float(sum(one["samples"] for one in profiles) / math.fsum(one["step_s"] for one in profiles))


def waiting_ratio(profiles: list[dict[str, Any]]) -> float:
    """The share of the time of all ranks that was spent waiting for slower ones."""
    waited_s = math.fsum(math.fsum(one["waiting_s"]) for one in profiles)
    return waited_s / math.fsum(one["step_s"] * len(one["waiting_s"]) for one in profiles)


def mean_loss(profiles: list[dict[str, Any]]) -> float:
    return math.fsum(float(one["loss"]) for one in profiles) / len(profiles)


def means(profiles: list[dict[str, Any]], name: str) -> list[float]:
    """The values of each rank."""
    return [math.fsum(ranks) / len(profiles) for ranks in zip(*(one[name] for one in profiles), strict=True)]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
