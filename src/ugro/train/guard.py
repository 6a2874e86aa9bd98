"""A step that survives running out of memory: ``run.step(loss_fn, batch)``.

Other ranks wait for this rank's gradients. A rank that ran out of memory therefore first sends zeros for what it has
not sent yet, and reports the failure with them. All ranks then wrap the model again, since DDP on that rank stands in
the middle of a step, and repeat the step separately, with one exchange at the end.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.batchnorm import is_synchronised
from ugro.train.memory import free, is_out_of_memory
from ugro.train.pieces import Parts, sizes
from ugro.train.stepping import Stepping

LossFunction = Callable[[Any], Any]

_ZERO = "call optimizer.zero_grad() after optimizer.step(); without it, gradients add up"


def guard_of(stepping: Stepping, batch: Any) -> Any:
    """``batch``: of the first step. A script is told at once if its batches cannot be divided when memory runs out."""
    from ugro.train.parallel.lockstep import LockstepGuard

    if stepping.model is None:
        raise UsageError("there is no model yet", hint="model = run.wrap(model)")
    try:
        if stepping.handed is not None:
            stepping.parts(batch).expect_divisible()
    except UsageError as error:
        warnings.warn(f"if memory runs out, this training ends: {error} ({error.hint})", UserWarning, stacklevel=3)
    if stepping.way is not None and (own := stepping.way.guard(stepping)) is not None:
        return own
    return LockstepGuard(stepping) if stepping.is_lockstep else Guard(stepping)


class Gradients:
    """Of earlier steps: they stay until the script zeroes them, as always in PyTorch, also if a step is repeated."""

    def __init__(self) -> None:
        self._version: int | None = 0  # of the parameters, when their gradients were computed; None: looked at once

    @contextlib.contextmanager
    def added(self, stepping: Stepping) -> Iterator[None]:
        """What is computed meanwhile is added to what was there."""
        model = stepping.model
        before = [(one, one.grad) for one in model.parameters() if one.grad is not None]
        self._look(before)
        # DDP's gradients are parts of the buffers that it computes the next ones in.
        before = [(one, gradient.clone() if stepping.is_hooked else gradient) for one, gradient in before]
        for parameter, _ in before:
            parameter.grad = None
        yield
        known = {id(one) for one in model.parameters()} if before else set()
        if any(id(one) not in known for one, _ in before):
            raise UsageError("layers have moved to other ranks, and gradients of earlier steps were left", hint=_ZERO)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self._version is not None:
            self._version = sum(one._version for one in model.parameters() if one.grad is not None)

    def _look(self, before: list[tuple[Any, Any]]) -> None:
        """Says it once if a script lets gradients add up that its optimizer has used already."""
        if self._version is None or self._version == sum(one._version for one, _ in before):
            return
        if before:
            self._version = None
            if any(bool(gradient.any()) for _, gradient in before):
                warnings.warn(
                    f"the gradients of an earlier step, with which the model was changed, are still there: {_ZERO}",
                    UserWarning,
                    stacklevel=5,
                )


class Guard:
    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        model = stepping.model
        self._parameters: list[Any] = []  # that are trained in this step
        self._has_begun = False  # DDP, with a forward pass whose gradients it exchanges
        self._waits_inside = stepping.group.ranks > 1 and is_synchronised(model)
        if stepping.is_hooked:
            model.register_forward_pre_hook(self._goes_forward)

    def step(self, loss_fn: LossFunction, batch: Any, scaler: Any = None) -> Any:
        """Returns the mean loss over this rank's share. Gradients are those of the whole batch in this step."""
        stepping, whole = self._stepping, self._stepping.parts(batch)
        parts = sizes(whole.samples, self._micro_batches(whole.samples))
        stepping.begin(len(parts))
        self._parameters = [one for one in stepping.model.parameters() if one.requires_grad]
        loss = self._tried(loss_fn, whole, parts, scaler, is_alone=stepping.exchanges_apart)
        if loss is None:
            whole.expect_divisible()
            stepping.is_out_of_memory = True
            self._complete_exchange(loss_fn, whole)
        verdict = stepping.finish()
        if verdict.repeats:
            loss = self._repeat(loss_fn, whole, parts, scaler, has_failed=loss is None)
        elif stepping.exchanges_apart:
            stepping.average(self._parameters, is_repeated=False)
        return loss

    def _micro_batches(self, samples: int) -> int:
        slice_, cap = self._stepping.slice, self._stepping.cap
        planned = 1 if slice_ is None else slice_.micro_batches
        return max(planned, 1 if cap is None else math.ceil(samples / cap))

    # --- computing ----------------------------------------------------------------------------------------------

    def _tried(self, loss_fn: LossFunction, batch: Parts, parts: list[int], scaler: Any, is_alone: bool) -> Any:
        """None if memory ran out."""
        self._forget_gradients()
        try:
            return self._computed(loss_fn, batch, parts, scaler, is_alone)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._waits_inside:  # the others are in the middle of its exchanges
                error.add_note("a step of a model with synchronised BatchNorm cannot be repeated")
                raise
            if self._stepping.has_reported:  # the others go on, with gradients that this rank does not have
                error.add_note("the gradients of the model were sent before, so the step cannot be repeated")
                raise
        if self._stepping.way is not None:
            self._stepping.way.recover()
        return None

    def _computed(self, loss_fn: LossFunction, batch: Parts, parts: list[int], scaler: Any, is_alone: bool) -> Any:
        stepping, samples = self._stepping, batch.samples
        mean: Any = 0.0
        begin = 0
        for number, size in enumerate(parts, start=1):
            with self._apart() if is_alone or number < len(parts) else contextlib.nullcontext():
                loss = loss_fn(batch.part(begin, begin + size))
                mean = mean + loss.detach() * stepping.part_of_own(size, begin, samples)
                stepping.forward_done(mean)
                stepping.backward(loss, size, scaler, begin)
            begin += size
        return mean

    def _repeat(self, loss_fn: LossFunction, batch: Parts, parts: list[int], scaler: Any, has_failed: bool) -> Any:
        stepping, samples = self._stepping, batch.samples
        stepping.is_out_of_memory = False
        self._forget_gradients()
        self._begin_anew()
        loss = None
        while loss is None:
            if has_failed:
                parts = _smaller(parts, samples)
                free()
            loss = self._tried(loss_fn, batch, parts, scaler, is_alone=True)
            has_failed = has_failed or loss is None
        if has_failed:
            stepping.cap = max(parts)
        if getattr(stepping.model, "find_unused_parameters", False):
            self._begin_anew()  # DDP takes what was used here for used in the next step
        stepping.average(self._parameters)
        stepping.disturb()
        return loss

    def _forget_gradients(self) -> None:
        """Of a try that failed; those of earlier steps are with ``Gradients``."""
        self._has_begun = False
        for parameter in self._stepping.model.parameters():  # also of those that were frozen
            parameter.grad = None

    # --- DDP's exchange -----------------------------------------------------------------------------------------

    def _apart(self) -> Any:
        is_in_ddp = self._stepping.is_hooked or self._stepping.exchanges_apart
        return self._stepping.model.no_sync() if is_in_ddp else contextlib.nullcontext()

    def _begin_anew(self) -> None:
        """All ranks call it: DDP arranges its buckets again, in an exchange of its own."""
        if self._stepping.is_hooked and self._stepping.rewrap is not None:
            self._stepping.rewrap(is_static=False)

    def _complete_exchange(self, loss_fn: LossFunction, batch: Parts) -> None:
        free()
        if not self._stepping.is_hooked:
            return
        if self._has_begun:
            self._stepping.send_zeros()
        else:
            # What DDP exchanges in a forward pass belongs to the step, too.
            (loss_fn(batch.part(0, 1)) * 0.0).backward()

    def _goes_forward(self, model: Any, inputs: Any) -> None:
        self._has_begun = self._has_begun or bool(model.require_backward_grad_sync)


def _smaller(parts: list[int], samples: int) -> list[int]:
    largest = max(parts)
    if largest <= 1:
        import torch

        raise torch.OutOfMemoryError("not even one sample fits into the memory of this device")
    return sizes(samples, math.ceil(samples / max(1, largest * 3 // 4)))
