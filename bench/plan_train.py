"""The training of the plan benchmark, as a user would write it: MODEL GLOBAL_BATCH STEPS."""

from __future__ import annotations

import sys
import time

import torch

import ugro.train as ut
from bench.balance_rank import MODELS

_SETTLED = 12  # steps after which the shares must be found


def main() -> None:
    name, global_batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    run = ut.init()
    model, dataset, loss_of = MODELS[name]()
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = run.loader(dataset, global_batch=global_batch, drop_last=True)
    step, begun = 0, time.perf_counter()
    while step < steps:
        for batch in loader:
            if step == _SETTLED:
                begun = time.perf_counter()
            with run.step() as one:
                one.backward(one.loss(loss_of(model, *batch)))
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    if run.is_main:
        print(f"speed {(steps - _SETTLED) * global_batch / (time.perf_counter() - begun):.3f}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
