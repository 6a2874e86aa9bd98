"""How a model is spread over the ranks: a module for each way, which ``run.wrap(model, parallel=…)`` chooses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ugro.kernel.support.errors import UsageError

if TYPE_CHECKING:
    from ugro.train.parallel.way import Way
    from ugro.train.stepping import Stepping

# Each module has ``spread(model, stepping, options) -> Way``, which all ranks call, also where there is only one.
_MODULES = {"ddp": "ddp", "fsdp": "fsdp", "tp+dp": "tensor", "pipeline": "pipeline"}


def spread(parallel: str, model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    if parallel not in _MODULES:
        raise UsageError(f"unknown way to spread a model: {parallel!r}", hint=f"one of {', '.join(_MODULES)}")
    way: Way = import_module(f"{__name__}.{_MODULES[parallel]}").spread(model, stepping, options)
    return way
