"""What a recipe says: progress on stdout, and an expected error as two lines instead of a traceback."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from ugro.core.errors import UgroError
from ugro.train.run import Run

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
