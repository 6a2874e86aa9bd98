"""Notices losses and gradients that are not finite, and what all ranks do about them.

A sum over each bucket of gradients, before it is exchanged, tells which rank it was. It goes with the numbers that
ranks exchange in every step: on a GPU with those of the next step, so that nobody waits for the device. To leave out an
update one has to know before: then a rank waits until its gradients are there, as a GradScaler does.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from ugro.kernel.support.errors import UgroError
from ugro.train.reporting import Notices
from ugro.train.rules import failures as nan
from ugro.train.rules.failures import Incident, OnNan, Response, Wrong
from ugro.train.telemetry import Clock, Moments

_HINT = "torch.autograd.set_detect_anomaly(True) finds where; nan: skip leaves such updates out, nan: ignore goes on"
EVERY_RANK = "every rank"


class NotFinite(UgroError):
    """Raised on all ranks when a training must not go on with numbers that are not finite."""

    def __init__(self, words: str) -> None:
        super().__init__(words, hint=_HINT)
        self.add_note(f"hint: {_HINT}")


class Finite:
    def __init__(self, choice: OnNan, clock: Clock, notices: Notices | None) -> None:
        """``notices``: None where nobody is told."""
        self.choice = choice
        self.response = Response()  # of the newest step
        self.notices = notices
        self.is_lossy = False  # what exchanges gradients may change them, also into what is not finite
        self._clock = clock
        self._has_scaler = False  # the script, or a library that it uses
        self._counts: dict[tuple[str, Wrong], tuple[int, int]] = {}  # the first step, and how many

    # --- in a step ----------------------------------------------------------------------------------------------

    @property
    def sees_now(self) -> bool:
        """The numbers of a step are known in it."""
        return self._clock.lag == 0 or self.choice is OnNan.SKIP

    def add(self, moments: Moments, gradients: Any) -> None:
        """Some of them, each time others."""
        found = _sum(gradients)
        moments.gradients = found if moments.gradients is None else moments.gradients + found

    def take(self, moments: Moments, parameters: Any) -> None:
        """All gradients that there are by now."""
        given = [one.grad for one in parameters if one.grad is not None]
        moments.gradients = _together([getattr(one, "_local_tensor", one).detach() for one in given])
        self.seal(moments)

    def seal(self, moments: Moments) -> None:
        """No more are added."""
        if moments.gradients is not None:
            moments.gradients = self._clock.kept(moments.gradients)

    def wrong(self, moments: Moments | None, *, waits: bool = False) -> tuple[Wrong, bool] | None:
        """Returns what is not finite, and whether it is harmless. It ``waits`` for a step that is not over."""
        if moments is None:
            return None
        if (waits or self.sees_now) and moments.ready is not None:
            self._clock.wait(moments.ready)
        is_loss = moments.loss is not None and not math.isfinite(float(moments.loss))
        is_known = moments.gradients is not None
        is_gradients = is_known and not math.isfinite(float(moments.gradients))
        if not is_loss and not is_gradients:
            return None
        if is_loss and is_known and not is_gradients:
            return Wrong.LOSS, True
        self._has_scaler = self._has_scaler or _has_scaler()
        is_scaled = moments.is_scaled or self._has_scaler
        return (Wrong.LOSS if is_loss else Wrong.GRADIENTS), is_scaled

    def look_at_last(self, moments: Moments | None, name: str) -> None:
        """On a GPU nobody has heard of the last step when a script ends. Waits for nothing."""
        has_failed = getattr(sys, "last_type", None) is not None  # then a device may not answer
        if has_failed or self.sees_now or moments is None or moments.ready is None:
            return
        if self._clock.has_come(moments.ready) and (wrong := self.wrong(moments)) is not None:
            self.tell(Incident(name, moments.step, *wrong), is_left_out=False)

    def spoilt(self, moments: Moments | None, parameters: Any) -> list[Incident]:
        """Gradients that are not finite after their exchange, the same on all ranks: too large for half precision."""
        if not self.is_lossy or not self.sees_now or moments is None:
            return []
        self.take(moments, parameters)
        wrong = self.wrong(moments)
        return [] if wrong is None else [Incident(EVERY_RANK, moments.step, *wrong)]

    # --- with all ranks -----------------------------------------------------------------------------------------

    def decide(self, incidents: Sequence[Incident], ranks: int) -> None:
        """All ranks have the same incidents of a step. Raises NotFinite if the run ends."""
        known = sorted(incidents, key=lambda one: one.what is not Wrong.LOSS)
        if len(known) == ranks > 1 and known[0].what is not Wrong.LOSS:  # which of them it was cannot be told
            known = [Incident(EVERY_RANK, known[0].step, known[0].what, known[0].is_harmless)]
        self.response = nan.response(self.choice, known, self.response.in_a_row)
        if self.response.stops is not None:
            raise NotFinite(self.response.stops)
        for incident in known:
            self.tell(incident, is_left_out=self.response.skips)

    def tell(self, incident: Incident, *, is_left_out: bool) -> None:
        """Logs it now and then: it may be so in every step. Says nothing of a GradScaler that looks for its scale."""
        if incident.is_search and self.response.in_a_row < nan.MOST_IN_A_ROW:
            return
        key = (incident.rank, incident.what)
        first, count = self._counts.get(key, (incident.step, 0))
        self._counts[key] = (first, count := count + 1)
        if self.notices is None:
            return
        verb = "was" if incident.what is Wrong.LOSS else "were"
        when = f"step {first}" if count == 1 else f"{count} steps, {first} to {incident.step}"
        text = f"the {incident.what} of {incident.rank} {verb} not finite in {when}"
        if is_left_out:
            text += "; the update was left out" if count == 1 else "; the updates were left out"
        self.notices.say(" ".join(key), text, is_logged=count & (count - 1) == 0)


def are_finite(parameters: Any) -> bool:
    """Waits for the device."""
    sums = [_sum(getattr(one, "_local_tensor", one).detach()) for one in parameters if one.device.type != "meta"]
    return all(math.isfinite(float(one)) for one in sums)


def statistics(model: Any) -> list[tuple[Any, str]]:
    """What a model learns without gradients, such as a BatchNorm does: the modules and the names of their buffers.

    What is not saved with it is a cache.
    """
    found = {
        id(one): (module, name)
        for module in model.modules()
        for name, one in module.named_buffers(recurse=False)
        if one.is_floating_point() and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


def _sum(values: Any) -> Any:
    """Finite, if and only if all of them are; but for numbers so large that no training goes on with them."""
    import torch

    return values.detach().sum(dtype=torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None)


def _together(tensors: list[Any]) -> Any:
    """The same of many: on a GPU not each of them has its own kernel."""
    import torch

    norm = getattr(torch.nn.utils, "get_total_norm", None)  # since torch 2.6
    is_wide = all(one.dtype in (torch.float32, torch.float64) for one in tensors)
    if norm is not None and is_wide and tensors:
        return norm(tensors)
    sums = [_sum(one) for one in tensors]
    return torch.stack([one.to(sums[0]) for one in sums]).sum() if sums else None


def _has_scaler() -> bool:
    """Of the script or a library, which have not told us. Looked for only when something is not finite."""
    from torch.amp import GradScaler

    return any(issubclass(type(one), GradScaler) and one.is_enabled() for one in gc.get_objects())


# --- memory -----------------------------------------------------------------------------------------------------------
# Memory: errors that say it ran out, what is cached, what layers keep for backward, how many samples fit in.


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
