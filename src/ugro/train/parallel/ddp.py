"""Data parallel with PyTorch's DDP: a complete model on each rank, gradients exchanged in every step."""

from __future__ import annotations

import inspect
from typing import Any

from ugro.train import compress, frozen
from ugro.train.parallel.way import Way
from ugro.train.stepping import Stepping

_KEPT = ("_forward_hooks", "_forward_pre_hooks", "training")  # of a model that is wrapped again


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``comm_hook`` is one of torch's; other options go to DDP."""
    group = stepping.group
    model, options = model.to(group.device), dict(options)
    comm_hook = compress.hook(options.pop("compress", None), options.pop("comm_hook", None), stepping)
    return Way(_distributed(model, stepping, comm_hook, options) if group.is_distributed else model, group)


def _distributed(model: Any, stepping: Stepping, comm_hook: Any, options: dict[str, Any]) -> Any:
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
    reduce = comm_hook or allreduce_hook
    hook = (None, lambda state, bucket: stepping.bucket(bucket, reduce))
    model.register_comm_hook(*hook)
    stepping.rewrap = lambda: _wrap_again(model, options, hook)
    return model


def _wrap_again(model: Any, options: dict[str, Any], hook: tuple[Any, Any]) -> None:
    """For a group with other members, the same object: the script and its optimizer have it.

    All members have the same parameters by now, which DDP would send around once more.
    """
    kept = {name: value for name, value in vars(model).items() if name.startswith(_KEPT)}
    has_option = "init_sync" in inspect.signature(type(model)).parameters
    type(model).__init__(model, model.module, **{**options, **({"init_sync": False} if has_option else {})})
    vars(model).update(kept)
    model.register_comm_hook(*hook)


def _name_of_buffer_option(wrapper: Any) -> str:
    """PyTorch renamed this option, and warns about the old name."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(wrapper).parameters else "broadcast_buffers"
