"""The command line of a recipe. Flags may be written with ``-`` or ``_``: ``--lora-r 8`` and ``--lora_r 8``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

_LORA_R = 16


def new(about: str | None) -> argparse.ArgumentParser:
    """Flags that every recipe has."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="short name, hub id or folder of the model to start from")
    parser.add_argument("--dataset", help="short name or hub id, or a file or folder with data")
    parser.add_argument("--epochs", type=whole(1), default=3, help="passes over the training data")
    parser.add_argument("--steps", type=whole(1), help="stop after this many steps at the latest")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="samples per step, over all ranks")
    parser.add_argument("--lr", "--learning-rate", type=positive, help="peak learning rate (default: by the recipe)")
    parser.add_argument("--warmup", type=fraction, default=0.03, help="part of the steps with a rising learning rate")
    parser.add_argument("--weight-decay", type=not_negative, default=0.01, help="of matrices, not of biases and norms")
    parser.add_argument(
        "--eval-split", default="auto",
        help="what to evaluate on: the name of a split, a fraction of the training data such as 0.05, or none; "
        "auto takes the validation split, else the test split, else 0.05",
    )  # fmt: skip
    parser.add_argument("--checkpoint-steps", type=whole(1), help="steps between checkpoints (default: one per epoch)")
    parser.add_argument("--seed", type=int, default=0, help="of order, new weights and splits")
    parser.add_argument(
        "--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto",
        help="precision of the computation; auto takes the best that every rank has",
    )  # fmt: skip
    parser.add_argument("--workers", type=whole(0), default=0, help="loader processes per rank")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model's author sent")
    parser.add_argument("--tiny", action="store_true", help="a small model and data made here: a test in seconds")
    return parser


def add_text(parser: argparse.ArgumentParser, seq_length: int) -> None:
    """Flags of recipes that read text."""
    parser.add_argument("--seq-length", type=whole(2), default=seq_length, help="most tokens of a sample")
    parser.add_argument("--text-column", help="column with the text (default: text, else the only column of texts)")
    parser.add_argument("--lora-r", type=whole(1), default=_LORA_R, help="rank of the LoRA matrices")
    parser.add_argument("--lora-alpha", type=positive, help="scale of LoRA (default: twice the rank)")
    parser.add_argument(
        "--lora-targets",
        help="layers that get LoRA, separated by commas, or all-linear (default: the usual ones of the architecture)",
    )
    parser.add_argument("--full", action="store_true", help="train all parameters instead of LoRA")
    parser.add_argument("--qlora", action="store_true", help="LoRA on a model in 4 bits; needs CUDA and bitsandbytes")
    parser.add_argument("--merge", action="store_true", help="save a whole model, with LoRA added to its weights")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory for more computation")


def parse(
    parser: argparse.ArgumentParser, tiny: dict[str, Any], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """``tiny`` are the defaults with --tiny; what the user says holds all the same."""
    given = [_dashed(one) for one in (sys.argv[1:] if argv is None else argv)]
    if parser.parse_args(given).tiny:
        parser.set_defaults(**tiny)
    found = parser.parse_args(given)
    if not found.tiny and not (found.model and found.dataset):
        parser.error("--model and --dataset are needed, or --tiny")
    if getattr(found, "full", False) and getattr(found, "qlora", False):
        parser.error("--full and --qlora exclude each other")
    return found


def declared(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The flags as recipe.yaml lists them."""
    shown = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    return [_declared(one) for one in shown]


def _declared(action: argparse.Action) -> dict[str, Any]:
    name, *also = action.option_strings
    return {"name": name, "help": action.help, "default": action.default, **({"also": also} if also else {})}


def _dashed(text: str) -> str:
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else text


def whole(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parsed


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"not a finite number: {text!r}")
    return value


def not_negative(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def positive(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def fraction(text: str) -> float:
    if not 0 <= (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
