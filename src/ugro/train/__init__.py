"""The SDK for training scripts: balanced ranks on unequal devices, metrics, checkpoints.

    import ugro.train as ut
    run = ut.init()

Importing it takes milliseconds and has no side effects; torch is imported when it is first needed. It also works
outside UGRO: alone, or under torchrun.
"""

from __future__ import annotations

from ugro.train.run import Run, init

__all__ = ["Run", "init"]
