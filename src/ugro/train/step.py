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
        self.is_done = True  # False: a rank was lost, and the loader hands out the samples of this step again
        self._scaler: Any = None
        self._samples: int | None = None
        self._begin = 0  # of the samples that the next backward is about
        self._present = 0  # samples in the batch whose parts are computed one after the other
        self._mean: Any = 0.0  # of their losses so far

    def __enter__(self) -> Step:
        if self._stepping.elastic is not None:
            self._stepping.elastic.arm(may_join=False)
        self._stepping.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        elastic = self._stepping.elastic
        if error is None:
            self._stepping.finish() if elastic is None else elastic.block_is_over()
        elif is_out_of_memory(error):
            error.add_note(_HINT)
        elif elastic is not None and (is_done := elastic.block_was_interrupted(error, self._scaler)) is not None:
            self.is_done = is_done
            return True
        return False

    @property
    def weight(self) -> float:
        """The factor of the loss for scripts that call backward themselves."""
        return self._stepping.weight(self._samples, self._begin)

    def loss(self, value: Any) -> Any:
        """Returns the mean loss of this rank, or of the micro-batch, unchanged, and notes the end of forward."""
        if self._samples is None:
            self._stepping.forward_done(value)
        else:
            part = self._stepping.part_of_own(self._samples, self._begin, self._present)
            self._mean = self._mean + value.detach() * part
            self._stepping.forward_done(self._mean)
        return value

    def backward(self, loss: Any, *, samples: int | None = None, scaler: Any = None) -> None:
        """Backward of a mean loss over this rank's share, or over the next ``samples`` of it with several backwards."""
        self._scaler = scaler
        if self._stepping.elastic is not None:
            self._stepping.elastic.heed(scaler)
        self._stepping.backward(loss, self._samples if samples is None else samples, scaler, self._begin)
        if samples is not None and self._samples is None:
            self._begin += samples

    def micro_batches(self, batch: Any, count: int | None = None) -> Iterator[Any]:
        """Parts of the batch, one after the other; gradients are exchanged with the last one only."""
        slice_ = self._stepping.slice
        is_lockstep = self._stepping.is_lockstep
        planned = self._stepping.common_parts() if is_lockstep else 1 if slice_ is None else slice_.micro_batches
        present = pieces(batch, None)
        parts = sizes(present, planned if count is None else count, exactly=is_lockstep)
        model = self._stepping.model
        self._present, self._mean = present, 0.0
        begin = 0
        for number, size in enumerate(parts, start=1):
            is_apart = number < len(parts) and self._stepping.is_hooked
            self._samples, self._begin = size, begin
            first = min(begin, present - 1)  # of a part without samples, one sample without weight
            with model.no_sync() if is_apart else contextlib.nullcontext():
                yield pieces(batch, (first, first + max(1, size), present))
            begin += size
        self._samples, self._begin = None, 0
