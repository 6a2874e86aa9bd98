"""A step that survives running out of memory where ranks communicate inside forward and backward.

Other ranks are in the middle of the same exchanges. A rank that ran out of memory therefore computes the rest of the
step again with a single sample and no weight: exchanges that it has done are left out, those that the others wait for
are done. All ranks then know of the failure, agree on smaller parts, the same number on each, and repeat the step.
"""

from __future__ import annotations

import math
from typing import Any

from ugro.train.guard import LossFunction
from ugro.train.memory import free, is_out_of_memory
from ugro.train.pieces import Parts, sizes
from ugro.train.stepping import Stepping

_HINT = "with this way to spread a model such a step cannot be repeated; compute fewer samples at once"


class LockstepGuard:
    def __init__(self, stepping: Stepping) -> None:
        assert stepping.way is not None
        self._stepping = stepping
        self._way = stepping.way

    def step(self, loss_fn: LossFunction, batch: Any, scaler: Any = None) -> Any:
        """Returns the mean loss over this rank's share. Gradients are those of the whole batch in this step."""
        stepping, whole = self._stepping, self._stepping.parts(batch)
        samples, count = whole.samples, stepping.common_parts()
        stepping.begin(count)
        loss = self._tried(loss_fn, whole, sizes(samples, count, exactly=True), scaler)
        stepping.is_out_of_memory = loss is None
        if loss is None:
            stepping.cap = _fewer(samples, count)
        verdict = stepping.finish()
        stepping.is_out_of_memory = False
        while verdict.repeats and (wanted := self._agreed(samples, count, loss is None)) is not None:
            count = wanted
            loss = self._tried(loss_fn, whole, sizes(samples, count, exactly=True), scaler)
            self._remember(samples, count, loss is None)
        if verdict.repeats:
            self._stepping.judge_repeated()
        return loss

    def _agreed(self, samples: int, count: int, has_failed: bool) -> int | None:
        """The number of parts for the next try; None if no rank has failed in the last one."""
        own = math.ceil(samples / _fewer(samples, count)) if has_failed else 0
        most = max(int(one) for (one,) in self._stepping.group.gather([float(own)]).wait())
        return most or None

    def _remember(self, samples: int, count: int, has_failed: bool) -> None:
        self._stepping.disturb()
        if has_failed:
            self._stepping.cap = _fewer(samples, count)

    # --- computing ----------------------------------------------------------------------------------------------

    def _tried(self, loss_fn: LossFunction, batch: Parts, parts: list[int], scaler: Any) -> Any:
        """None if memory ran out. The exchanges of the step are complete in any case."""
        for parameter in self._stepping.model.parameters():  # also of those that were frozen
            parameter.grad = None
        exchanges = self._way.exchanges
        mean: Any = 0.0
        begin = 0
        for number, size in enumerate(parts):
            if exchanges is not None:
                exchanges.done = 0
            mean = self._part(loss_fn, batch, (begin, size), scaler, mean)
            if mean is None:
                self._complete(loss_fn, batch, len(parts) - number)
                return None
            begin += size
        return mean

    def _part(self, loss_fn: LossFunction, batch: Parts, part: tuple[int, int], scaler: Any, before: Any) -> Any:
        """The mean loss with that of the parts before it; None if memory ran out."""
        (begin, size), samples = part, batch.samples
        first = min(begin, samples - 1)  # of a part without samples, one sample without weight
        try:
            loss = loss_fn(batch.part(first, first + max(1, size)))
            mean = before + loss.detach() * self._stepping.part_of_own(size, begin, samples)
            self._stepping.forward_done(mean)
            self._stepping.backward(loss, size, scaler, begin)
            return mean
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._way.exchanges is None:
                error.add_note(_HINT)
                raise
        batch.expect_divisible()
        return None

    def _complete(self, loss_fn: LossFunction, batch: Parts, parts: int) -> None:
        """The rest of this try, for the sake of the other ranks."""
        exchanges = self._way.exchanges
        assert exchanges is not None
        self._way.recover()
        free()
        exchanges.to_skip = exchanges.done
        for _ in range(parts):
            (loss_fn(batch.part(0, 1)) * 0.0).backward()
        self._stepping.backward_done()


def _fewer(samples: int, count: int) -> int:
    """The most samples at once after a try with so many parts has failed."""
    largest = math.ceil(samples / count)
    if largest <= 1:
        import torch

        raise torch.OutOfMemoryError("not even one sample fits into the memory of this device")
    return max(1, largest * 3 // 4)
