"""The SDK in a training script: ranks of unequal devices that are equally busy, metrics, checkpoints.

    import ugro.train as ut
    run = ut.init()

Importing it costs milliseconds and touches nothing; torch is imported when it is first needed. Outside UGRO it works as
well: alone, or under torchrun.
"""

from __future__ import annotations

from ugro.train.run import Run, init

__all__ = ["Run", "init"]
