"""A rank's script: trainings whose gradients are compressed on their way, one after the other.

    python -m tests.rig.compressed METHOD…        (as one of several ranks)

The result: for each method, the first and the last loss, the weights' sum, and how often memory ran out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut

STEPS, BATCH, WIDTH = 40, 12, 64


def main() -> None:
    torch.set_num_threads(1)
    results = {name: train(name) for name in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


def train(name: str) -> dict[str, Any]:
    method, _, trouble = name.partition("_")
    run = ut.init(seed=1, output=Path(os.environ["UGRO_OUTPUT"]) / name)
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * BATCH, WIDTH, generator=made)
    target = torch.randn(WIDTH, WIDTH, generator=made)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    # Small buckets, so that there are several.
    model = run.wrap(model, compress=None if method == "none" else method, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    failures, losses = 0, []

    def loss_of(part: Any) -> Any:
        nonlocal failures
        if trouble and run.rank == 1 and len(part[0]) > 2:
            failures += 1
            raise torch.OutOfMemoryError("as asked")
        return nn.functional.mse_loss(model(part[0]), part[1])

    loader = run.loader(torch.utils.data.TensorDataset(inputs, torch.tanh(inputs @ target)), global_batch=BATCH)
    for _ in run.epochs(3):
        for batch in loader:
            time.sleep(0.0002 * (run.rank + 1) * len(batch[0]))
            losses.append(float(run.step(loss_of, batch)))
            optimizer.step()
            optimizer.zero_grad()
    weights = [float(one.sum()) for one in model.module.parameters()]
    run._balance.close()
    run._metrics.close()
    return {"first": sum(losses[:5]) / 5, "last": sum(losses[-5:]) / 5, "weights": weights, "failures": failures}


if __name__ == "__main__":
    main()
