"""A rank's script: a training in rounds of local SGD that can be ended and resumed. It works alone, too.

    python -m tests.rig.rounds --epochs 2 --round 0.3 …

The result: which samples this rank used in which epoch, the weights at the end, and what the rounds were. ``alone``
computes the same in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut

FEATURES, BATCH, SAMPLES, SEED = 4, 12, 643, 7


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, dtype: torch.dtype) -> None:
        made = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, FEATURES, dtype=dtype, generator=made)
        self.targets = self.inputs.sum(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        return index, self.inputs[index], self.targets[index]


class Memory:
    """Fails for batches of more samples than a rank can hold."""

    def __init__(self, most: int) -> None:
        self.most, self.failures = most, 0

    def check(self, samples: int) -> None:
        if samples > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("as asked")


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    run = begun(arguments)
    seen = Path(os.environ["RESULT"]).with_suffix(".seen")
    result = trained(run, arguments, seen)
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    run.close()


def begun(arguments: argparse.Namespace, output: Path | None = None) -> ut.Run:
    options: dict[str, Any] = {"round_s": arguments.round, "outer": arguments.outer, "max_staleness": arguments.stale}
    return ut.init(seed=SEED, sync="local", output=output, **options)


def trained(run: ut.Run, arguments: argparse.Namespace, seen: Path) -> dict[str, Any]:
    """``seen``: gets a line for each sample that this rank has used."""
    model, optimizer, loader = prepared(run, arguments)
    memory = Memory(arguments.memory if run.rank == 1 else BATCH)
    after_epochs: list[list[float]] = []
    steps: list[tuple[int, int, list[int]]] = []  # the epoch, the round and the samples of each

    def loss_of(part: Any) -> Any:
        memory.check(len(part[1]))
        return nn.functional.mse_loss(model(part[1]).squeeze(-1), part[2])

    for epoch in run.epochs(arguments.epochs):
        for number, batch in enumerate(loader):
            time.sleep(arguments.pause * (run.rank + 1) * len(batch[0]))
            if run.rank == 1 and epoch == 0 and number >= arguments.slow_from:
                time.sleep(arguments.slow)
            steps.append((epoch, round_of(run), batch[0].tolist()))
            loss = run.step(loss_of, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            with seen.open("a") as file:
                file.write("".join(f"{epoch} {index}\n" for index in batch[0].tolist()))
            if run.rank == 1 and number == arguments.die_at:
                os._exit(9)
            if run.rank == 0 and number == arguments.checkpoint_at:
                run.checkpoint()
            if epoch == 0 and number == arguments.leave_at + run.rank * 4:
                break
        run.gather(0.0)  # a round that was left in its middle is over for all then
        after_epochs.append([weight for one in model.parameters() for weight in one.flatten().tolist()])
        run.checkpoint()
    return {"weights": after_epochs, "steps": steps, "step": run.progress.step, "failures": memory.failures}


def round_of(run: ut.Run) -> int:
    course = run._local._course if run._local is not None else None
    return 0 if course is None else course._number


def prepared(run: ut.Run, arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    dtype = torch.float32 if arguments.single else torch.float64
    torch.manual_seed(5 + run.rank)  # the first rank's weights count
    model = run.wrap(made(dtype))
    make = torch.optim.SGD if arguments.sgd else torch.optim.Adam
    optimizer = make(model.parameters(), lr=arguments.lr)
    run.keep(model=model, optimizer=optimizer)
    return model, optimizer, run.loader(Samples(dtype), global_batch=BATCH, num_workers=arguments.workers)


def made(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def alone(steps: Sequence[Sequence[Any]], outer: str = "average", *, single: bool = False) -> list[list[float]]:
    """The weights after each epoch, from the same samples in the same steps and rounds, by one process.

    ``steps``: of each rank, in order.
    """
    dtype = torch.float32 if single else torch.float64
    data = Samples(dtype)
    torch.manual_seed(5)
    model = made(dtype)
    common = nn.utils.parameters_to_vector(model.parameters()).detach()
    held = nn.Parameter(common.clone())
    outside = torch.optim.SGD([held], lr=0.7, momentum=0.9, nesterov=True)
    found: dict[int, list[float]] = {}
    for epoch, number in sorted({(epoch, number) for rank in steps for epoch, number, _ in rank}):
        own = [[some for e, n, some in rank if (e, n) == (epoch, number)] for rank in steps]
        samples = [sum(len(some) for some in one) for one in own]
        mean = torch.zeros_like(common)
        for one, count in zip(own, samples, strict=True):
            nn.utils.vector_to_parameters(common.clone(), model.parameters())
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            for some in one:
                inner.zero_grad()
                nn.functional.mse_loss(model(data.inputs[some]).squeeze(-1), data.targets[some]).backward()
                inner.step()
            change = nn.utils.parameters_to_vector(model.parameters()).detach() - common
            mean += change * count / sum(samples)
        held.data.copy_(common)
        held.grad = -mean
        outside.step()
        common = common + mean if outer == "average" else held.detach().clone()
        found[epoch] = common.tolist()
    return [found[epoch] for epoch in sorted(found)]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--round", type=float, default=0.3)
    parser.add_argument("--outer", default="average")
    parser.add_argument("--stale", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.001)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sgd", action="store_true")
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--memory", type=int, default=BATCH)
    parser.add_argument("--slow-from", type=int, default=10**9, help="a batch of the second rank's first epoch")
    parser.add_argument("--slow", type=float, default=0.0, help="more seconds for each of its batches from there on")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--checkpoint-at", type=int, default=-1)
    parser.add_argument("--leave-at", type=int, default=10**9, help="a batch of the first epoch; later on others")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
