"""One rank of the pipeline benchmark: it trains with equal stages and with measured ones in turn, and reports times.

python -m bench.pipeline_rank STEPS ROUNDS        (as one of several ranks, see bench.pipeline)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut

TOKENS, LENGTH, LAYERS, WIDTH, BATCH = 128, 32, 12, 192, 24
_SETTLED = 2  # the first step measures and connects


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, **options) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def embed(self, numbers: Any) -> Any:
        return self.tokens(numbers) + self.places

    def forward(self, numbers: Any) -> Any:
        x = self.embed(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    steps, rounds = (int(text) for text in sys.argv[1:3])
    torch.set_num_threads(1)
    with Path(os.environ["GROUP"], "cgroup.procs").open("w") as file:  # only now: importing torch would take a minute
        file.write(str(os.getpid()))
    result: dict[str, Any] = {"layers": LAYERS, "global_batch": BATCH}
    for number in range(rounds):
        for mode in ("off", "adaptive"):
            found = _trained(mode, steps)
            result.setdefault(mode, []).append(found)
            result["micro_batches"] = found["micro_batches"]
            if os.environ["RANK"] == "0":
                print(f"{mode} {number}: {found['step_s'] * 1000:.0f} ms a step", flush=True)
    if os.environ["RANK"] == "0":
        Path(os.environ["RESULT"]).write_text(json.dumps(result))
    os._exit(0)  # all that counts is done


def _trained(mode: str, steps: int) -> dict[str, Any]:
    run = ut.init(balance=mode, seed=1)
    model = run.wrap(Gpt(), parallel="pipeline", layers="blocks", before="embed", after="head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.keep(model=model, optimizer=optimizer)
    made = torch.randint(0, TOKENS, (steps * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(made[:, :-1].clone(), made[:, 1:].clone())
    taken = []
    begun = time.perf_counter()
    for batch in run.loader(dataset, global_batch=BATCH):
        run.step(lambda part: nn.functional.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten()), batch)
        optimizer.step()
        optimizer.zero_grad()
        begun, before = time.perf_counter(), begun
        taken.append(begun - before)
    run._metrics.close()
    run._group.barrier()
    way: Any = run._stepping.way
    partition, problem = way._steps.pipe.partition, way._steps._problem
    way.close()
    return {
        "step_s": statistics.median(taken[_SETTLED:]),
        "predicted_s": partition.predicted_s,
        "micro_batches": problem.micro_batches,
        "layers": {f"rank{stage.device}": stage.layers for stage in partition.stages},
    }


if __name__ == "__main__":
    main()
