"""Files in which trainings write their metrics. Pure: names in, decisions out.

These files are small and become the curves of a job; the collection of outputs takes them wherever a job writes them.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_NAME = re.compile(
    r"metrics[\w.-]*\.jsonl"  # ugro.train, or a script itself
    r"|events\.out\.tfevents\..+"  # TensorBoard
    r"|run-[^/]+\.wandb"  # Weights & Biases
)


def is_metric_file(name: str) -> bool:
    """``name`` is a path with slashes, below the folder that a job writes to."""
    return _NAME.fullmatch(PurePosixPath(name).name) is not None
