"""Hugging Face Trainer: balanced over unequal ranks, or only logged.

    from ugro.train.integrations.huggingface import UgroTrainer as Trainer

With the callback alone, what the Trainer logs becomes metrics of the run, and nothing is balanced:

    from ugro.train.integrations.huggingface import UgroCallback
    trainer = Trainer(model, arguments, callbacks=[UgroCallback()])
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
        """Without a run, values go to the file that a run would write."""
        self._own = Journal()
        self._log: Log = run or self._own

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer knows how many steps there will be."""
        if self._log is self._own and state.is_world_process_zero and state.max_steps > 0:
            self._own.announce(step=int(state.global_step), total_steps=int(state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Called on every rank with the same values; one rank writes them."""
        if logs and state.is_world_process_zero:
            self._log.log(step=int(state.global_step), **{_name(name): value for name, value in logs.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._own.close()


def _name(name: str) -> str:
    """``step`` is the step of the record, not one of its values."""
    return "logged_step" if name == "step" else name


def __getattr__(name: str) -> Any:
    """The Trainer takes seconds to import, which the callback alone does not need."""
    if name in ("UgroTrainer", "UgroTrainerMixin"):
        from ugro.train.integrations import hf_trainer

        return getattr(hf_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
