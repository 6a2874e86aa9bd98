"""A rank's script: models that are spread over the ranks. Is the gradient that of one process on the whole batch?

    python -m tests.rig.spread SCENARIO…        (as one of several ranks)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut
from tests.rig.gradients import (
    BATCH,
    DATA,
    FEATURES,
    SAMPLES,
    Explosive,
    begin,
    loss_of,
    mlp,
    weighted_loss,
    weights_of,
    whole,
    work,
)
from ugro.train.parallel.sharded import time_stalls

WIDTH = 10  # no multiple of three ranks
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Layer(nn.Module):  # type: ignore[misc]
    """Runs out of memory with too many samples, on the way there or back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.room, self.is_in_backward, self.failures = 1000, False, 0

    def forward(self, values: Any) -> Any:
        is_lit = len(values) > self.room
        self.failures += is_lit
        if is_lit and not self.is_in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return Explosive.apply(values + self.down(torch.tanh(self.up(self.norm(values)))), is_lit)


class Deep(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, values: Any) -> Any:
        values = self.first(values)
        for layer in self.layers:
            values = layer(values)
        return self.last(values * self.scale)


def train(
    parallel: str, make: Callable[[], nn.Module] = Deep, loss: Callable[..., Any] = loss_of, **options: Any
) -> dict[str, Any]:
    """Clips in every step: the norm is that of all gradients, on every rank."""
    run, model, optimizer, loader, judge = begin(make, parallel=parallel, **options)
    norms = []
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            work(run, inputs)
            step.backward(step.loss(loss(model, inputs, targets)))
            judge.after(indices)
            norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))))
            optimizer.step()
            optimizer.zero_grad()
    expected = [float(nn.utils.get_total_norm(step[2])) for step in judge.steps]
    return judge.verdict(
        loss, norms=norms, expected_norms=expected, held_part=held_part(model), is_clean=_is_clean(run), plan=run.plan
    )


def held_part(model: Any) -> float:
    """How much of the model this rank keeps."""
    held = sum(one.to_local().numel() for one in model.parameters() if hasattr(one, "to_local"))
    return float(held / max(1, sum(one.numel() for one in model.parameters())))


def _is_clean(run: ut.Run) -> bool:
    """Whether waiting was told from computing."""
    return bool(run._stepping._separates_waiting)


# --- FSDP -------------------------------------------------------------------------------------------------------


def fsdp() -> dict[str, Any]:
    return train("fsdp")


def fsdp_balanced() -> dict[str, Any]:
    """Nothing but steps: what a judge asks the others in between would make all ranks equally slow."""
    run, model, optimizer, loader, _ = begin(Deep, parallel="fsdp")
    for _, inputs, targets in (batch for _ in range(2) for batch in loader):
        with run.step() as step:
            time.sleep(0.008 * (run.rank + 1) * len(inputs))
            step.backward(step.loss(loss_of(model, inputs, targets)))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {"plan": run.plan, "is_clean": _is_clean(run)}


def fsdp_unequal() -> dict[str, Any]:
    return train("fsdp", balance="static", speeds=(1, 0.5, 0.25))


def fsdp_of_a_plain_model() -> dict[str, Any]:
    return train("fsdp", mlp, balance="static", speeds=(1, 0.5, 0.25))


def fsdp_blocks() -> dict[str, Any]:
    return train("fsdp", blocks=Layer, reshard_after_forward=False)


def fsdp_other_beginnings() -> dict[str, Any]:
    """Ranks that made other weights begin with those of the first."""

    def make() -> nn.Module:
        model = Deep()
        with torch.no_grad():
            model.scale += int(os.environ["RANK"])
        return model

    return train("fsdp", make)


def fsdp_bf16() -> dict[str, Any]:
    def loss(model: Any, inputs: Any, targets: Any) -> Any:
        outputs = model(inputs.float()).squeeze(-1)
        return nn.functional.mse_loss(outputs.float(), targets.float())

    return train("fsdp", lambda: Deep().float(), loss, precision="bf16", balance="static", speeds=(1, 0.5, 0.25))


def fsdp_micro_batches() -> dict[str, Any]:
    """Weights of samples, and more parts than some ranks have samples."""
    run, model, optimizer, loader, judge = begin(
        Deep, parallel="fsdp", balance="static", speeds=(1, 0.5, 0.25), weights=weights_of(DATA.inputs)
    )
    for batch in loader:
        judge.before()
        with run.step() as step:
            for _, inputs, targets in step.micro_batches(batch, count=5):
                step.backward(step.loss(weighted_loss(model, inputs, targets)))
            judge.after(batch[0])
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict(weighted_loss)


def fsdp_out_of_memory(is_in_backward: bool = False) -> dict[str, Any]:
    """In the second of three layers of one rank."""

    def make() -> nn.Module:
        model = Deep()
        if os.environ["RANK"] == "1":
            model.layers[1].room, model.layers[1].is_in_backward = 4, is_in_backward
        return model

    run, model, optimizer, loader, judge = begin(make, parallel="fsdp")
    for batch in loader:
        judge.before()
        judge.reference.layers[1].room = SAMPLES
        run.step(lambda part: loss_of(model, part[1], part[2]), batch)
        judge.after(batch[0])
        optimizer.step()
        optimizer.zero_grad()
    balancer = run._balance.balancer
    assert balancer is not None
    return judge.verdict(failures=model.layers[1].failures, caps=balancer.caps, plan=run.plan)


def fsdp_out_of_memory_in_backward() -> dict[str, Any]:
    return fsdp_out_of_memory(is_in_backward=True)


def fsdp_as_on_a_gpu() -> dict[str, Any]:
    """The places where a GPU waits are there, and what is spent in them is reported."""
    run = ut.init(seed=1)
    model = run.wrap(Deep(), parallel="fsdp")
    stepping = run._stepping
    is_possible = time_stalls(model, stepping)
    with run.step() as step:
        step.backward(loss_of(model, DATA.inputs[:BATCH], DATA.targets[:BATCH]))
        moments = stepping._moments
        assert moments is not None
        waits = len(moments.waits)
    return {"is_possible": is_possible, "waits": waits}


# --- tensor parallel ----------------------------------------------------------------------------------------------


def tp_dp() -> dict[str, Any]:
    return train("tp+dp", plan=PLAN)


def tp_dp_unequal() -> dict[str, Any]:
    return train("tp+dp", plan=PLAN, balance="static", speeds=(0.5, 0.5, 0.25, 0.25))


def tp_dp_of_transformers() -> dict[str, Any]:
    """A model that brings a plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> Any:
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)).double()

    run = ut.init(seed=1)
    model = run.wrap(make(), parallel="tp+dp")
    numbers = torch.arange(32).view(4, 8) % 31
    own = numbers.chunk(2)[run._stepping.units[run.rank]]
    with run.step() as step:
        step.backward(model(input_ids=own, labels=own).loss)
    reference = make()
    reference(input_ids=numbers, labels=numbers).loss.backward()
    both = zip(model.parameters(), reference.parameters(), strict=True)
    pairs = [(whole(mine.grad), theirs.grad) for mine, theirs in both]
    scale = max(float(theirs.abs().max()) for _, theirs in pairs)
    split = [name for name, one in model.named_parameters() if one.placements[1].is_shard()]
    return {"error": max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / scale, "split": len(split)}


def main() -> None:
    torch.set_num_threads(1)
    results = {name: globals()[name]() for name in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
