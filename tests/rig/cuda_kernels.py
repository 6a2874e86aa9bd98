"""Stands in for a GPU: the kernels of torch's SyncBatchNorm, which exist for GPUs only, and the name of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LIBRARY = torch.library.Library("aten", "IMPL")


class PretendedGpu(TorchFunctionMode):  # type: ignore[misc]
    """Tensors say that they are on a GPU; those that are made there are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda")
        if "device" in options:
            options["device"] = "cpu"
        return function(*args, **options)


def _dims(values: Any) -> list[int]:
    return [0, *range(2, values.dim())]


def _wide(one: Any, values: Any) -> Any:
    """A number for each channel, as wide as the values."""
    return one.view(1, -1, *(1 for _ in values.shape[2:]))


def _stats(values: Any, eps: float) -> tuple[Any, Any]:
    return values.mean(_dims(values)), torch.rsqrt(values.var(_dims(values), correction=0) + eps)


def _gather(values: Any, means: Any, inverses: Any, running_mean: Any, running_var: Any, *more: Any) -> tuple[Any, Any]:
    momentum, eps, counts = more
    weights = counts.view(-1, 1) / counts.sum()
    mean = (means * weights).sum(0)
    variance = ((inverses**-2 - eps + (means - mean) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, torch.rsqrt(variance + eps)


def _elemt(values: Any, weight: Any, bias: Any, mean: Any, inverse: Any, *eps: float) -> Any:
    return (values - _wide(mean, values)) * _wide(inverse * weight, values) + _wide(bias, values)


def _backward_reduce(gradient: Any, values: Any, mean: Any, inverse: Any, *more: Any) -> tuple[Any, ...]:
    total = gradient.sum(_dims(values))
    moved = (gradient * (values - _wide(mean, values))).sum(_dims(values))
    return total, moved, moved * inverse, total.clone()


def _backward_elemt(gradient: Any, values: Any, mean: Any, inverse: Any, *more: Any) -> Any:
    weight, total, moved, counts = more
    samples = counts.sum()
    centred = (values - _wide(mean, values)) * _wide(inverse**2 * moved / samples, values)
    return (gradient - _wide(total / samples, values) - centred) * _wide(inverse * weight, values)


for _name, _kernel in (
    ("stats", _stats), ("gather_stats_with_counts", _gather), ("elemt", _elemt),
    ("backward_reduce", _backward_reduce), ("backward_elemt", _backward_elemt),
):  # fmt: skip
    _LIBRARY.impl(f"batch_norm_{_name}", _kernel, "CPU")
