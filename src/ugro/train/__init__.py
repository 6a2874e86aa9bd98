"""The SDK for training scripts: balanced ranks on unequal devices, metrics, checkpoints.

    import ugro.train as ut
    run = ut.init()

Importing it takes milliseconds and has no side effects; torch is imported when it is first needed. It also works
outside UGRO: alone, or under torchrun.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# It goes to nodes with jobs: no installer has looked at the version there.
if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(f"ugro.train needs Python 3.11 or newer; this is {version}, {sys.executable}")


if TYPE_CHECKING:
    from ugro.train.run import Run, init
    from ugro.train.surroundings import params

__all__ = ["Run", "init", "params"]
_PLACES = {"Run": "ugro.train.run", "init": "ugro.train.run", "params": "ugro.train.surroundings"}


def __getattr__(name: str) -> Any:
    """Loads the SDK when it is used: commands and the agent only need its rules."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
