"""The command line of a recipe. Flags may be written with ``-`` or ``_``: ``--lora-r 8`` and ``--lora_r 8``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ugro.kernel.support.errors import NotFound, UgroError
from ugro.train.run import Run

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


# --- table ------------------------------------------------------------------------------------------------------------
# recipe.yaml, which lies beside a recipe's script: what it is for, and short names of models and datasets.


MODEL_FOLDER, DATASET_FOLDER = "UGRO_FOLDER_MODEL", "UGRO_FOLDER_DATASET"  # paths of what travelled with the job


@dataclass(frozen=True, slots=True)
class Named:
    """A model or dataset: what the user calls it, and where it is: a hub id, or a path on this machine."""

    name: str
    place: str
    is_local: bool
    about: Mapping[str, Any]  # the table's entry

    @property
    def folder(self) -> Path:
        return Path(self.place)

    def about_text(self, key: str) -> str | None:
        value = self.about.get(key)
        return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Recipe:
    task: str
    models: Mapping[str, str]
    datasets: Mapping[str, Mapping[str, Any]]

    @classmethod
    def beside(cls, script: str) -> Recipe:
        import yaml

        content = yaml.safe_load(Path(script).with_name("recipe.yaml").read_text(encoding="utf-8"))
        return cls(content["task"], content.get("models", {}), content.get("datasets", {}))

    def model(self, name: str) -> Named:
        return _named(name, os.environ.get(MODEL_FOLDER), {key: {"path": hub} for key, hub in self.models.items()})

    def dataset(self, name: str) -> Named:
        return _named(name, os.environ.get(DATASET_FOLDER), self.datasets)


@dataclass(frozen=True, slots=True)
class Names:
    """What --model and --dataset mean; None with --tiny, which makes its own."""

    task: str
    model: Named | None
    dataset: Named | None

    @classmethod
    def of(cls, script: str, arguments: argparse.Namespace) -> Names:
        recipe = Recipe.beside(script)
        model = recipe.model(arguments.model) if arguments.model else None
        return cls(recipe.task, model, recipe.dataset(arguments.dataset) if arguments.dataset else None)

    @property
    def base(self) -> str | None:
        return self.model.name if self.model else None

    @property
    def data(self) -> str:
        return self.dataset.name if self.dataset else "data made by the script"


def _named(name: str, folder: str | None, known: Mapping[str, Mapping[str, Any]]) -> Named:
    by_id = next((one for one in known.values() if one.get("path") == name), {})
    if folder:  # a folder of the user's may be named like one of the table
        return Named(name, folder, True, by_id)
    about = known.get(name) or by_id
    hub_id = str(about.get("path", name))
    local = Path(name).expanduser()
    if local.exists():
        return Named(local.resolve().name, str(local), True, {})
    if name.startswith((".", "/", "~")):
        raise NotFound(f"no file or folder {name}")
    return Named(hub_id, hub_id, False, about)


# --- talk -------------------------------------------------------------------------------------------------------------
# What a recipe says: progress on stdout, and an expected error as two lines instead of a traceback.


_EVERY_S = 2.0


def say(run: Run, text: str) -> None:
    """One line in the log of the main rank."""
    if run.is_main:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class Progress:
    """Lines about steps: the first, the last, and one every few seconds."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self._steps = run, steps
        self._next = 0.0

    def step(self, loss: float | Callable[[], float], learning_rate: float) -> None:
        done, now = self._run.progress.step, time.monotonic()
        if not self._run.is_main or (now < self._next and done < self._steps):
            return
        self._next = now + _EVERY_S
        value = loss() if callable(loss) else loss
        epoch = self._run.progress.epoch + 1
        say(self._run, f"epoch {epoch}  step {done} of {self._steps}  loss {value:.4f}  lr {learning_rate:.2e}")


def ends_clearly(main: Callable[[], None]) -> None:
    """Runs ``main``. The user sees an expected error as what happened and what to do."""
    _quieten()
    try:
        main()
    except UgroError as error:
        _stop(error)


def _quieten() -> None:
    """A log is no place for progress bars, nor for what one library says to another."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft|datasets")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns when loader processes are forked
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


def _stop(error: UgroError) -> NoReturn:
    hint = f"\nhint:  {error.hint}" if error.hint else ""
    sys.stderr.write(f"error: {error}{hint}\n")
    raise SystemExit(error.exit_code)


def size_of(size_bytes: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"
