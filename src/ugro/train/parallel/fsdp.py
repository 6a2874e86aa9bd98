"""Fully sharded data parallel with PyTorch's FSDP2: each rank keeps a part of every parameter, gradient and moment.

The parameters of a block are gathered before it computes and freed after that. Samples are shared as with DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ugro.kernel.support.errors import UsageError
from ugro.train import group as frozen
from ugro.train.group import Group
from ugro.train.parallel.way import Way, blocks_of
from ugro.train.stepping import Stepping

if TYPE_CHECKING:
    from ugro.train.parallel.sharded import Exchanges

_OPTIONS = ("blocks", "precision", "reshard_after_forward")
_PRECISIONS = ("fp32", "bf16")


class Sharded(Way):
    is_lockstep = True
    is_sharded = True

    def __init__(self, model: Any, group: Group, units: Sequence[int] | None = None) -> None:
        super().__init__(model, group, units)
        self.is_lockstep = group.ranks > 1

    def release(self) -> None:
        from ugro.train.parallel import sharded as sharded_exchange

        sharded_exchange.release(self.model)

    def recover(self) -> None:
        if hasattr(self.model, "reset_iter_state"):  # it is sharded
            self.model.reset_iter_state()


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``blocks``: modules, or classes of modules, to gather one after the other; ``precision``: fp32 or bf16."""
    check_options("fsdp", options, _OPTIONS)
    group = stepping.group
    blocks = blocks_of(model, options.get("blocks"))
    precision = checked_precision(options.get("precision", "fp32"))
    check_is_real(model)
    if group.ranks == 1 and precision == "fp32":
        return Sharded(model.to(group.device), group)
    from torch.distributed.device_mesh import init_device_mesh

    group.begin_alone()
    agree(model, group)
    mesh = init_device_mesh(group.device.type, (group.ranks,), mesh_dim_names=("dp",))
    shard(model, blocks, mesh, precision, options.get("reshard_after_forward"))
    way = Sharded(model, group)
    way.exchanges = watched(model, stepping)
    way.reports_waits = way.exchanges is not None
    return way


def shard(model: Any, blocks: Iterable[Any], mesh: Any, precision: str, reshard_after_forward: Any) -> None:
    """From the inside out, as torch wants it. What is in no block belongs to the model itself."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision == "bf16":  # sums of gradients keep fp32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


# --- options ----------------------------------------------------------------------------------------------------


def check_options(parallel: str, options: dict[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(
            f"parallel={parallel!r} has no option {', '.join(map(repr, unknown))}", hint=f"it has {', '.join(known)}"
        )


def checked_precision(precision: Any) -> str:
    if precision not in _PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", hint=f"one of {', '.join(_PRECISIONS)}")
    return str(precision)


def check_is_real(model: Any) -> None:
    names = [name for name, one in model.named_parameters() if one.device.type == "meta"]
    if names:
        raise UsageError(
            f"{len(names)} parameters have no values yet (meta device), such as {names[0]}",
            hint="load the weights before run.wrap: each rank needs them in its main memory, not on its GPU",
        )


# --- the same weights on all ranks --------------------------------------------------------------------------------


def agree(model: Any, group: Group) -> None:
    """Ranks that begin with other weights get those of the first one, as with DDP. All ranks call it."""
    from torch import distributed

    names = [name for name, _ in model.named_parameters()]
    if len(set(group.texts(frozen.digest(model, names)))) == 1:
        return
    for one in [*model.parameters(), *model.buffers()]:
        distributed.broadcast(one.detach(), 0, group=group.small if one.device.type == "cpu" else None)


# --- waiting ------------------------------------------------------------------------------------------------------


def watched(model: Any, stepping: Stepping) -> Exchanges | None:
    """The exchanges of the model, which report how long this rank waits in them."""
    from ugro.train.parallel.sharded import watch

    exchanges = watch(model, stepping)
    if exchanges is None:
        warnings.warn(
            "this version of PyTorch does not say when a rank of a sharded model waits, so shares stay equal",
            UserWarning,
            stacklevel=4,
        )
    return exchanges
