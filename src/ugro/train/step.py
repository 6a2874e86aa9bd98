"""A step as a ``with`` block: weights the loss, and notes when forward and backward are done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ugro.train.memory import is_out_of_memory
from ugro.train.pieces import pieces, sizes
from ugro.train.stepping import Stepping

_HINT = "a with block cannot be repeated; run.step(loss_fn, batch) retries with fewer samples at once"


class Step:
    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        self._samples: int | None = None

    def __enter__(self) -> Step:
        self._stepping.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._stepping.finish()
        elif is_out_of_memory(error):
            error.add_note(_HINT)

    @property
    def weight(self) -> float:
        """The factor of the loss for scripts that call backward themselves."""
        return self._stepping.weight(self._samples)

    def loss(self, value: Any) -> Any:
        """Returns the mean loss of this rank unchanged, and notes the end of forward."""
        self._stepping.forward_done(value)
        return value

    def backward(self, loss: Any, *, samples: int | None = None, scaler: Any = None) -> None:
        """Backward of a mean loss over this rank's share, or over ``samples`` of it with several backwards."""
        self._stepping.backward(loss, self._samples if samples is None else samples, scaler)

    def micro_batches(self, batch: Any, count: int | None = None) -> Iterator[Any]:
        """Parts of the batch, one after the other; gradients are exchanged with the last one only."""
        slice_ = self._stepping.slice
        planned = 1 if slice_ is None else slice_.micro_batches
        present = pieces(batch, None)
        parts = sizes(present, planned if count is None else count)
        model = self._stepping.model
        begin = 0
        for number, size in enumerate(parts, start=1):
            is_apart = number < len(parts) and self._stepping.is_hooked
            self._samples = size
            with model.no_sync() if is_apart else contextlib.nullcontext():
                yield pieces(batch, (begin, begin + size, present))
            begin += size
        self._samples = None
