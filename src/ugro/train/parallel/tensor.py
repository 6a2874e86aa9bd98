"""Tensor parallel inside a node, data parallel across: ranks of a node compute the same samples together.

Layers are split as a plan says, by PyTorch's own ``parallelize_module``. Across nodes FSDP shards what each rank has
and gathers it once in a step: as much is exchanged as with DDP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train.group import Group
from ugro.train.parallel.fsdp import Sharded, agree, check_is_real, check_options, checked_precision, shard, watched
from ugro.train.parallel.way import Way, blocks_of
from ugro.train.stepping import Stepping

_OPTIONS = ("plan", "size", "blocks", "precision", "reshard_after_forward")
_STYLES = ("colwise", "rowwise", "colwise_gather_output")
_SAME = {"colwise_rep": "colwise_gather_output"}  # transformers' older name


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``plan``: which layers are split how; ``size``: ranks that split them, all of a node if it is not given."""
    check_options("tp+dp", options, _OPTIONS)
    group = stepping.group
    blocks = blocks_of(model, options.get("blocks"))
    precision = checked_precision(options.get("precision", "fp32"))
    check_is_real(model)
    plan = plan_of(model, options.get("plan"))
    if group.ranks == 1:
        return Sharded(model.to(group.device), group)
    units = units_of(group.nodes, options.get("size"))
    check_widths(model, plan, group.ranks // (max(units) + 1))
    agree(model, group)
    mesh = _mesh(units, group)
    # The device gets its parts only: the model stays where it was built until it is split.
    _split(model, plan, mesh["tp"])
    _repeat_rest(model, mesh["tp"])
    shard(model, blocks, mesh["dp"], precision, options.get("reshard_after_forward", False))
    way = Sharded(model, group, units)
    # What ranks of one node exchange with each other belongs to their own time: they are one unit.
    way.reports_waits = watched(model, stepping) is not None
    return way


# --- which ranks ----------------------------------------------------------------------------------------------------


def units_of(nodes: Sequence[str], size: Any = None) -> tuple[int, ...]:
    """The unit of each rank: ranks of one node, ``size`` of them."""
    counts = {node: list(nodes).count(node) for node in nodes}
    size = _size(counts, size)
    seen: dict[str, int] = dict.fromkeys(counts, 0)
    first: dict[tuple[str, int], int] = {}
    units = []
    for node in nodes:
        key = (node, seen[node] // size)
        seen[node] += 1
        units.append(first.setdefault(key, len(first)))
    return tuple(units)


def _size(counts: Mapping[str, int], size: Any) -> int:
    found = ", ".join(f"{node} has {count}" for node, count in counts.items())
    common = gcd(*counts.values())
    possible = [str(one) for one in range(2, common + 1) if common % one == 0]
    hint = f"size={' or '.join(possible)} is possible" if possible else "parallel='fsdp' works with any number"
    if size is None:
        if max(counts.values()) == 1:
            raise UsageError("tensor parallel needs several ranks on a node", hint="parallel='fsdp' needs one on each")
        if len(set(counts.values())) > 1:
            raise UsageError(f"nodes have unequal numbers of ranks: {found}", hint=hint)
        return common
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or common % size:
        raise UsageError(f"{size!r} ranks cannot split a model on every node: {found}", hint=hint)
    return size


def _mesh(units: Sequence[int], group: Group) -> Any:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    rows = [[rank for rank, one in enumerate(units) if one == unit] for unit in range(max(units) + 1)]
    mesh = DeviceMesh(group.device.type, torch.tensor(rows), mesh_dim_names=("dp", "tp"))
    mesh._flatten("all")  # so that norms are added up in one exchange, not in two
    return mesh


# --- which layers ---------------------------------------------------------------------------------------------------


def plan_of(model: Any, given: Any) -> dict[str, Any]:
    """Names of modules, in which * stands for one part, and how each is split."""
    plan = given if given is not None else _own_plan(model)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            "tensor parallel needs a plan: which layers are split how",
            hint='for example plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}',
        )
    found = {str(name): _SAME.get(style, style) if isinstance(style, str) else style for name, style in plan.items()}
    if given is None:
        found = {name: style for name, style in found.items() if style in _STYLES and _is_whole(model, name)}
    for name, style in found.items():
        _check(model, name, style)
    return found


def _is_whole(model: Any, name: str) -> bool:
    """A plan that comes with a model is for all its variants."""
    return bool(matching(model, name)) and not _is_tied(model, name)


def _own_plan(model: Any) -> Any:
    """Models of transformers have one."""
    return getattr(model, "_tp_plan", None)


def _check(model: Any, name: str, style: Any) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(style, ParallelStyle) and style not in _STYLES:
        raise UsageError(f"{name} cannot be split in the way {style!r}", hint=f"one of {', '.join(_STYLES)}")
    if not matching(model, name):
        raise UsageError(f"the model has no {name}", hint="names are those of model.named_modules(); * is one part")
    if _is_tied(model, name):
        raise UsageError(f"{name} shares its weights with another layer", hint="leave it out of the plan")


def matching(model: Any, pattern: str) -> list[Any]:
    """torch ignores what it does not find."""
    parts = pattern.split(".")
    return [module for name, module in model.named_modules() if _matches(name.split("."), parts)]


def _matches(name: Sequence[str], parts: Sequence[str]) -> bool:
    return len(name) == len(parts) and all(fnmatchcase(one, part) for one, part in zip(name, parts, strict=True))


def _is_tied(model: Any, pattern: str) -> bool:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return any(owners[id(one)] > 1 for module in matching(model, pattern) for one in module.parameters(recurse=False))


def check_widths(model: Any, plan: Mapping[str, Any], size: int) -> None:
    for name, style in plan.items():
        for module in matching(model, name):
            width = getattr(module, "in_features" if style == "rowwise" else "out_features", None)
            if isinstance(style, str) and width is not None and width % size:
                raise UsageError(
                    f"{name} has a width of {width}, which {size} ranks cannot split equally",
                    hint="choose another size, or leave it out of the plan",
                )


def _split(model: Any, plan: Mapping[str, Any], mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    styles = {name: made[style]() if isinstance(style, str) else style for name, style in plan.items()}
    parallelize_module(model, mesh, styles)


def _repeat_rest(model: Any, mesh: Any) -> None:
    """All parameters belong to the same mesh, or torch could neither clip nor update them together.

    Those that are not split are the same on all ranks of a unit. Their layers compute with them as plain tensors.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    made: dict[int, Any] = {}  # a parameter of several layers stays one
    for module in model.modules():
        names = [name for name, one in module.named_parameters(recurse=False) if not isinstance(one, DTensor)]
        for name in names:
            one = getattr(module, name)
            if id(one) not in made:
                spread_out = distribute_tensor(one.detach(), mesh, [Replicate()])
                made[id(one)] = (nn.Parameter(spread_out, requires_grad=one.requires_grad), one)
            module.register_parameter(name, made[id(one)][0])
        if names:
            _Plain(names).watch(module)


class _Plain:
    """While a layer computes, these of its parameters are plain tensors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def watch(self, module: Any) -> None:
        module.register_forward_pre_hook(self._before)  # after FSDP has gathered them
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def _before(self, module: Any, inputs: Any) -> None:
        for name in self._names:
            # Found before the parameter of that name, which stays where it is.
            module.__dict__[name] = module._parameters[name].to_local()

    def _after(self, module: Any, inputs: Any, outputs: Any) -> None:
        for name in self._names:
            module.__dict__.pop(name, None)
