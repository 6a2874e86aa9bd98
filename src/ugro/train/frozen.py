"""Frozen parameters are not sent when a training starts: with LoRA they are nearly all, and every node has read them.

DDP sends all parameters of the first rank to the others, gigabytes over a LAN. Ranks compare a digest instead, and only
if theirs differ are the frozen ones sent too.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ugro.train.group import Group

_FROZEN = "frozen"  # DDP asks only if there is something
_WHOLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def leave_out(model: Any, group: Group) -> None:
    """Tells DDP which parameters not to send. All ranks call it."""
    is_same = len(set(group.texts(digest(model, frozen := names(model))))) == 1
    ignore(model, frozen if is_same else [])


def names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def ignore(model: Any, frozen: list[str]) -> None:
    """DDP ignores these instead of those that were frozen before; what the script itself has told it stays."""
    from torch.nn.parallel import DistributedDataParallel

    before = {name for name, one in model.named_parameters() if getattr(one, "_ddp_ignored", None) == _FROZEN}
    others = [name for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ()) if name not in before]
    parameters = dict(model.named_parameters())
    for name in before:
        del parameters[name]._ddp_ignored
    frozen = [name for name in frozen if name not in others]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*others, *frozen])
    for name in frozen:
        parameters[name]._ddp_ignored = _FROZEN


def digest(model: Any, names: list[str]) -> str:
    """Of names, kinds and contents; a sum over the bits is the same on every device, in any order of summation."""
    found = hashlib.sha256()
    parameters = dict(model.named_parameters())
    for name in names:
        one = parameters[name].detach()
        found.update(f"{name} {one.dtype} {tuple(one.shape)} {_bits(one)}\n".encode())
    return found.hexdigest()


def _bits(values: Any) -> int:
    import torch

    kind = getattr(torch, _WHOLE[values.element_size()])
    return int(values.contiguous().view(kind).sum(dtype=torch.int64))
