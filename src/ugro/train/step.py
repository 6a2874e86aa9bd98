"""A step as a ``with`` block: weights the loss, and repeats it in smaller parts when a device is out of memory."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train.failures import free, is_out_of_memory
from ugro.train.parallel.way import is_synchronised
from ugro.train.samples import REORDERED, Parts, sizes
from ugro.train.stepping import Stepping

# --- guard ------------------------------------------------------------------------------------------------------------
# A step that survives running out of memory: ``run.step(loss_fn, batch)``.
#
# Other ranks wait for this rank's gradients. A rank that ran out of memory therefore first sends zeros for what it has
# not sent yet, and reports the failure with them. All ranks then wrap the model again, since DDP on that rank stands in
# the middle of a step, and repeat the step separately, with one exchange at the end.


LossFunction = Callable[[Any], Any]

_ZERO = "call optimizer.zero_grad() after optimizer.step(); without it, gradients add up"


def guard_of(stepping: Stepping, batch: Any) -> Any:
    """``batch``: of the first step. A script is told at once if its batches cannot be divided when memory runs out."""

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


# --- lockstep ---------------------------------------------------------------------------------------------------------
# A step that survives running out of memory where ranks communicate inside forward and backward.
#
# Other ranks are in the middle of the same exchanges. A rank that ran out of memory therefore computes the rest of the
# step again with a single sample and no weight: exchanges that it has done are left out, those that the others wait for
# are done. All ranks then know of the failure, agree on smaller parts, the same number on each, and repeat the step.


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


# --- step -------------------------------------------------------------------------------------------------------------


_STEP_HINT = "a with block cannot be repeated; run.step(loss_fn, batch) retries with fewer samples at once"


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
            error.add_note(_STEP_HINT)
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
