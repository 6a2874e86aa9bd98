"""One rank of the balancing benchmark: it trains in several ways, one after the other, and reports the speed.

    python -m bench.balance_rank MODEL GLOBAL_BATCH STEPS ROUNDS        (as one of several ranks, see bench.balance)

First each rank alone while the others sleep; then all together. The result is the main rank's, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut
from ugro.train.reporting import Metrics
from ugro.train.stepping import Stepping

TOKENS, LENGTH = 128, 32
_SETTLED = 8  # steps after which a split must be found


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.blocks(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True))


def gpt() -> tuple[nn.Module, Any, Callable[..., Any]]:
    made = torch.randint(0, TOKENS, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    # Something to learn: each token follows from the one before.
    for place in range(1, LENGTH + 1):
        made[:, place] = (made[:, place - 1] * 5 + 7) % TOKENS
    return (
        Gpt(),
        torch.utils.data.TensorDataset(made[:, :-1].clone(), made[:, 1:].clone()),
        lambda model, x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()),
    )


def conv() -> tuple[nn.Module, Any, Callable[..., Any]]:
    sizes = [(3, 24, 1), (24, 48, 2), (48, 96, 2), (96, 96, 2)]
    layers = [part for i, o, s in sizes for part in (nn.Conv2d(i, o, 3, s, 1), nn.GroupNorm(8, o), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
    made = torch.Generator().manual_seed(1)
    images, labels = torch.randn(4096, 3, 32, 32, generator=made), torch.randint(0, 10, (4096,), generator=made)
    return model, torch.utils.data.TensorDataset(images, labels), _classified


def mlp() -> tuple[nn.Module, Any, Callable[..., Any]]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
    made = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(8192, 256, generator=made), torch.randint(0, 512, (8192,), generator=made)
    return model, torch.utils.data.TensorDataset(inputs, labels), _classified


def _classified(model: Any, inputs: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(model(inputs), labels)


MODELS = {"gpt": gpt, "conv": conv, "mlp": mlp}


def main() -> None:
    name, global_batch, steps, rounds = sys.argv[1], *(int(text) for text in sys.argv[2:5])
    torch.set_num_threads(1)
    with Path(os.environ["GROUP"], "cgroup.procs").open("w") as file:  # only now: importing torch would take a minute
        file.write(str(os.getpid()))
    run = ut.init()
    result: dict[str, Any] = {"solo": _solo(run, name, global_batch, steps)}
    speeds = tuple(1 / one for one in result["solo"]["share_s"])
    spent = Spent()
    for number in range(rounds):
        for mode in ("off", "static", "adaptive"):
            trial = Trial(name, global_batch, steps, mode, speeds)
            spent.is_on = mode == "adaptive"
            found = _together(trial, spent)
            spent.is_on = False
            result.setdefault(mode, []).append(found)
            _say(run, f"{name} {mode} {number}: {found['sample_s'] * global_batch * 1000:.0f} ms a step")
    if os.environ.get("HALVED"):
        for mode in ("static", "adaptive"):
            _halve(run, 1.0)
            found = _together(Trial(name, global_batch, 2 * steps, mode, speeds, halve_at=steps), spent)
            result[f"halved_{mode}"] = found
            _say(run, f"{name} {mode}, halved: {found['sample_s'] * global_batch * 1000:.0f} ms a step")
    result["overhead"] = spent.seconds / max(1e-9, spent.total_s)
    if run.is_main:
        Path(os.environ["RESULT"]).write_text(json.dumps(result))
    run.close()


# --- alone ------------------------------------------------------------------------------------------------------


def _solo(run: ut.Run, name: str, global_batch: int, steps: int) -> dict[str, Any]:
    """Seconds for a sample, of each rank at an equal share; and of the first one with the whole batch."""
    shares = []
    for rank in range(run.ranks):
        own = _alone(name, max(1, global_batch // run.ranks), steps) if rank == run.rank else 0.0
        shares.append(max(found for (found,) in run._group.gather([own]).wait()))
        _say(run, f"{name} rank {rank} alone: {1 / shares[-1]:.1f} samples/s")
    whole = _alone(name, global_batch, max(3, steps // 4)) if run.is_main else 0.0
    whole = max(found for (found,) in run._group.gather([whole]).wait())
    return {"share_s": shares, "first_s": whole}


def _alone(name: str, samples: int, steps: int) -> float:
    model, dataset, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.utils.data.default_collate([dataset[index] for index in range(samples)])
    taken = []
    for _ in range(max(4, steps // 2)):
        begun = time.perf_counter()
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:]) / samples


# --- together ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    name: str
    global_batch: int
    steps: int
    mode: str
    speeds: tuple[float, ...]
    halve_at: int | None = None


def _together(trial: Trial, spent: Spent) -> dict[str, Any]:
    name, global_batch, steps, halve_at = trial.name, trial.global_batch, trial.steps, trial.halve_at
    run = ut.init(balance=trial.mode, speeds=trial.speeds if trial.mode == "static" else ())
    model, dataset, loss_of = MODELS[name]()
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = run.loader(dataset, global_batch=global_batch)
    taken, shares, losses = [], [], []
    begun = time.perf_counter()
    for number, batch in enumerate(_endless(loader)):
        with run.step() as step:
            loss = step.loss(loss_of(model, *batch))
            step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
        begun, before = time.perf_counter(), begun
        taken.append(begun - before)
        losses.append(float(loss))
        shares.append(list(run.plan))
        spent.step(begun - before)
        if number + 1 == halve_at:
            _halve(run, 0.5)
        if number + 1 == steps:
            break
    advice = run.advice()
    run._balance.close()
    run._metrics.close()
    settled = taken[(halve_at or 0) + _SETTLED :]
    return {
        "sample_s": statistics.fmean(settled) / global_batch,
        "shares": shares[-1],
        "changes": [number for number in range(1, len(shares)) if shares[number] != shares[number - 1]],
        "advice": advice.words if advice else "",
        "best": list(advice.best.ranks) if advice else [],
        "losses": losses,
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _halve(run: ut.Run, speed: float) -> None:
    """The first rank's own quota, which it may change: it belongs to this user."""
    if run.is_main:
        quota = int(int(os.environ["QUOTA_US"]) * speed)
        with Path(os.environ["QUOTA_FILE"]).open("w") as file:  # errors appear on close
            file.write(os.environ["QUOTA_FORMAT"].format(quota=quota))
    run._group.barrier()


class Spent:
    """CPU time of our own in every step: of the training's thread, and of the one that writes."""

    def __init__(self) -> None:
        self.seconds = self.total_s = 0.0
        self.is_on = False
        for owner, method in ((Stepping, "begin"), (Stepping, "finish"), (Stepping, "_tell"), (ut.Run, "log")):
            setattr(owner, method, self._measured(getattr(owner, method)))
        # The writer's thread takes its time elsewhere; so what it does is measured where it does it.
        setattr(Metrics, "_line", self._measured(Metrics._line))  # noqa: B010
        setattr(Metrics, "_append", self._measured(Metrics._append))  # noqa: B010

    def step(self, seconds: float) -> None:
        self.total_s += self.is_on * seconds * float(os.environ["SPEED"])  # CPU time that the rank could have had

    def _measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds += (time.thread_time() - begun) * self.is_on

        return measured


def _say(run: ut.Run, text: str) -> None:
    if run.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main()
