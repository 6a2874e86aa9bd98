"""Trains BERT to predict masked words, on any number of unequal GPUs or CPUs.

    ugro launch examples/train_bert.py --nodes 3 -- --data corpus.txt
    python examples/train_bert.py --tiny               # alone, in seconds

The sizes are those of BERT-base; flags change them. The vocabulary comes from the data, so nothing is downloaded.
Without --data, the script generates a text.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ugro.train as ut

UNKNOWN, MASK, BEGIN = 0, 1, 2  # the first ids of the vocabulary
MASKED_SHARE = 0.15


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    text = arguments.data.read_text() if arguments.data else made_up_text(arguments.sentences)
    dataset = MaskedText(text, arguments.length, arguments.vocabulary)
    compression = {} if arguments.compress == "none" else {"compress": arguments.compress}
    model = run.wrap(Bert(dataset.size, arguments), **compression)
    mixed = torch.autocast(run.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr * run.lr_scale, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=arguments.warm_up)
    run.keep(model=model, optimizer=optimizer, schedule=schedule)
    loader = run.loader(dataset, global_batch=arguments.global_batch, drop_last=True)
    for epoch in run.epochs(arguments.epochs):
        for number, (words, places, hidden) in enumerate(loader):
            words, places, hidden = words.to(run.device), places.to(run.device), hidden.to(run.device)
            with run.step() as step:
                for seen, where, wanted in step.micro_batches((words, places, hidden), arguments.accumulate):
                    with mixed:
                        loss = functional.cross_entropy(model(seen, where).flatten(0, 1), wanted.flatten())
                    step.backward(step.loss(loss))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            run.log(loss=loss, lr=schedule.get_last_lr()[0])
            if run.is_main and number % 20 == 0:
                print(f"epoch {epoch} step {number} of {len(loader)} loss {loss.item():.4f}", flush=True)
        run.checkpoint()
    run.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a text file (default: a generated text)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=128, help="words of a sample")
    parser.add_argument("--vocabulary", type=int, default=30_522, help="maximum size of the vocabulary")
    parser.add_argument("--global-batch", type=int, default=128, help="samples per step, over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warm-up", type=int, default=1000, help="steps")
    parser.add_argument("--sentences", type=int, default=2000, help="of the generated text")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of samples")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: mixed precision")
    parser.add_argument("--accumulate", type=int, default=1, help="parts in which a rank computes its share")
    parser.add_argument("--compress", default="none", help="how gradients are compressed: fp16, powersgd, auto")
    parser.add_argument("--tiny", action="store_true", help="small sizes for a test")
    if parser.parse_args().tiny:  # other flags still apply
        parser.set_defaults(layers=2, width=32, heads=2, length=16, global_batch=32, epochs=1, lr=3e-3, warm_up=2)
    return parser.parse_args()


# --- model ------------------------------------------------------------------------------------------------------


class Bert(nn.Module):  # type: ignore[misc]
    def __init__(self, vocabulary: int, size: argparse.Namespace) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        layer = nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.guess = nn.Sequential(nn.Linear(size.width, size.width), nn.GELU(), nn.LayerNorm(size.width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Scores of all words at the masked positions only."""
        order = torch.arange(words.shape[1], device=words.device)
        seen = self.encoder(self.norm(self.words(words) + self.places(order)))
        wanted = seen.gather(1, places[..., None].expand(-1, -1, seen.shape[-1]))
        return self.guess(wanted) @ self.words.weight.T + self.bias


# --- data -------------------------------------------------------------------------------------------------------


class MaskedText(Dataset):  # type: ignore[misc]
    """A sample has words of which some are masked, the masked positions, and the original words.

    Every sample has the same number of masked words, so the mean over samples is the mean over predictions.
    """

    def __init__(self, text: str, length: int, vocabulary: int) -> None:
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        if len(words) < length:
            raise SystemExit(f"the text is too short: {len(words)} words, and {length} are needed")
        known = [word for word, _ in Counter(words).most_common(vocabulary - 3)]
        number_of = {word: number for number, word in enumerate(known, start=3)}
        self.size = len(known) + 3
        self.length = length
        self.masked = max(1, round(MASKED_SHARE * length))
        self.numbers = torch.tensor([number_of.get(word, UNKNOWN) for word in words])

    def __len__(self) -> int:
        return len(self.numbers) // (self.length - 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        piece = self.numbers[index * (self.length - 1) :][: self.length - 1]
        words = torch.cat([torch.tensor([BEGIN]), piece])
        places = 1 + torch.randperm(len(piece))[: self.masked]
        hidden = words[places]
        # Of ten selected words, eight are masked, one is replaced, one stays.
        chance = torch.rand(self.masked)
        other = torch.randint(3, self.size, (self.masked,))
        words[places] = torch.where(chance < 0.8, MASK, torch.where(chance < 0.9, other, hidden))
        return words, places, hidden


def made_up_text(sentences: int) -> str:
    """Sentences whose words depend on each other, so that masked ones can be predicted."""
    drawn = random.Random(7)
    animals = {"fox": "forest", "owl": "night", "whale": "sea", "camel": "desert", "mole": "garden"}
    verbs = ("loves", "knows", "leaves", "finds")
    return " ".join(
        f"the {animal} {drawn.choice(verbs)} the {animals[animal]} ."
        for animal in (drawn.choice(sorted(animals)) for _ in range(sentences))
    )


if __name__ == "__main__":
    main()
