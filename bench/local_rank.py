"""One rank of the benchmark of local SGD: it trains in several ways, one after the other, and reports the speed.

    python -m bench.local_rank MODEL STEPS [SAMPLES]        (as one of several ranks, see bench.local)

``SAMPLES``: how many the validation loss of the large model is a mean over.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut
from bench.balance_rank import LENGTH, TOKENS, Gpt, mlp

_SETTLED = 10  # steps
_MLP_BATCH, _GPT_BATCH = 384, 4
_GPT_RATE, _WARM_UP, _LAST_RATE = 5e-4, 20, 0.1
_UNSEEN = 2048  # samples of 32 tokens: the error of a ratio of losses is then far below 1 %
_AT_ONCE = 32
_KINDS = 16  # tokens that occur
_SURE = 0.7  # how often a token follows from the two before


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if group := os.environ.get("GROUP"):
        with Path(group, "cgroup.procs").open("w") as file:  # only now: importing torch would take a minute
            file.write(str(os.getpid()))
    unseen = int(sys.argv[3]) if len(sys.argv) > 3 else _UNSEEN
    result = _small(steps) if name == "mlp" else _large(steps, unseen)
    if os.environ["RANK"] == "0":
        Path(os.environ["RESULT"]).write_text(json.dumps(result))


# --- a small model on unequal ranks -------------------------------------------------------------------------------


def _small(steps: int) -> dict[str, Any]:
    model, _, loss_of = mlp()
    made = torch.Generator().manual_seed(1)
    samples = 240 * _MLP_BATCH
    inputs = torch.randn(_MLP_BATCH, 256, generator=made).repeat(samples // _MLP_BATCH, 1)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 512, (samples,), generator=made))
    run = ut.init()
    alone = _alone(model, data, loss_of, steps) if run.is_main else 0.0
    run.gather(0.0)
    task = Task(data, loss_of, _MLP_BATCH, rate=1e-3)
    sync = _trained(ut.init(sync="step"), mlp()[0], task, steps + _SETTLED)
    local = _trained(ut.init(sync="local", round_s=1.0), mlp()[0], task)
    return {"alone": {"samples_per_s": alone}, "sync": sync, "local": local}


def _alone(model: Any, data: Any, loss_of: Callable[..., Any], steps: int) -> float:
    """The fastest rank with the whole batch, while the others wait."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data, _MLP_BATCH, shuffle=True)
    taken, begun = [], time.perf_counter()
    for batch, _ in zip(loader, range(steps + 4), strict=False):
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        begun, before = time.perf_counter(), begun
        taken.append(begun - before)
    return _MLP_BATCH * len(taken[4:]) / sum(taken[4:])


# --- a large model on a slow network ------------------------------------------------------------------------------


def _large(steps: int, unseen: int) -> dict[str, Any]:
    """Both trainings use the same samples once. Their losses are compared sample by sample, on others."""
    data, others = _chains(steps * _GPT_BATCH, 1), _chains(unseen, 2)
    found: dict[str, Any] = {}
    losses = []
    for sync in ("sync", "local"):
        torch.manual_seed(1)
        model = Gpt(width=516, layers=8)
        found["parameters"] = sum(one.numel() for one in model.parameters())
        options: dict[str, Any] = {"sync": "local", "round_s": 2.0} if sync == "local" else {"sync": "step"}
        run = ut.init(**options)
        task = Task(data, _next_token, _GPT_BATCH, _GPT_RATE * run.lr_scale, steps)
        found[sync] = _trained(run, model, task)
        losses.append(_losses(model, others, run.rank, run.ranks))
    found |= _compared(ut.init(sync="step"), *losses)
    return found


def _chains(samples: int, seed: int) -> Any:
    """Each token follows from the two before, most of the time: a table to learn, and a least loss."""
    table = torch.randint(0, _KINDS, (_KINDS, _KINDS), generator=torch.Generator().manual_seed(7))
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, _KINDS, (samples, LENGTH + 1), generator=made)
    for place in range(2, LENGTH + 1):
        follows = torch.rand(samples, generator=made) < _SURE
        tokens[:, place] = torch.where(follows, table[tokens[:, place - 2], tokens[:, place - 1]], tokens[:, place])
    assert _KINDS <= TOKENS
    return torch.utils.data.TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def _losses(model: Any, data: Any, rank: int, ranks: int) -> Any:
    """Of each sample that falls to this rank."""
    before, after = (one[rank::ranks] for one in data.tensors)
    found = []
    with torch.no_grad():
        for begin in range(0, len(before), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            each = nn.functional.cross_entropy(model(before[some]).transpose(1, 2), after[some], reduction="none")
            found.append(each.mean(1).double())
    return torch.cat(found)


def _compared(run: ut.Run, sync: Any, local: Any) -> dict[str, Any]:
    """The ratio of the mean losses, and the standard error of it: both models had the same samples."""
    sums = [float(one.sum()) for one in (sync, local)]
    numbers = run.gather(float(len(sync)), *sums)
    count, of_sync, of_local = (sum(column) for column in zip(*numbers, strict=True))
    ratio = of_local / of_sync
    square = sum(one for (one,) in run.gather(float((local - ratio * sync).square().sum())))
    error = math.sqrt(square / count / max(1.0, count - 1)) / (of_sync / count)
    return {"loss": {"sync": of_sync / count, "local": of_local / count, "ratio": ratio, "error": error}}


def _next_token(model: Any, before: Any, after: Any) -> Any:
    return nn.functional.cross_entropy(model(before).flatten(0, 1), after.flatten())


# --- both ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    data: Any
    loss_of: Callable[..., Any]
    batch: int
    rate: float
    decays_over: int | None = None  # steps, after a few in which it grows


def _trained(run: ut.Run, model: Any, task: Task, steps: int | None = None) -> dict[str, Any]:
    """One epoch, or so many steps: whole global batches by the time from the first ones on."""
    model, loss_of, batch = run.wrap(model), task.loss_of, task.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, fused=True)
    marks = [(time.perf_counter(), 0)]
    for some in run.loader(task.data, global_batch=batch):
        for group in optimizer.param_groups:
            group["lr"] = _rate(task, run.progress.step)
        with run.step() as step:
            step.backward(step.loss(loss_of(model, *some)))
            optimizer.step()
            optimizer.zero_grad()
        marks.append((time.perf_counter(), run.progress.step))
        if steps is not None and len(marks) > steps:
            break
    run.gather(0.0)
    marks.append((time.perf_counter(), run.progress.step))
    begun = next(mark for mark in marks if mark[1] >= min(_SETTLED, run.progress.step // 4))
    speed = batch * (marks[-1][1] - begun[1]) / (marks[-1][0] - begun[0])
    if run.is_main:
        print(f"{run.surroundings.sync.mode}: {speed:.1f} samples/s", flush=True)
    run._balance.close()
    run._metrics.close()
    return {"samples_per_s": speed}


def _rate(task: Task, step: int) -> float:
    if task.decays_over is None:
        return task.rate
    falling = 0.5 * (1 + math.cos(math.pi * min(1.0, step / task.decays_over)))
    return task.rate * min(1.0, (step + 1) / _WARM_UP) * (_LAST_RATE + (1 - _LAST_RATE) * falling)


if __name__ == "__main__":
    main()
