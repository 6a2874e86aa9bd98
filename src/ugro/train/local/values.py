"""The values of a model that training changes, and what they were when all ranks agreed on them last.

A rank's values are the common ones, its own changes that are on their way to the others, and its changes since then.
When the changes of all ranks have arrived, the common values move by their average, and this rank's values by the
difference between that and its own part of it: what it has computed meanwhile stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.train import frozen
from ugro.train.finite import statistics
from ugro.train.group import Group

# Half precision has eleven significant bits: a change that loses more than this is too small beside the largest one.
_MOST_ERROR = 1e-3
_HEADROOM = 2.0**12  # what the largest change is scaled to, far below the largest number of half precision


@dataclass(frozen=True, slots=True)
class Change:
    tensors: list[Any]  # one for each value, in at least single precision
    largest: float
    exact: tuple[int, ...]  # those that half precision would spoil
    is_finite: bool = True


class Values:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = self._trained()
        self._buffers: list[tuple[Any, str]] = []  # their modules and names: a module may put another tensor there
        self.common: list[Any] = []

    @property
    def names(self) -> list[str]:
        """Of those that are trained; they come first among the tensors."""
        return [name for name, _ in self._parameters]

    @property
    def tensors(self) -> list[Any]:
        found = [one.data for _, one in self._parameters]
        return found + [getattr(module, name) for module, name in self._buffers]

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]

    def has(self, parameters: Sequence[Any]) -> bool:
        """Whether all of these count among what the ranks agree on."""
        known = {id(one) for _, one in self._parameters}
        return all(id(one) in known for one in parameters)

    def thawed(self) -> list[Any]:
        """What is trained now, and was not when the ranks agreed last."""
        return [one for _, one in self._trained() if not self.has([one])]

    def agree(self) -> None:
        """All ranks have the same values now. What is trained may have changed since the last time: layers thaw."""
        self._parameters = self._trained()
        self._buffers = statistics(self._model)
        now = self.tensors
        if [(one.shape, one.dtype) for one in self.common] != [(one.shape, one.dtype) for one in now]:
            self.common = [one.detach().clone() for one in now]
            return
        for mine, ours in zip(self.common, now, strict=True):
            mine.copy_(ours)

    def change(self) -> Change:
        """Since the ranks agreed; nothing of it may be on its way."""
        tensors = [_wide(now) - _wide(before) for now, before in zip(self.tensors, self.common, strict=True)]
        peaks = [float(one.abs().max()) if one.numel() else 0.0 for one in tensors]
        largest = max((peak for peak in peaks if peak < float("inf")), default=0.0)
        exact = [number for number, one in enumerate(tensors) if not _is_half_enough(one, largest)]
        return Change(tensors, largest, tuple(exact), all(peak < float("inf") for peak in peaks))

    def wide_common(self) -> list[Any]:
        """In the shapes and types of a change."""
        return [_wide(one) for one in self.common]

    def return_to_common(self) -> None:
        for now, common in zip(self.tensors, self.common, strict=True):
            now.copy_(common)

    def move(self, update: Sequence[Any], sent: Sequence[Any] | None, *, is_agreement: bool) -> None:
        """``sent``: what of this rank's own changes is in the update; None: nothing."""
        for number, (now, common, by) in enumerate(zip(self.tensors, self.common, update, strict=True)):
            common.copy_(_wide(common) + by)
            if is_agreement:  # to the last bit
                now.copy_(common)
            else:
                now.copy_(_wide(now) + (by if sent is None else by - sent[number]))


def _wide(values: Any) -> Any:
    import torch

    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def scale_of(largest: float) -> float:
    """A power of two, which changes no digit."""
    return _HEADROOM / 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


def _is_half_enough(change: Any, largest: float) -> bool:
    """A model in double precision is there for its precision."""
    import torch

    if change.dtype is not torch.float32:
        return False
    norm = float(change.norm())
    if norm == 0:
        return True
    scale = scale_of(largest)
    error = float(((change * scale).half().float() / scale - change).norm())
    return error <= _MOST_ERROR * norm  # also False for NaN


def spread(model: Any, group: Group) -> None:
    """Gives all ranks the first rank's values; frozen ones only if they differ."""
    from torch import distributed

    names = [name for name, one in model.named_parameters() if not one.requires_grad]
    is_same = len(set(group.texts(frozen.digest(model, names)))) == 1
    tensors = [one.data for one in model.parameters() if one.requires_grad or not is_same] + list(model.buffers())
    for one in tensors:
        distributed.broadcast(one, 0)
