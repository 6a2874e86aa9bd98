"""Memory: errors that say it ran out, what is cached, what layers keep for backward, how many samples fit in."""

from __future__ import annotations

import gc
from typing import Any, Protocol

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


class DeviceMemory(Protocol):
    """Bytes of a device's memory."""

    def usable(self) -> int:
        """Returns what this process has and could still get: others may use the same device."""
        ...

    def allocated(self) -> int: ...
    def peak(self) -> int:
        """Returns the most that was allocated so far."""
        ...


class CudaMemory:
    def __init__(self, device: Any) -> None:
        self._device = device

    def usable(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        import torch

        return int(torch.cuda.max_memory_allocated(self._device))


def memory_of(device: Any) -> DeviceMemory | None:
    """Returns None for a CPU, whose memory is not reserved for one process."""
    return CudaMemory(device) if device.type == "cuda" else None


_KEPT_FREE = 0.1  # of the usable memory: pieces that nothing fits into, and batches that are larger than others


class Room:
    """Estimates how many samples fit into a device at once.

    A step without samples would need what is allocated before it; the difference to its peak is that of its samples.
    The peak is that of all steps so far, since it is the script's to reset: it grows with the first steps, and with
    those that have more samples than any before.
    """

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._before = (0, 0)  # what was allocated, and the peak
        self._most = 0  # samples at once that were held
        self._cap: int | None = None

    def cap(self, granule: int) -> int | None:
        """Returns whole granules, but not fewer samples than were held already; None while nothing is known."""
        if self._cap is None:
            return None
        return max(self._cap - self._cap % granule or self._cap, self._most)

    def begin(self) -> None:
        if self._memory is not None:
            self._before = (self._memory.allocated(), self._memory.peak())

    def end(self, samples: int) -> None:
        """A step is over in which at most so many samples were computed at once."""
        if self._memory is None or samples < 1:
            return
        (base, earlier), peak = self._before, self._memory.peak()
        is_news = peak > earlier or samples > self._most
        self._most = max(self._most, samples)
        if is_news and peak > base:
            left = self._memory.usable() * (1 - _KEPT_FREE) - base
            self._cap = max(1, int(left * samples / (peak - base)))


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
