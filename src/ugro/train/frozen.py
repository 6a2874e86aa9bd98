"""Frozen parameters are not sent when a training starts: with LoRA they are nearly all, and every node has read them.

DDP sends all parameters of the first rank to the others, gigabytes over a LAN. Ranks compare a digest instead, and only
if theirs differ are the frozen ones sent too.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ugro.train.group import Group

_WHOLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def leave_out(model: Any, group: Group) -> None:
    """Tells DDP which parameters not to send. All ranks call it."""
    from torch.nn.parallel import DistributedDataParallel

    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if len(set(group.texts(digest(model, names)))) == 1 and names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


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
