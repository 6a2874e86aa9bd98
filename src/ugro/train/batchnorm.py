"""BatchNorm over the samples of all ranks, each sample weighted equally, on CPUs and GPUs.

On GPUs it is torch's SyncBatchNorm, which counts the samples of each rank, and here leaves out those of a rank without
samples of its own. torch has none for CPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
