"""A rank's script: numbers that are not finite, or ranks in different steps, and what becomes of the training.

    python -m tests.rig.finite SCENARIO…        (as one of several ranks)

The result: for each scenario, the weights at the end, the samples of each step, how it ended and what was said.
``alone`` computes the same in one process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import ugro.train as ut
from tests.rig.gradients import BATCH, DATA, loss_of, mlp, normalised, whole
from tests.rig.rounds import round_of
from ugro.kernel.support.errors import UgroError

WRONG_STEP, WRONG_RANK, STEPS, RATE = 3, 1, 6, 0.05
SAID: list[str] = []


class Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


class Huge(torch.autograd.Function):  # type: ignore[misc]
    """A number whose gradient is finite, and too large for half precision."""

    @staticmethod
    def forward(context: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0] * 1e9


class Spoilt(torch.autograd.Function):  # type: ignore[misc]
    """A number whose gradient is not finite."""

    @staticmethod
    def forward(context: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0] * math.nan


@dataclass
class Scenario:
    nan: str
    what: str = "loss"
    make: Callable[[], Any] = mlp
    form: str = "block"  # of the script's step
    scaler: float | None = None  # its first scale
    knows_scaler: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    is_local: bool = False
    leaves: str = ""  # what the wrong rank does in the wrong step: continue, or break
    epochs: int = 1
    is_everywhere: bool = False  # wrong on all ranks


_STAGES = {"parallel": "pipeline", "micro_batches": 3}
SCENARIOS = {
    "stop_loss": Scenario("stop"),
    "stop_gradients": Scenario("stop", "gradients"),
    "stop_whole_step": Scenario("stop", form="whole step"),
    "stop_pipeline": Scenario("stop", form="whole step", options=_STAGES, is_everywhere=True),
    "skip_loss": Scenario("skip"),
    "skip_gradients": Scenario("skip", "gradients"),
    "skip_own_backward": Scenario("skip", form="own backward"),
    "skip_whole_step": Scenario("skip", form="whole step"),
    "skip_batch_norm": Scenario("skip", "input", make=normalised),
    "skip_sharded": Scenario("skip", "gradients", options={"parallel": "fsdp"}),
    "skip_compressed": Scenario("skip", "huge", options={"compress": "fp16"}),
    "skip_by_hook": Scenario("skip", "huge", form="whole step", options={"comm_hook": fp16_compress_hook}),
    "stop_compressed": Scenario("stop", "huge", form="whole step", options={"compress": "fp16"}),
    "stop_own_backward": Scenario("stop", form="own backward"),
    "ignore": Scenario("ignore"),
    # As when a scale is too large.
    "scaler": Scenario("stop", "gradients", scaler=8.0),
    "scaler_of_its_own": Scenario("stop", "gradients", scaler=8.0, knows_scaler=False),
    "scaler_and_a_loss": Scenario("stop", scaler=2.0),
    "rounds_stop": Scenario("stop", is_local=True),
    "rounds_skip": Scenario("skip", is_local=True),
    "rounds_skip_own_backward": Scenario("skip", "gradients", form="own backward", is_local=True),
    "rounds_ignore": Scenario("ignore", is_local=True),
    "loss_alone": Scenario("stop", "value"),
    "batch_left_out": Scenario("stop", "none", leaves="continue"),
    "loop_left_for_good": Scenario("stop", "none", leaves="break"),
    "loop_left": Scenario("stop", "none", leaves="break", epochs=2),
}


def trained(asked: Scenario) -> dict[str, Any]:
    SAID.clear()
    local: dict[str, Any] = {"sync": "local", "round_s": 1e-6} if asked.is_local else {"sync": "step"}
    run = ut.init(seed=1, balance="off", nan=asked.nan, **local)
    scaler = None if asked.scaler is None else torch.amp.GradScaler("cpu", init_scale=asked.scaler)
    model = run.wrap(asked.make() if scaler is None else asked.make().float(), **asked.options)
    optimizer = made(model, asked)
    run.keep(model=model, optimizer=optimizer)
    loader = run.loader(DATA, global_batch=BATCH)
    steps: list[tuple[int, list[int]]] = []
    error = ""
    try:
        for _ in run.epochs(asked.epochs):
            for indices, *batch in loader:
                number = len(steps)
                is_wrong_rank = asked.is_everywhere or run.rank == min(WRONG_RANK, run.ranks - 1)
                is_wrong = number == WRONG_STEP and is_wrong_rank
                steps.append((round_of(run) if asked.is_local else number, indices.tolist()))
                if is_wrong and asked.leaves:
                    if asked.leaves == "continue":
                        continue
                    break
                _step(run, optimizer, _loss_of(model, asked, is_wrong=is_wrong), batch, (asked, scaler, is_wrong))
                if number + 1 == STEPS and not asked.is_local:
                    break
        run.checkpoint()
    except UgroError as found:
        error = f"{type(found).__name__}: {found}"
    scale = None if scaler is None else scaler.get_scale()
    buffers = [value for one in model.buffers() for value in one.double().flatten().tolist()]
    result = {"error": error, "weights": _weights(model), "buffers": buffers, "steps": steps}
    return {**result, "said": list(SAID), "scale": scale}


def made(model: Any, asked: Scenario) -> Any:
    """Adam's moments show an update that was not left out wholly."""
    return (torch.optim.SGD if asked.is_local else torch.optim.Adam)(model.parameters(), lr=RATE)


def _loss_of(model: Any, asked: Scenario, *, is_wrong: bool) -> Callable[[Any], Any]:
    def loss_fn(part: Any) -> Any:
        inputs, targets = part if asked.scaler is None else (one.float() for one in part)
        loss = loss_of(model, inputs * math.nan if is_wrong and asked.what == "input" else inputs, targets)
        if not is_wrong or asked.what in ("none", "input", "value"):
            return loss
        if asked.what == "huge":
            return Huge.apply(loss)
        return loss * math.nan if asked.what == "loss" else Spoilt.apply(loss)

    return loss_fn


def _step(
    run: ut.Run, optimizer: Any, loss_fn: Callable[[Any], Any], batch: Any, how: tuple[Scenario, Any, bool]
) -> None:
    asked, scaler, is_wrong = how
    if asked.form == "whole step":
        run.step(loss_fn, batch, scaler=scaler)
        optimizer.step()
        optimizer.zero_grad()
        return
    with run.step() as step:
        loss = loss_fn(batch)
        step.loss(loss * math.nan if is_wrong and asked.what == "value" else loss)
        if asked.form == "own backward":
            (loss * step.weight).backward()
        elif asked.knows_scaler:
            step.backward(loss, scaler=scaler)
        else:
            step.backward(scaler.scale(loss))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def alone(asked: Scenario, steps: Sequence[Sequence[Sequence[Any]]]) -> list[float]:
    """What one process makes of the samples of all ranks: of the wrong step nothing, or nothing of the wrong rank."""
    model = mlp()
    rounds = sorted({place for of_rank in steps for place, _ in of_rank})
    if not asked.is_local:
        optimizer = made(model, asked)
        for place in rounds:
            if place != WRONG_STEP:
                _update(model, optimizer, [sample for of_rank in steps for sample in of_rank[place][1]])
        return _weights(model)
    for place in rounds:
        _round(model, asked, [_right(rank, of_rank, place) for rank, of_rank in enumerate(steps)])
    return _weights(model)


def _right(rank: int, of_rank: Sequence[Sequence[Any]], place: int) -> list[list[int]]:
    """The samples of each step of a rank in a round."""
    return [
        samples
        for number, (where, samples) in enumerate(of_rank)
        if where == place and (rank, number) != (WRONG_RANK, WRONG_STEP)
    ]


def _round(model: Any, asked: Scenario, parts: list[list[list[int]]]) -> None:
    """Each rank takes its own steps; the average of what they have changed counts, by their samples."""
    before = [one.detach().clone() for one in model.parameters()]
    moved = [torch.zeros_like(one) for one in before]
    whole_mass = sum(len(samples) for part in parts for samples in part)
    for part in parts:
        own = mlp()
        own.load_state_dict(model.state_dict())
        optimizer = made(own, asked)
        for samples in part:
            _update(own, optimizer, samples)
        mass = sum(map(len, part))
        for total, now, then in zip(moved, own.parameters(), before, strict=True):
            total += (now.detach() - then) * (mass / whole_mass)
    for one, then, by in zip(model.parameters(), before, moved, strict=True):
        one.data.copy_(then + by)


def _update(model: Any, optimizer: Any, samples: list[int]) -> None:
    optimizer.zero_grad()
    loss_of(model, DATA.inputs[samples], DATA.targets[samples]).backward()
    optimizer.step()


def _weights(model: Any) -> list[float]:
    return [value for one in model.parameters() for value in whole(one).detach().double().flatten().tolist()]


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig()
    logging.getLogger("ugro.train").addHandler(Said())
    results = {name: trained(SCENARIOS[name]) for name in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
