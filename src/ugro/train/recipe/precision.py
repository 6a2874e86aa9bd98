"""The precision of a training: the same on all ranks, so that their weights and updates agree."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.run import Run

_CPU, _FP16, _BF16 = range(3)  # what a device computes well


@dataclass(frozen=True, slots=True)
class Precision:
    name: str  # bf16, fp16, fp32
    device: Any

    @classmethod
    def of(cls, run: Run, wanted: str) -> Precision:
        """``auto`` is the best that the devices of all ranks have."""
        least = int(min(level for (level,) in run.gather(float(_level(run.device)))))
        if wanted == "auto":
            wanted = {_BF16: "bf16", _FP16: "fp16", _CPU: "fp32"}[least]
        if wanted == "fp16" and least == _CPU:
            raise UsageError("fp16 needs a GPU on every node", hint="use --dtype bf16 or fp32")
        return cls(wanted, run.device)

    @property
    def dtype(self) -> Any:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.name]

    def autocast(self) -> Any:
        import torch

        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scaler(self) -> Any:
        """Gradients of fp16 become zero without one."""
        import torch

        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None


def _level(device: Any) -> int:
    import torch

    if device.type != "cuda":
        return _CPU
    return _BF16 if torch.cuda.is_bf16_supported(including_emulation=False) else _FP16
