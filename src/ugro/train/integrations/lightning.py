"""Lightning: balanced over unequal ranks, or only logged.

    from ugro.train.integrations.lightning import UgroCallback, UgroStrategy
    trainer = Trainer(strategy=UgroStrategy(), callbacks=[UgroCallback()])

With the logger alone, what a module logs becomes metrics of the run, and nothing is balanced:

    from ugro.train.integrations.lightning import UgroLogger
    trainer = Trainer(logger=UgroLogger())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ugro.train.integrations.journal import Journal, Log, missing

try:
    from lightning.pytorch.loggers.logger import Logger
except ImportError:
    try:
        from pytorch_lightning.loggers.logger import Logger  # the same library by its other name
    except ImportError as error:
        raise missing("lightning", error) from error


class UgroLogger(Logger):  # type: ignore[misc]
    def __init__(self, run: Log | None = None) -> None:
        """Without a run, values go to the file that a run would write."""
        super().__init__()
        self._own = Journal()
        self._log: Log = run or self._own

    @property
    def name(self) -> str:
        return "ugro"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._own.is_main:
            self._log.log(step=step, **{name: value for name, value in metrics.items() if name != "step"})

    def log_hyperparams(self, params: Any, *args: Any, **others: Any) -> None:
        if self._own.is_main and params:
            self._log.log(step=0, hyperparameters=dict(params) if isinstance(params, Mapping) else vars(params))

    def finalize(self, status: str) -> None:
        self._own.close()


def __getattr__(name: str) -> Any:
    """The logger alone needs less of Lightning."""
    if name in ("UgroCallback", "UgroStrategy", "checkpoint_to_resume"):
        from ugro.train.integrations import lightning_strategy

        return getattr(lightning_strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
