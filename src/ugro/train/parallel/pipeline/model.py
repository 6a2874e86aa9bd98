"""The model as a script of a pipeline uses it: each rank trains its own stage of it.

Until the first step it is whole on every rank, in main memory: optimizers are made and checkpoints loaded as always.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ugro.core.errors import UsageError
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Tensors


class _CapturedError(Exception):
    """Ends a loss function as soon as the model's inputs are known."""


class Pipelined(nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any, tensors: Tensors, group: Group) -> None:
        super().__init__()
        self.module = model
        self._tensors = tensors
        self._group = group
        self._captured: tuple[Any, ...] | None = None
        self._is_capturing = False
        self._answer: Any = None
        self.is_cut = False
        self.counted: Callable[[str], bool] = lambda name: True  # of what several ranks have, one counts it
        self.passed: Callable[..., Any] | None = None  # a forward through all stages

    # --- what the script calls ----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._answer is not None:
            return self._answer
        if named and (self._is_capturing or self.is_cut):
            raise UsageError(
                f"the model of a pipeline takes its inputs by position: {', '.join(named)}",
                hint="before=lambda model, ids, mask: … says what becomes of them",
            )
        if self._is_capturing:
            self._captured = inputs
            raise _CapturedError
        if not self.is_cut:
            return self.module(*inputs, **named)
        if torch.is_grad_enabled():
            raise UsageError(
                "no rank has the whole model", hint="train with run.step(loss_fn, batch); evaluate in torch.no_grad()"
            )
        assert self.passed is not None
        return self.passed(*inputs)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Those of this rank's stage; before the first step, all."""
        return ((name, one) for name, one in super().named_parameters(*args, **options) if one.device.type != "meta")

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """This rank's stage, with the names that they have in the model; before the first step, all of it."""
        found = self.module.state_dict(*args, **options)
        return {name: one for name, one in found.items() if one.device.type != "meta"}

    def load_state_dict(self, content: Any, *args: Any, **options: Any) -> Any:
        if self.is_cut:
            raise UsageError("the model is spread over the ranks already", hint="load it before the first step")
        return self.module.load_state_dict(content, *args, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all ranks. All ranks call it."""
        own = [one for name, one in self._trained() if self.counted(name)]
        norm = torch.nn.utils.get_total_norm([one.grad for one in own if one.grad is not None], norm_type)
        norms = [found for (found,) in self._group.gather([float(norm)]).wait()]
        total = max(norms) if math.isinf(norm_type) else sum(one**norm_type for one in norms) ** (1 / norm_type)
        everything = [one for _, one in self._trained()]
        device = everything[0].device if everything else "cpu"
        found = torch.tensor(total, device=device, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(everything, max_norm, found)
        return found

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._tensors.items() if one.requires_grad and one.device.type != "meta"]

    # --- what a step does with it -------------------------------------------------------------------------------

    def captured(self, loss_fn: Callable[[Any], Any], batch: Any) -> tuple[Any, ...]:
        """What the loss function gives to the model."""
        self._is_capturing, self._captured = True, None
        try:
            with contextlib.suppress(_CapturedError):
                loss_fn(batch)
        finally:
            self._is_capturing = False
        captured = self._inputs()
        if captured is None:
            raise UsageError(
                "the loss function does not call the model", hint="run.step(lambda part: criterion(model(part[0]), …))"
            )
        return captured

    def _inputs(self) -> tuple[Any, ...] | None:
        return self._captured

    def answered(self, loss_fn: Callable[[Any], Any], batch: Any, output: Any) -> Any:
        """The loss, if this is the model's output."""
        self._answer = output
        try:
            return loss_fn(batch)
        finally:
            self._answer = None
