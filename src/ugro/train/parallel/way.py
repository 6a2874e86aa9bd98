"""A model as it is spread over the ranks: what a step, a checkpoint and the balancer need to know about it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint
from ugro.train.group import Group

if TYPE_CHECKING:
    from ugro.train.parallel.sharded import Exchanges
    from ugro.train.stepping import Stepping


# --- batchnorm --------------------------------------------------------------------------------------------------------
# BatchNorm over the samples of all ranks, each sample weighted equally, on CPUs and GPUs.
#
# On GPUs it is torch's SyncBatchNorm, which counts the samples of each rank, and here leaves out those of a rank
# without samples of its own. torch has none for CPUs.


@dataclass(slots=True)
class Company:
    """What a synchronised layer needs to know about the step, and what it reports."""

    now: Callable[[], Any]
    waited: Callable[[Any], None]  # for other ranks, since a moment
    is_dummy: bool = False  # this rank's samples have weight zero


def has_batch_norm(model: Any) -> bool:
    """Whether it has layers that look at the other samples of a batch; frozen ones do not."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) and not _is_frozen(module) for module in model.modules())


def _is_frozen(norm: Any) -> bool:
    """Its statistics are fixed, and so are its scales: a script that only forgot ``train()`` has not frozen it."""
    scales = list(norm.parameters())
    return not norm.training and bool(scales) and not any(one.requires_grad for one in scales)


def is_synchronised(model: Any) -> bool:
    """Whether ranks exchange something in its forward pass."""
    from torch.nn import SyncBatchNorm

    from ugro.train.batchnorm_layer import SynchronisedBatchNorm

    return any(isinstance(module, SynchronisedBatchNorm | SyncBatchNorm) for module in model.modules())


def warn_of_local(ranks: int) -> None:
    warnings.warn(
        f"each of the {ranks} ranks normalises its own samples only (BatchNorm), so the update differs from that of "
        "one process on the whole batch; run.wrap(model, sync_batchnorm=True) makes it the same",
        UserWarning,
        stacklevel=3,
    )


def synchronised(model: Any, company: Company, *, is_on_gpu: bool) -> Any:
    """The same model with its BatchNorm layers replaced; weights and statistics are the same tensors."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    if isinstance(model, _BatchNorm):
        return _replaced(model, company, is_on_gpu)
    for name, child in list(model.named_children()):
        new = synchronised(child, company, is_on_gpu=is_on_gpu)
        if new is not child:
            setattr(model, name, new)
    assert isinstance(model, nn.Module)
    return model


def _replaced(old: Any, company: Company, is_on_gpu: bool) -> Any:
    from ugro.train.batchnorm_layer import BatchNormOnGpu, SynchronisedBatchNorm

    new = (BatchNormOnGpu if is_on_gpu else SynchronisedBatchNorm)(
        old.num_features, eps=old.eps, momentum=old.momentum, affine=old.affine,
        track_running_stats=old.track_running_stats,
    )  # fmt: skip
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(old, name))
    new.training = old.training
    new.company = company
    return new


# --- blocks -----------------------------------------------------------------------------------------------------------
# The blocks of a model, which are computed one after the other, and how large it is.


def described(model: Any, parallel: str, comm_hook: Any) -> dict[str, Any]:
    """A record: what every step exchanges, and what has to be in memory."""
    blocks = [size_bytes(block.parameters()) for block in blocks_of(model, None)]
    parameters = size_bytes(model.parameters())
    return {
        "kind": "model",
        "parallel": parallel,
        "parameters": sum(one.numel() for one in model.parameters()),
        "parameter_bytes": parameters,
        "gradient_bytes": gradient_bytes(model),
        "block_bytes": max(blocks, default=0),  # of the largest
        "rest_bytes": parameters - sum(blocks),  # what is in no block
        "comm_hook": comm_hook if comm_hook is None or isinstance(comm_hook, str) else _name(comm_hook),
    }


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def gradient_bytes(model: Any) -> int:
    return size_bytes(one for one in model.parameters() if one.requires_grad)


def size_bytes(tensors: Iterable[Any]) -> int:
    """Of all ranks, where tensors are spread over them."""
    return sum(one.numel() * one.element_size() for one in tensors)


def optimizer_bytes(objects: Mapping[str, Any]) -> int:
    """What the optimizers among them remember."""
    import torch

    found = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
    return size_bytes(
        value
        for optimizer in found
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def blocks_of(model: Any, wanted: Any) -> list[Any]:
    """The modules that are gathered one after the other; what they contain is part of them."""
    if wanted is None:
        return _repeated(model)
    from torch import nn

    given = [wanted] if isinstance(wanted, type) else list(wanted)
    kinds = tuple(one for one in given if isinstance(one, type))
    found = [one for one in model.modules() if one is not model and kinds and isinstance(one, kinds)]
    named = [one for one in given if not isinstance(one, type)]
    inside = {id(one) for one in model.modules()}
    if any(not isinstance(one, nn.Module) or id(one) not in inside for one in named) or not (found or named):
        raise UsageError("blocks are not part of the model", hint="give model.layers, or the class of its layers")
    return _outermost([*found, *(one for one in named if one not in found)])


def _repeated(model: Any) -> list[Any]:
    """The modules of one class in a ModuleList or Sequential: those that hold the most parameters together."""
    from torch import nn

    best: list[Any] = []
    for holder in model.modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            continue
        by_class: dict[type, list[Any]] = {}
        for child in holder.children():
            by_class.setdefault(type(child), []).append(child)
        best = max([best, *(alike for alike in by_class.values() if len(alike) > 1)], key=_size)
    return best


def _size(modules: Sequence[Any]) -> int:
    return sum(one.numel() for module in modules for one in module.parameters())


def _outermost(modules: Sequence[Any]) -> list[Any]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


# --- way --------------------------------------------------------------------------------------------------------------


class Way:
    """Here every rank has a complete model. Other ways override what is different with them."""

    # Ranks communicate inside forward and backward, so all compute the same number of micro-batches.
    is_lockstep = False
    # Waiting for others inside forward and backward is reported, so that what is left is a rank's own time.
    reports_waits = False
    # No rank has the complete model: each writes its part of a checkpoint.
    is_sharded = False
    # Profiles are of ranks, also where several ranks of a unit share the work on its samples.
    profiles_ranks = False
    # Inside forward and backward, where they can be counted.
    exchanges: Exchanges | None = None

    def __init__(self, model: Any, group: Group, units: Sequence[int] | None = None) -> None:
        self.model = model  # as the script uses it
        # Of each rank; ranks of one unit compute the same samples together.
        self.units = tuple(range(group.ranks)) if units is None else tuple(units)
        self._trained = self.trained()

    @property
    def unit_count(self) -> int:
        return max(self.units) + 1

    @property
    def adds_shares(self) -> bool:
        """Gradients of several shares are added up in each step."""
        return self.unit_count > 1

    def names(self, nodes: Sequence[str]) -> list[str]:
        """Of the units: the nodes of their ranks, which are made distinct."""
        members: list[dict[str, None]] = [{} for _ in range(self.unit_count)]
        for unit, node in zip(self.units, nodes, strict=True):
            members[unit][node] = None
        return distinct(["+".join(names) for names in members])

    # --- layers that are frozen and thawed ----------------------------------------------------------------------

    def trained(self) -> list[Any]:
        """The parameters that get gradients."""
        return [one for one in self.model.parameters() if one.requires_grad]

    def follow(self) -> None:
        """Before a step, on all ranks: what was frozen or thawed since the last one is so on all of them."""
        if not self.is_current():
            known = {id(one) for one in self._trained}
            self.change(has_thawed=any(id(one) not in known for one in self.trained()))
            self.settle()

    def settle(self) -> None:
        """What is trained now is known to all ranks."""
        self._trained = self.trained()

    def is_current(self) -> bool:
        now = self.trained()
        return len(now) == len(self._trained) and all(map(operator.is_, now, self._trained))

    def change(self, *, has_thawed: bool) -> None:
        """Other parameters are trained from now on. What another library has put in DDP, it must put there again."""
        if has_thawed and hasattr(self.model, "reducer"):
            raise UsageError(
                "layers were thawed after the model was put in DDP, which would not exchange their gradients",
                hint="thaw them before, and freeze them with a learning rate of 0 until then; or train on one device",
            )

    def expect_unchanged(self) -> None:
        """At the end of a step: raises if its gradients are wrong."""
        self.follow()

    # --- steps and checkpoints ----------------------------------------------------------------------------------

    def guard(self, stepping: Stepping) -> Any:
        """What runs complete steps, if that is its own."""
        return None

    def check_block(self) -> None:
        """Raises if a step cannot be a ``with`` block."""

    def states(self, kept: Mapping[str, Any], group: Group) -> dict[str, Any]:
        """What a checkpoint holds of these objects. All ranks call it; the first one gets it."""
        return checkpoint.states(kept) if group.rank == 0 else {}

    def close(self) -> None:
        """Releases what must not outlive the process group."""

    def recover(self) -> None:
        """Forgets a step that failed in its middle."""

    def release(self) -> None:
        """Lets go of the process group."""
        if hasattr(self.model, "reducer"):  # it is in DDP
            self.model.reducer = self.model.logger = self.model.process_group = None


def distinct(names: Sequence[str]) -> list[str]:
    return [name if list(names).count(name) == 1 else f"{name}:{place}" for place, name in enumerate(names)]


def of_units(speeds: Sequence[float], units: Sequence[int]) -> tuple[float, ...]:
    """The speeds of ranks, added up in their units."""
    if len(speeds) != len(units):  # none, or a number of them that is refused later
        return tuple(speeds)
    found = [0.0] * (max(units) + 1)
    for speed, unit in zip(speeds, units, strict=True):
        found[unit] += speed
    return tuple(found)
