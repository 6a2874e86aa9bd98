"""A step as a ``with`` block: weights the loss, and notes when forward and backward are done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.memory import is_out_of_memory
from ugro.train.pieces import REORDERED, sizes
from ugro.train.stepping import Stepping

_HINT = "a with block cannot be repeated; run.step(loss_fn, batch) retries with fewer samples at once"


class Step:
    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        self.is_done = True  # False: a rank was lost, and the loader hands out the samples of this step again
        self._scaler: Any = None
        self._samples: int | None = None
        self._begin = 0  # of the samples that the next backward is about
        self._is_divided = False  # by the script, which says how many samples each backward is about
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
            if self._is_divided and self._begin != self._handed_out():
                raise self._miscounted(self._begin)
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
        self._stepping.is_backward_foreign = True
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
        if samples is not None and self._samples is None and self._begin + samples > self._handed_out():
            raise self._miscounted(self._begin + samples)
        self._stepping.backward(loss, self._samples if samples is None else samples, scaler, self._begin)
        if samples is not None and self._samples is None:
            self._begin, self._is_divided = self._begin + samples, True

    def micro_batches(self, batch: Any, count: int | None = None) -> Iterator[Any]:
        """Parts of the batch, one after the other; gradients are exchanged with the last one only."""
        slice_ = self._stepping.slice
        is_lockstep = self._stepping.is_lockstep
        planned = self._stepping.common_parts() if is_lockstep else 1 if slice_ is None else slice_.micro_batches
        whole = self._stepping.parts(batch)
        present = whole.samples
        if count is not None and count > 1:
            whole.expect_divisible()
        parts = sizes(present, planned if count is None else count, exactly=is_lockstep)
        model = self._stepping.model
        self._present, self._mean = present, 0.0
        begin = 0
        for number, size in enumerate(parts, start=1):
            is_apart = number < len(parts) and self._stepping.is_hooked
            self._samples, self._begin = size, begin
            first = min(begin, present - 1)  # of a part without samples, one sample without weight
            with model.no_sync() if is_apart else contextlib.nullcontext():
                yield whole.part(first, first + max(1, size))
            begin += size
        self._samples, self._begin = None, 0

    def _handed_out(self) -> int:
        handed, slice_ = self._stepping.handed, self._stepping.slice
        if handed is None or slice_ is None:
            raise UsageError(
                "samples= needs a batch of run.loader, which knows how many there are",
                hint="divide each loss by the number of backwards, as always in PyTorch",
            )
        if handed.is_reordered and slice_.weights is not None:
            raise UsageError(f"samples= cannot be used: {REORDERED}", hint="let collate_fn keep the order of samples")
        return handed.samples

    def _miscounted(self, used: int) -> UsageError:
        return UsageError(
            f"the loader handed out {self._handed_out()} samples, and backward was called for {used}",
            hint="samples= says of how many samples the loss is the mean; together they are the whole batch",
        )
