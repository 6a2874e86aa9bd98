"""The exchanges of a sharded model, inside forward and backward: counted, timed, and left out where they were done.

On a CPU an exchange blocks, and its duration is what the rank did not compute. On a GPU exchanges run beside the
computation, which waits for them at a few places only: what the GPU's own stream spends there is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

from ugro.train.stepping import Stepping

# Where the computation waits for an exchange, in torch's own class of a group of parameters.
_STALLS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")
# Older versions have other names for them.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class Exchanges:
    """All ranks do the same exchanges in the same order."""

    def __init__(self, stepping: Stepping, *, block: bool) -> None:
        self.done = 0
        self.to_skip = 0  # a rank that computes again has done these; the others do not take part any more
        self._stepping = stepping
        self._block = block

    def run(self, exchange: Callable[[], Any], output: Tensor) -> Any:
        if self.to_skip:
            self.to_skip -= 1
            output.zero_()
            return None
        since = self._stepping.now() if self._block else None
        work = exchange()
        self.done += 1
        if self._block:
            self._stepping.waited(since)
        return work


class _Exchange:
    """As torch's own, but for what ``Exchanges`` adds."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._exchanges.run(
            lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op), output_tensor
        )


class _ReduceScatter(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self._exchanges.run(
            lambda: _reduce_scatter(output_tensor, input_tensor, op, group=group, async_op=async_op), output_tensor
        )


def watch(model: Any, stepping: Stepping) -> Exchanges | None:
    """None if this version of torch does not allow it."""
    modules = list(_sharded(model))
    if any(not hasattr(module, "set_custom_all_gather") for module in modules):
        return None
    is_cpu = stepping.group.device.type == "cpu"
    exchanges = Exchanges(stepping, block=is_cpu)
    for module in modules:
        module.set_custom_all_gather(_AllGather(exchanges))
        module.set_custom_reduce_scatter(_ReduceScatter(exchanges))
        if is_cpu:
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no means
    return exchanges if is_cpu or time_stalls(model, stepping) else None


def time_stalls(model: Any, stepping: Stepping) -> bool:
    """For exchanges that run beside the computation: on GPUs."""
    groups = [group for module in _sharded(model) for group in _parameter_groups(module)]
    if not groups or any(not callable(getattr(group, name, None)) for group in groups for name in _STALLS):
        return False
    for group in groups:
        for name in _STALLS:
            setattr(group, name, _timed(getattr(group, name), stepping))
    return True


def release(model: Any) -> None:
    """Lets go of the process groups, as far as they can be found."""
    for module in _sharded(model):
        for group in _parameter_groups(module):
            for info in (getattr(group, "mesh_info", None), getattr(group, "post_forward_mesh_info", None)):
                _forget(info)


def _forget(info: Any) -> None:
    for name in _PROCESS_GROUPS:
        if getattr(info, name, None) is not None:
            setattr(info, name, None)
    mesh = getattr(info, "mesh", None)
    for one in (mesh, getattr(mesh, "_root_mesh", None)):
        for known in (one, *getattr(one, "_flatten_mapping", {}).values()):
            getattr(known, "_pg_registry", {}).clear()


def _timed(method: Callable[..., Any], stepping: Stepping) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        since = stepping.now()
        found = method(*args, **options)
        stepping.waited(since)
        return found

    return timed


def _sharded(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _parameter_groups(module: Any) -> list[Any]:
    """torch has no public name for them."""
    return list(getattr(module._get_fsdp_state(), "_fsdp_param_groups", []))
