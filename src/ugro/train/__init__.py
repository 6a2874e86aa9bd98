"""The SDK for training scripts: balanced ranks on unequal devices, metrics, checkpoints.

    import ugro.train as ut
    run = ut.init()

Importing it takes milliseconds and has no side effects; torch is imported when it is first needed. It also works
outside UGRO: alone, or under torchrun.
"""

from __future__ import annotations

import sys

# It goes to nodes with jobs: no installer has looked at the version there.
if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(f"ugro.train needs Python 3.11 or newer; this is {version}, {sys.executable}")

from ugro.train.run import Run, init
from ugro.train.surroundings import params

__all__ = ["Run", "init", "params"]
