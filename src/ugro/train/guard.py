"""A step that survives running out of memory: ``run.step(loss_fn, batch)``.

Other ranks wait for this rank's gradients, and DDP tracks which of them it has sent. A rank that ran out of memory
therefore first completes the exchange with meaningless gradients and reports the failure with it. All ranks then repeat
the step separately, with one exchange at the end. An incomplete exchange would make DDP send part of a gradient later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ugro.train.memory import free, is_out_of_memory
from ugro.train.pieces import pieces, sizes
from ugro.train.stepping import Stepping

if TYPE_CHECKING:
    pass

LossFunction = Callable[[Any], Any]


def guard_of(stepping: Stepping) -> Any:
    from ugro.train.parallel.lockstep import LockstepGuard

    if stepping.way is not None and (own := stepping.way.guard(stepping)) is not None:
        return own
    return LockstepGuard(stepping) if stepping.is_lockstep else Guard(stepping)


class Guard:
    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        model = stepping.model
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._sent: set[int] = set()  # parameters whose gradients DDP has in this step
        self._is_armed = False  # DDP waits for the others
        if stepping.is_hooked:
            model.register_forward_hook(self._went_forward)
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def step(self, loss_fn: LossFunction, batch: Any, scaler: Any = None) -> Any:
        """Returns the mean loss over this rank's share. Gradients are those of the whole batch in this step."""
        stepping = self._stepping
        samples = pieces(batch, None)
        parts = sizes(samples, self._micro_batches(samples))
        stepping.begin(len(parts))
        loss = self._tried(loss_fn, batch, parts, scaler, is_alone=False)
        if loss is None:
            stepping.is_out_of_memory = True
            self._complete_exchange(loss_fn, batch, samples)
        verdict = stepping.finish()
        if verdict.repeats:
            loss = self._repeat(loss_fn, batch, parts, scaler, has_failed=loss is None)
        return loss

    def _micro_batches(self, samples: int) -> int:
        slice_, cap = self._stepping.slice, self._stepping.cap
        planned = 1 if slice_ is None else slice_.micro_batches
        return max(planned, 1 if cap is None else math.ceil(samples / cap))

    # --- computing ----------------------------------------------------------------------------------------------

    def _tried(self, loss_fn: LossFunction, batch: Any, parts: list[int], scaler: Any, is_alone: bool) -> Any:
        """None if memory ran out."""
        self._forget_gradients()
        try:
            return self._computed(loss_fn, batch, parts, scaler, is_alone)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self._stepping.way is not None:
            self._stepping.way.recover()
        return None

    def _computed(self, loss_fn: LossFunction, batch: Any, parts: list[int], scaler: Any, is_alone: bool) -> Any:
        stepping, samples = self._stepping, sum(parts)
        mean: Any = 0.0
        begin = 0
        for number, size in enumerate(parts, start=1):
            with self._apart() if is_alone or number < len(parts) else contextlib.nullcontext():
                loss = loss_fn(pieces(batch, (begin, begin + size, samples)))
                mean = mean + loss.detach() * stepping.part_of_own(size, begin, samples)
                stepping.forward_done(mean)
                stepping.backward(loss, size, scaler, begin)
            begin += size
        return mean

    def _repeat(self, loss_fn: LossFunction, batch: Any, parts: list[int], scaler: Any, has_failed: bool) -> Any:
        stepping, samples = self._stepping, sum(parts)
        stepping.is_out_of_memory = False
        loss = None
        while loss is None:
            if has_failed:
                parts = _smaller(parts, samples)
                free()
            loss = self._tried(loss_fn, batch, parts, scaler, is_alone=True)
            has_failed = has_failed or loss is None
        if has_failed:
            stepping.cap = max(parts)
        stepping.average(self._parameters)
        stepping.disturb()
        return loss

    def _forget_gradients(self) -> None:
        self._sent.clear()
        self._is_armed = False
        for parameter in self._parameters:
            parameter.grad = None

    # --- DDP's exchange -----------------------------------------------------------------------------------------

    def _apart(self) -> Any:
        return self._stepping.model.no_sync() if self._stepping.is_hooked else contextlib.nullcontext()

    def _complete_exchange(self, loss_fn: LossFunction, batch: Any, samples: int) -> None:
        free()
        if not self._stepping.is_hooked:
            return
        if self._is_armed:
            # Not through the model: DDP refuses a forward pass while it waits for gradients.
            missing = [parameter for parameter in self._parameters if id(parameter) not in self._sent]
            for parameter in missing:
                (parameter * 0.0).sum().backward()
        else:
            (loss_fn(pieces(batch, (0, 1, samples))) * 0.0).backward()

    def _went_forward(self, model: Any, inputs: Any, outputs: Any) -> None:
        if model.require_backward_grad_sync:
            self._is_armed = True
            self._sent.clear()

    def _has_gradient(self, parameter: Any) -> None:
        self._sent.add(id(parameter))
        if len(self._sent) == len(self._parameters):
            self._is_armed = False


def _smaller(parts: list[int], samples: int) -> list[int]:
    largest = max(parts)
    if largest <= 1:
        import torch

        raise torch.OutOfMemoryError("not even one sample fits into the memory of this device")
    return sizes(samples, math.ceil(samples / max(1, largest * 3 // 4)))
