"""A pipeline with PyTorch's own stages and schedules: each rank has some neighbouring layers of one model.

For models that fit into no single device. Where they are cut follows what each layer costs on each device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import group as frozen
from ugro.train.batchnorm_layer import BatchNormOnGpu, SynchronisedBatchNorm
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Cut
from ugro.train.parallel.pipeline.moving import Pipelined
from ugro.train.parallel.pipeline.steps import Steps
from ugro.train.parallel.way import Way
from ugro.train.stepping import Stepping

_OPTIONS = ("layers", "before", "after", "call", "micro_batches", "stages_per_rank")
_NO_TRIAL = "a pipeline has no shares of samples that a trial could vary; it measures its layers when it starts"


class Pipeline(Way):
    """All ranks compute the same samples together."""

    profiles_ranks = True
    reports_waits = True

    def __init__(self, model: Pipelined, stepping: Stepping, steps: Steps) -> None:
        self._steps = steps
        super().__init__(model, stepping.group, (0,) * stepping.group.ranks)

    def guard(self, stepping: Stepping) -> Any:
        return self._steps

    def trained(self) -> list[Any]:
        """Their names, on whichever rank they are."""
        return [name for name, one in self._steps.tensors.items() if one.requires_grad]

    def change(self, *, has_thawed: bool) -> None:
        self._steps.forget_exchanges()

    def check_block(self) -> None:
        raise UsageError("a pipeline runs complete steps", hint="loss = run.step(loss_fn, batch)")

    def states(self, kept: Mapping[str, Any], group: Group) -> dict[str, Any]:
        pipe, mover = self._steps.pipe, self._steps.mover
        if pipe is None or mover is None:  # before the first step every rank has the whole model
            return super().states(kept, group)
        from ugro.train.rules.partition_planner import owners

        return mover.whole(owners(pipe.partition), kept, lambda one: one in (self.model, self.model.module))

    def close(self) -> None:
        self._steps.close()


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``layers``, ``before`` and ``after`` say how the model is cut, ``call`` how a layer is called."""
    _check(model, options)
    if stepping.trial is not None:
        stepping.trial.refuse(_NO_TRIAL)
    cut = Cut(model, options)
    wrapped = Pipelined(model, cut.tensors, stepping.group)
    if stepping.group.ranks == 1:
        model.to(stepping.group.device)
        return Way(wrapped, stepping.group)
    _agree(model, stepping.group)
    return Pipeline(wrapped, stepping, Steps(cut, wrapped, stepping, options))


def _check(model: Any, options: Mapping[str, Any]) -> None:
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise UsageError(f"parallel='pipeline' has no option {unknown[0]!r}", hint=f"it has {', '.join(_OPTIONS)}")
    for name in ("micro_batches", "stages_per_rank"):
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{name} is not a positive number: {value!r}")
    if any(isinstance(module, SynchronisedBatchNorm | BatchNormOnGpu) for module in model.modules()):
        raise UsageError("a pipeline has no synchronised BatchNorm: its ranks have other layers, not other samples")
    if names := [name for name, one in model.named_parameters() if one.device.type == "meta"]:
        raise UsageError(
            f"{len(names)} parameters have no values yet (meta device), such as {names[0]}",
            hint="load the weights before run.wrap: each rank needs them in its main memory, not on its GPU",
        )


def _agree(model: Any, group: Group) -> None:
    """Ranks that begin with other weights get those of the first one, as with DDP. All ranks call it."""
    from torch import distributed

    names = [name for name, _ in model.named_parameters()]
    if len(set(group.texts(frozen.digest(model, names)))) > 1:
        for one in [*model.parameters(), *model.buffers()]:
            value = one.detach().cpu().contiguous()
            distributed.broadcast(value, 0, group=group.small)
            one.detach().copy_(value)
