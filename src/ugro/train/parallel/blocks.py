"""The blocks of a model, which are computed one after the other, and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ugro.core.errors import UsageError


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
