"""The synchronised layers themselves, in a module of their own because they import torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn.modules.batchnorm import _BatchNorm

from ugro.train.parallel.way import Company


class _Sum(torch.autograd.Function):  # type: ignore[misc]  # torch's types are skipped
    """A sum over all ranks, forward and backward: the statistics of each rank depend on all samples."""

    @staticmethod
    def forward(context: Any, values: Any, company: Company) -> Any:
        context.company = company
        return _summed(values, company)

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        return _summed(gradients, context.company), None


def _summed(values: Any, company: Company) -> Any:
    begun = company.now()
    whole = values.clone()
    distributed.all_reduce(whole)
    company.waited(begun)
    return whole


class _Before(torch.autograd.Function):  # type: ignore[misc]  # torch's types are skipped
    """Stands before a layer that waits for other ranks: on the way back, its waiting ends here."""

    @staticmethod
    def forward(context: Any, values: Any, company: Company, begun: list[Any]) -> Any:
        context.company, context.begun = company, begun
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        context.company.waited(context.begun.pop())
        return gradients, None, None


class _After(torch.autograd.Function):  # type: ignore[misc]  # torch's types are skipped
    """Stands after such a layer: on the way back, its waiting begins here."""

    @staticmethod
    def forward(context: Any, values: Any, company: Company, begun: list[Any]) -> Any:
        context.company, context.begun = company, begun
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        context.begun.append(context.company.now())
        return gradients, None, None


class BatchNormOnGpu(torch.nn.SyncBatchNorm):  # type: ignore[misc]  # torch's types are skipped
    """torch's own layer. Its time counts as waiting: what it computes itself cannot be told from its exchange."""

    company: Company

    def forward(self, inputs: Any) -> Any:
        if not self.training or not distributed.is_initialized():
            return super().forward(inputs)
        begun: list[Any] = []
        since = self.company.now()
        found = self._of_dummy(inputs, begun) if self.company.is_dummy else self._of_all(inputs, begun)
        self.company.waited(since)
        return found

    def _of_all(self, inputs: Any, begun: list[Any]) -> Any:
        if inputs.requires_grad:  # else there is no exchange on the way back
            inputs = _Before.apply(inputs, self.company, begun)
            return _After.apply(super().forward(inputs), self.company, begun)
        return super().forward(inputs)

    def _of_dummy(self, inputs: Any, begun: list[Any]) -> Any:
        """Takes part in both exchanges with no samples, which torch counts as none.

        Its own samples, of weight zero, are normalised by themselves: they must stay finite, and need a gradient.
        """
        # Statistics are in single precision; torch would exchange those of no samples in the precision of the inputs.
        nothing = self._of_all(inputs[:0].to(torch.promote_types(inputs.dtype, torch.float32)), begun)
        dims = [0, *range(2, inputs.dim())]
        normal = inputs - inputs.mean(dims, keepdim=True)
        normal = normal * torch.rsqrt(normal.square().mean(dims, keepdim=True) + self.eps)
        if self.weight is not None:
            shape = (1, -1, *(1 for _ in inputs.shape[2:]))
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return (normal + nothing.sum()).to(inputs.dtype)


class SynchronisedBatchNorm(_BatchNorm):  # type: ignore[misc]  # torch's types are skipped
    company: Company

    def _check_input_dim(self, inputs: Any) -> None:
        if inputs.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {inputs.dim()}")

    def forward(self, inputs: Any) -> Any:
        self._check_input_dim(inputs)
        if not self.training or not distributed.is_initialized():
            return super().forward(inputs)
        mean, variance, count = self._statistics(inputs)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1, *(1 for _ in inputs.shape[2:]))
        scale = torch.rsqrt(variance + self.eps).to(inputs.dtype).view(shape)
        normal = (inputs - mean.to(inputs.dtype).view(shape)) * scale
        return normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)

    def _statistics(self, inputs: Any) -> tuple[Any, Any, Any]:
        # In double precision: the difference of two large sums would be too inaccurate in single.
        channels = inputs.transpose(0, 1).flatten(1).double()
        counts = 0.0 if self.company.is_dummy else 1.0
        sums = torch.cat([channels.sum(1), (channels * channels).sum(1)]) * counts
        size = channels.new_full((1,), channels.shape[1] * counts)
        whole = _Sum.apply(torch.cat([sums, size]), self.company)
        features, count = self.num_features, whole[-1].detach()
        mean = whole[:features] / count
        variance = (whole[features : 2 * features] / count - mean * mean).clamp_min(0)
        return mean, variance, count

    def _track(self, mean: Any, variance: Any, count: Any) -> None:
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp_min(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
