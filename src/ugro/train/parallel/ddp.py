"""Data parallel with PyTorch's DDP: a complete model on each rank, gradients exchanged in every step."""

from __future__ import annotations

import inspect
from typing import Any

from ugro.core.errors import UsageError
from ugro.train import compress, frozen
from ugro.train.parallel.way import Way
from ugro.train.stepping import Stepping

_KEPT = ("_forward_hooks", "_forward_pre_hooks", "training")  # of a model that is wrapped again


class Distributed(Way):
    """Torch's DDP, which knows the parameters that were trained when it was made."""

    wrap_again: Any = None

    def change(self, *, has_thawed: bool) -> None:
        if not self.trained():
            raise UsageError("nothing of the model is trained any more: all its layers are frozen")
        # Thawed layers may have begun again, with other values on each rank.
        self.wrap_again(agree=has_thawed)

    def expect_unchanged(self) -> None:
        if not self.is_current():
            raise UsageError(
                "layers were frozen or thawed in the middle of a step", hint="do it between two steps, on all ranks"
            )


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``comm_hook`` is one of torch's; other options go to DDP."""
    group = stepping.group
    model, options = model.to(group.device), dict(options)
    comm_hook = compress.hook(options.pop("compress", None), options.pop("comm_hook", None), stepping)
    return _distributed(model, stepping, comm_hook, options) if group.is_distributed else Way(model, group)


def _distributed(model: Any, stepping: Stepping, comm_hook: Any, options: dict[str, Any]) -> Way:
    """Wraps the model, which is on its device already, such that ``stepping`` sees when its gradients are ready."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    device = stepping.group.device
    devices = [device.index] if device.type == "cuda" else None
    # Sending buffers before every forward would make all ranks wait for the slowest once more.
    buffers = _name_of_buffer_option(DistributedDataParallel)
    frozen.leave_out(model, stepping.group)
    # Gradients in the exchange buffers need no copy: less memory, and less work for the slowest rank.
    defaults = {"device_ids": devices, buffers: False, "gradient_as_bucket_view": True}
    options = {**defaults, **options}
    model = DistributedDataParallel(model, **options)
    reduce, stepping.finite.is_lossy = comm_hook or allreduce_hook, comm_hook is not None
    hook = (None, lambda state, bucket: stepping.bucket(bucket, reduce))
    model.register_comm_hook(*hook)
    way = Distributed(model, stepping.group)

    def rewrap(*, is_static: bool = True, agree: bool = False) -> None:
        # A static graph needs a first step without micro-batches, which those that ran out of memory cannot have.
        stepping.exchanges_apart = bool(options.get("static_graph")) and not is_static
        more = {"static_graph": False, "find_unused_parameters": False} if stepping.exchanges_apart else {}
        _wrap_again(model, {**options, **more}, hook, agree=agree)

    stepping.rewrap = rewrap
    way.wrap_again = lambda *, agree: rewrap(is_static=not stepping.exchanges_apart, agree=agree)
    return way


def _wrap_again(model: Any, options: dict[str, Any], hook: tuple[Any, Any], *, agree: bool) -> None:
    """Keeps the same object, since the script has it: for a group with other members, other layers that are trained, or
    after a step that failed midway.

    Without ``agree`` all ranks have the same parameters, which DDP would send around once more.
    """
    model.reducer = model.logger = None  # its buffers go before there are new ones
    kept = {name: value for name, value in vars(model).items() if name.startswith(_KEPT)}
    has_option = "init_sync" in inspect.signature(type(model)).parameters
    quiet = {"init_sync": False} if has_option and not agree else {}
    frozen.ignore(model.module, frozen.names(model.module))
    type(model).__init__(model, model.module, **{**options, **quiet})
    vars(model).update(kept)
    model.register_comm_hook(*hook)


def _name_of_buffer_option(wrapper: Any) -> str:
    """PyTorch renamed this option, and warns about the old name."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(wrapper).parameters else "broadcast_buffers"
