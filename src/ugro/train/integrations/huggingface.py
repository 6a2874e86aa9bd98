"""For the Trainer of Hugging Face: what it logs becomes metrics of the run.

    from ugro.train.integrations.huggingface import UgroCallback
    trainer = Trainer(model, arguments, callbacks=[UgroCallback()])

The Trainer makes its own steps and shares; nothing is balanced.
"""

from __future__ import annotations

from typing import Any

from ugro.train.integrations.journal import Journal, Log, missing

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", error) from error


class UgroCallback(TrainerCallback):  # type: ignore[misc]
    def __init__(self, run: Log | None = None) -> None:
        """Without a run, what is logged goes to the file in which a run would put it."""
        self._own = Journal()
        self._log: Log = run or self._own

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Every rank is told the same; one writes it."""
        if logs and state.is_world_process_zero:
            self._log.log(step=int(state.global_step), **{_name(name): value for name, value in logs.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._own.close()


def _name(name: str) -> str:
    """``step`` names the step of a record, and is no value of it."""
    return "logged_step" if name == "step" else name
