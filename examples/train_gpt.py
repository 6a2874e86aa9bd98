"""Trains a small GPT to continue text, on any number of unequal GPUs or CPUs.

    ugro launch examples/train_gpt.py --nodes 3 -- --data book.txt
    ugro launch examples/train_gpt.py --nodes 3 -- --parallel fsdp     # a model that is too large for one of them
    python examples/train_gpt.py --tiny                # alone, in seconds

Without --data it generates a text. The tokens are letters, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ugro.train as ut

# With tensor parallel, the ranks of a node split these layers of every block.
SPLIT = {"blocks.*.mixing.0": "colwise", "blocks.*.mixing.2": "rowwise"}


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed, sync=arguments.sync, round_s=arguments.round_s)
    text = arguments.data.read_text() if arguments.data else made_up_text(arguments.sentences)
    dataset = Text(text, arguments.context)
    options: dict[str, Any] = {} if arguments.compress == "none" else {"compress": arguments.compress}
    if arguments.parallel == "tp+dp":
        options["plan"] = SPLIT
    model = run.wrap(Gpt(len(dataset.letters), arguments), parallel=arguments.parallel, **options)
    mixed = torch.autocast(run.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr * run.lr_scale, weight_decay=0.1)
    run.keep(model=model, optimizer=optimizer)
    loader = run.loader(dataset, global_batch=arguments.global_batch, drop_last=True)
    for epoch in run.epochs(arguments.epochs):
        for number, (before, after) in enumerate(loader):
            before, after = before.to(run.device), after.to(run.device)
            with run.step() as step:
                for letters, following in step.micro_batches((before, after), arguments.accumulate):
                    with mixed:
                        loss = functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
                    step.backward(step.loss(loss))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
            if run.is_main and number % 20 == 0:
                print(f"epoch {epoch} step {number} of {len(loader)} loss {loss.item():.4f}", flush=True)
        run.checkpoint()
    text = dataset.text(continued(model, dataset.numbers[:1], arguments.context))  # no rank may have the whole model
    if run.is_main:
        print(text, flush=True)
    run.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a text file (default: a generated text)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256, help="letters of context")
    parser.add_argument("--global-batch", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sync", choices=("step", "local"), help="how often ranks synchronise")
    parser.add_argument("--round-s", type=float, help="seconds between two exchanges of local SGD")
    parser.add_argument("--parallel", default="ddp", help="how the model is spread: ddp, fsdp or tp+dp")
    parser.add_argument("--sentences", type=int, default=400, help="of the generated text")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of samples")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: mixed precision")
    parser.add_argument("--accumulate", type=int, default=1, help="parts in which a rank computes its share")
    parser.add_argument("--compress", default="none", help="how gradients are compressed: fp16, powersgd, auto")
    parser.add_argument("--tiny", action="store_true", help="small sizes for a test")
    if parser.parse_args().tiny:  # other flags still apply
        parser.set_defaults(layers=2, width=32, heads=2, context=32, global_batch=32, epochs=1, lr=3e-3)
    return parser.parse_args()


# --- model ------------------------------------------------------------------------------------------------------


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, tokens: int, size: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, tokens, bias=False)
        self.apply(begin_small)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.logits(self.blocks(self.embed(numbers)))

    def embed(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.tokens(numbers) + self.places(torch.arange(numbers.shape[1], device=numbers.device))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mixing_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mixing = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.attention_norm(x))
        return x + self.mixing(self.mixing_norm(x))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(seen.transpose(1, 2).reshape(batch, length, width))


def begin_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


@torch.no_grad()  # type: ignore[untyped-decorator]
def continued(model: Any, numbers: torch.Tensor, context: int, letters: int = 80) -> torch.Tensor:
    model = getattr(model, "module", model).eval()  # a single rank has no DDP wrapper
    numbers = numbers[None].to(next(model.parameters()).device)
    for _ in range(letters):
        chances = functional.softmax(model(numbers[:, -context:])[:, -1], dim=-1)
        numbers = torch.cat([numbers, torch.multinomial(chances, 1)], dim=1)
    return numbers[0].cpu()


# --- data -------------------------------------------------------------------------------------------------------


class Text(Dataset):  # type: ignore[misc]
    """Pieces that overlap by half, and the same pieces shifted by one letter."""

    def __init__(self, text: str, context: int) -> None:
        if len(text) <= context:
            raise SystemExit(f"the text is too short: {len(text)} letters, and {context + 1} are needed")
        self.letters = sorted(set(text))
        self.context = context
        number_of = {letter: number for number, letter in enumerate(self.letters)}
        self.numbers = torch.tensor([number_of[letter] for letter in text])

    def __len__(self) -> int:
        return (len(self.numbers) - self.context - 1) // (self.context // 2) + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.numbers[index * (self.context // 2) :][: self.context + 1]
        return piece[:-1], piece[1:]

    def text(self, numbers: torch.Tensor) -> str:
        return "".join(self.letters[number] for number in numbers.tolist())


def made_up_text(sentences: int) -> str:
    drawn = random.Random(7)
    parts = (
        ("the fox", "a tired owl", "my brother", "the quiet engineer", "a small robot"),
        ("watches", "follows", "remembers", "carries", "does not trust"),
        ("the river", "two green lamps", "a heavy book", "the last train", "its own shadow"),
    )
    return "".join(" ".join(drawn.choice(part) for part in parts) + ". " for _ in range(sentences))


if __name__ == "__main__":
    main()
