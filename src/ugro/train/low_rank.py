"""Gradients of low rank with error feedback (PowerSGD), with a schedule of its own.

torch's hook waits inside the threads of the exchange, and stands still on Gloo with more than one bucket. Here all
buckets are exchanged with the last one, by the thread that has computed them, which has nothing else to do by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_RANK = 4
_LEAST_SAVED = 2  # how many times smaller a matrix must become


class LowRank:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._errors: dict[int, Any] = {}  # what earlier steps did not send, by parameter
        self._bases: dict[int, Any] = {}
        self._waiting: list[tuple[list[tuple[int, Any]], Any, Any]] = []  # gradients, buffer and future of a bucket

    def reduce(self, bucket: Any) -> Any:
        import torch

        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else None
        future: Any = torch.futures.Future(devices=devices)
        keys = [id(one) for one in bucket.parameters()]
        self._waiting.append((list(zip(keys, bucket.gradients(), strict=True)), buffer, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._exchange([pair for pairs, _, _ in waiting for pair in pairs])
            for _, whole, one in waiting:
                one.set_result(whole)
        return future

    def bytes_of(self, parameters: Iterable[Any]) -> int:
        """What a step sends of such parameters."""
        return sum(4 * (_RANK * sum(_shape(one)) if _is_compressed(one) else one.numel()) for one in parameters)

    def forget(self) -> None:
        self._errors.clear()

    # --- the exchange -------------------------------------------------------------------------------------------

    def _exchange(self, gradients: list[tuple[int, Any]]) -> None:
        import torch

        small = [one for _, one in gradients if not _is_compressed(one)]
        large = [(key, one) for key, one in gradients if _is_compressed(one)]
        for one, mean in zip(small, self._means(small), strict=True):
            one.copy_(mean)
        matrices = [self._with_error(key, one) for key, one in large]
        lefts = self._means(
            [matrix @ self._base(key, matrix) for (key, _), matrix in zip(large, matrices, strict=True)]
        )
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        own = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights = self._means(own)
        for (key, one), matrix, left, mine, right in zip(large, matrices, lefts, own, rights, strict=True):
            one.copy_((left @ right.T).view_as(one))
            # All ranks have the same sum here. A GradScaler tries scales that are too large, and skips such a step;
            # what is remembered of it would spoil every later one.
            if bool(right.isfinite().all()):
                self._errors[key] = matrix - left @ mine.T
                self._bases[key] = right

    def _with_error(self, key: int, gradient: Any) -> Any:
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        error = self._errors.get(key)
        return matrix.clone() if error is None else matrix + error

    def _base(self, key: int, matrix: Any) -> Any:
        """From the step before; at first some of its own, the same on all ranks."""
        import torch

        if key not in self._bases:
            made = torch.Generator().manual_seed(matrix.shape[0] * 1_000_003 + matrix.shape[1])
            base = torch.randn(matrix.shape[1], _RANK, generator=made).to(matrix.device)
            self._bases[key] = base
        return torch.linalg.qr(self._bases[key]).Q

    def _means(self, values: list[Any]) -> list[Any]:
        import torch
        from torch import distributed

        if not values:
            return []
        flat = torch.cat([one.reshape(-1).float() for one in values]).div_(self._ranks)
        distributed.all_reduce(flat)
        pieces = flat.split([one.numel() for one in values])
        return [piece.view_as(one) for piece, one in zip(pieces, values, strict=True)]


def _shape(values: Any) -> tuple[int, int]:
    return int(values.shape[0]), int(values.numel() // max(1, values.shape[0]))


def _is_compressed(values: Any) -> bool:
    if values.dim() < 2:
        return False
    rows, columns = _shape(values)
    return min(rows, columns) > _RANK and _LEAST_SAVED * _RANK * (rows + columns) <= rows * columns
