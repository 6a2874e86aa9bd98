"""Recognises out-of-memory errors, frees cached memory, and counts what layers keep for the backward pass."""

from __future__ import annotations

import gc
from typing import Any

_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def free() -> None:
    """Call this after the error is released, since its traceback keeps all tensors alive."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class SavedForBackward:
    """Counts the bytes that autograd keeps between forward and backward, on any device, without the parameters."""

    def __init__(self) -> None:
        self.per_sample = 0.0
        self._samples = 0
        self._storages: dict[int, int] = {}  # bytes by address; a tensor may be kept several times
        self._hooks: Any = None

    def begin(self, samples: int) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self._samples = samples
        self._hooks = saved_tensors_hooks(self._keep, lambda kept: kept)
        self._hooks.__enter__()

    def end(self) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        self.per_sample = sum(self._storages.values()) / max(1, self._samples)
        self._storages.clear()

    def _keep(self, tensor: Any) -> Any:
        own = getattr(tensor, "_local_tensor", tensor)  # of one that is spread over ranks, what is here
        base = own if own._base is None else own._base
        if not (tensor.is_leaf and tensor.requires_grad) and not (base.is_leaf and base.requires_grad):
            storage = base.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor
