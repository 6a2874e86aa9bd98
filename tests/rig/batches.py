"""A rank's script: batches of many shapes, layers that thaw, all forms of a step. Is the gradient that of one process?

    python -m tests.rig.batches SCENARIO…        (as one of several ranks, or alone)

Sequences are as long as the first rank's share, so that nothing can be told from sizes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut
from tests.rig.gradients import Explosive, whole
from ugro.kernel.support.errors import UgroError

FEATURES, BATCH = 3, 21
SAMPLES = 3 * BATCH + 2  # of the last batch, one of three ranks gets one sample, and another gets none
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SPEEDS = (1.0, 0.5, 0.25)[:RANKS]
LENGTH = {1: 21, 2: 14, 3: 12}[RANKS]


class Sequences(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64, generator=made)
        self.y = torch.randn(SAMPLES, dtype=torch.float64, generator=made)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": self.x[number], "y": self.y[number], "number": number}


DATA = Sequences()
MASK = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.float64))
CLASSES = torch.linspace(0.5, 2.0, LENGTH, dtype=torch.float64)  # weights of as many classes as there are samples


def first_come_steps(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps × samples × features, and what belongs to all samples. Changes what it gets, as some do."""
    numbers = [sample.pop("number") for sample in samples]
    return {
        "x": torch.stack([sample["x"] for sample in samples], dim=1),
        "mask": MASK.clone(),
        "classes": CLASSES.clone(),
        "rest": [torch.stack([sample["y"] for sample in samples]), {"numbers": torch.tensor(numbers)}],
        "names": [f"sample {number}" for number in numbers],
    }


class Model(nn.Module):  # type: ignore[misc]
    """On a device that holds so many samples."""

    def __init__(self, room: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(FEATURES, 8).double(), nn.Linear(8, 1).double()
        self.room, self.failures = room, 0

    def forward(self, x: Any, mask: Any) -> Any:
        is_lit = x.shape[1] > self.room
        self.failures += is_lit
        seen = torch.einsum("st,tbf->sbf", mask, x)
        return self.last(Explosive.apply(torch.tanh(self.first(seen)), is_lit)).mean(0).squeeze(-1)


def loss_of(model: Any, part: dict[str, Any]) -> Any:
    y, more = part["rest"]
    assert part["names"] == [f"sample {number}" for number in more["numbers"].tolist()]
    return ((model(part["x"], part["mask"]) - y).square() * part["classes"][more["numbers"] % LENGTH]).mean()


def token_loss(model: Any, part: dict[str, Any]) -> Any:
    """The mean over tokens: samples have from one to four."""
    y, more = part["rest"]
    tokens = tokens_of(more["numbers"])
    return ((model(part["x"], part["mask"]) - y).square() * tokens).sum() / tokens.sum()


def tokens_of(numbers: Any) -> Any:
    return (1 + numbers % 4).double()


class Case:
    """A training beside one process that has all samples."""

    def __init__(
        self, make: Callable[[], nn.Module] = Model, collate: Any = first_come_steps, loss: Any = loss_of,
        weights: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.run = ut.init(seed=1, balance="static", speeds=SPEEDS)
        self.make, self.loss, self.collate = make, loss, collate
        self.model = self.run.wrap(make(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.loader = self.run.loader(DATA, global_batch=BATCH, collate_fn=collate, weights=weights)
        self.errors: list[float] = []
        self.used: list[int] = []

    @property
    def bare(self) -> Any:
        return getattr(self.model, "module", self.model)

    def before(self) -> nn.Module:
        """A model as this one is now, in one process."""
        alone = self.make()
        alone.load_state_dict({name: whole(one).clone() for name, one in self.bare.state_dict().items()})
        for mine, theirs in zip(alone.parameters(), self.bare.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        if hasattr(alone, "room"):
            alone.room = SAMPLES
        return alone

    def numbers(self, own: Any) -> list[int]:
        """Those of the whole batch."""
        mine = [] if self.run._stepping.is_dummy else [int(number) for number in own]
        return [number for text in self.run._group.texts(json.dumps(mine)) for number in json.loads(text)]

    def after(self, alone: nn.Module, own: Any, others: float = 0.0) -> None:
        numbers = self.numbers(own)
        self.used += numbers
        expected = self.loss(alone, self.collate([DATA[number] for number in numbers]))
        expected.backward()
        self.errors.append(max(others, difference(self.bare, alone)))

    def found(self, **more: Any) -> dict[str, Any]:
        is_once = sorted(self.used) == list(range(SAMPLES))
        return {"error": max(self.errors), "is_once": is_once, **more}


def difference(model: nn.Module, alone: nn.Module) -> float:
    """The largest one of two gradients, for the largest gradient; a gradient that only one has is an error."""
    worst, scale = 0.0, max(float(one.grad.abs().max()) for one in alone.parameters() if one.grad is not None)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            return 1e9
        if mine.grad is not None:
            worst = max(worst, float((whole(mine.grad) - theirs.grad).abs().max()) / scale)
    return worst


def trained(case: Case, compute: Callable[[Any], Any]) -> dict[str, Any]:
    for batch in case.loader:
        alone = case.before()
        compute(batch)
        case.after(alone, batch["rest"][1]["numbers"])
        case.optimizer.step()
        case.optimizer.zero_grad()
    return case.found(failures=getattr(case.bare, "failures", 0))


IS_SMALL = os.environ.get("RANK", "0") == "0"  # the first rank has the largest share, and a small device


def small() -> Model:
    return Model(4 if IS_SMALL else 1000)


# --- where the samples are --------------------------------------------------------------------------------------


def steps_first() -> dict[str, Any]:
    case = Case()
    return trained(case, lambda batch: case.run.step(lambda part: loss_of(case.model, part), batch))


def steps_first_in_blocks() -> dict[str, Any]:
    case = Case()

    def compute(batch: Any) -> None:
        with case.run.step() as step:
            step.backward(step.loss(loss_of(case.model, batch)))

    return trained(case, compute)


def steps_first_in_micro_batches() -> dict[str, Any]:
    case = Case()

    def compute(batch: Any) -> None:
        with case.run.step() as step:
            for part in step.micro_batches(batch, count=case.run.rank + 2):
                step.backward(step.loss(loss_of(case.model, part)))

    return trained(case, compute)


def steps_first_out_of_memory(**options: Any) -> dict[str, Any]:
    case = Case(small, **options)
    return trained(case, lambda batch: case.run.step(lambda part: loss_of(case.model, part), batch))


def steps_first_sharded() -> dict[str, Any]:
    return steps_first_out_of_memory(parallel="fsdp")


def steps_first_taken_apart() -> dict[str, Any]:
    """The script moves tensors, and passes on some of them in a container of its own."""
    case = Case(small)

    def compute(batch: Any) -> None:
        y, more = batch["rest"]
        passed = (batch["x"].clone(), [y, batch["mask"]], tuple(batch["names"]), more["numbers"].int())

        def loss(part: Any) -> Any:
            x, (y, mask), names, numbers = part
            rest = [y, {"numbers": numbers}]
            return loss_of(case.model, {"x": x, "mask": mask, "classes": CLASSES, "names": list(names), "rest": rest})

        case.run.step(loss, passed)

    return trained(case, compute)


def tokens() -> dict[str, Any]:
    """Weights of samples, in parts."""
    case = Case(small, loss=token_loss, weights=tokens_of(torch.arange(SAMPLES)))
    return trained(case, lambda batch: case.run.step(lambda part: token_loss(case.model, part), batch))


@dataclass
class Pictures:
    """Of different sizes: a list of them, and boxes for each."""

    pictures: list[Any]
    boxes: list[dict[str, Any]]
    numbers: Any


class Looker(nn.Module):  # type: ignore[misc]
    def __init__(self, room: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(FEATURES, 1).double()
        self.room, self.failures = room, 0

    def forward(self, pictures: list[Any]) -> Any:
        if len(pictures) > self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return torch.stack([self.layer(one).mean() for one in pictures])


def pictures() -> dict[str, Any]:
    def collate(samples: list[dict[str, Any]]) -> Pictures:
        return Pictures(
            [sample["x"][: 1 + sample["number"] % LENGTH] for sample in samples],
            [{"box": sample["y"]} for sample in samples],
            torch.tensor([sample["number"] for sample in samples]),
        )

    def loss(model: Any, part: Pictures) -> Any:
        return (model(part.pictures) - torch.stack([one["box"] for one in part.boxes])).square().mean()

    case = Case(lambda: Looker(4 if IS_SMALL else 1000), collate, loss)
    for batch in case.loader:
        alone = case.before()
        case.run.step(lambda part: loss(case.model, part), batch)
        case.after(alone, batch.numbers)
        case.optimizer.step()
        case.optimizer.zero_grad()
    return case.found(failures=case.bare.failures)


def refused() -> dict[str, Any]:
    """What a batch says that cannot be cut for certain."""

    def cat(samples: list[Any]) -> Any:
        return {"x": torch.cat([sample["x"] for sample in samples])}

    def packed(samples: list[Any]) -> Any:
        return nn.utils.rnn.pack_sequence([sample["x"] for sample in samples], enforce_sorted=False)

    def pairs(samples: list[Any]) -> Any:
        x = torch.stack([sample["x"].flatten() for sample in samples])
        return {"x": x @ x.T}

    def counted(samples: list[Any]) -> Any:
        return {"x": torch.stack([sample["x"] for sample in samples]), "count": LENGTH * len(samples)}

    def plain(samples: list[Any]) -> Any:
        return torch.stack([sample["x"] for sample in samples], dim=1)

    cases: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "flat": (cat, lambda batch: batch),
        "packed": (packed, lambda batch: batch),
        "pairs": (pairs, lambda batch: batch),
        "counted": (counted, lambda batch: batch),
        "turned": (plain, lambda batch: batch.transpose(0, 1)),
        "turned in place": (plain, lambda batch: batch.transpose_(0, 1)),
        "weights of classes": (plain, lambda batch: (batch, CLASSES)),
        "other values": (plain, lambda batch: batch / 2),
    }
    found = {}
    for name, (collate, passed) in cases.items():
        run = ut.init(balance="static", speeds=SPEEDS)
        run.wrap(Model())
        batch = next(iter(run.loader(DATA, global_batch=BATCH, collate_fn=collate)))
        with run.step() as step:
            found[name] = said(partial(_divided, step, passed(batch)))
    run = ut.init()
    run.wrap(Model())
    with run.step() as step:
        found["no loader"] = said(partial(_divided, step, torch.zeros(4, 4)))
        found["samples"] = said(lambda: step.backward(torch.zeros(()), samples=2))
    return found


def _divided(step: Any, batch: Any) -> None:
    list(step.micro_batches(batch, count=2))


def said(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except UgroError as error:
        return f"{error} ({error.hint})"
    return "nothing"


def miscounted() -> dict[str, Any]:
    """A script that takes the length of a sequence for the number of samples."""
    case = Case()
    found = {}
    batch = next(iter(case.loader))
    present = batch["x"].shape[1]
    for name, samples in (("too many", present + 1), ("too few", present - 1)):

        def attempt(samples: int = samples) -> None:
            with case.run.step() as step:
                step.backward(loss_of(case.model, batch), samples=samples)

        found[name] = said(attempt)
    return found


def left_out() -> dict[str, Any]:
    """Samples that cannot be read, for example: a rank would count as if it had computed all of its own."""

    def collate(samples: list[dict[str, Any]]) -> Any:
        is_tried = samples[0]["number"] == samples[-1]["number"]
        return first_come_steps(samples if is_tried else samples[:-1])

    return {"said": said(lambda: next(iter(Case(collate=collate).loader)))}


def sorted_samples() -> dict[str, Any]:
    """A collate function with an order of its own: fine, but not with weights of samples."""

    def collate(samples: list[dict[str, Any]]) -> Any:
        return first_come_steps(sorted(samples, key=lambda sample: sample["number"] % 4))

    plain = Case(small, collate)
    found = trained(plain, lambda batch: plain.run.step(lambda part: loss_of(plain.model, part), batch))
    weighted = Case(collate=collate, weights=tokens_of(torch.arange(SAMPLES)))
    batch = next(iter(weighted.loader))
    with weighted.run.step() as step:
        found["weighted"] = said(partial(_divided, step, batch))
        found["samples"] = said(lambda: step.backward(torch.zeros(()), samples=1))
    return found


# --- layers that are frozen and thawed --------------------------------------------------------------------------


def half_frozen() -> Model:
    model = Model()
    model.first.requires_grad_(False)
    return model


def thaws(form: str, **options: Any) -> dict[str, Any]:
    """The first layer thaws, the last one freezes, and thaws again with a group of parameters of its own."""
    case = Case(half_frozen, **options)
    case.optimizer = torch.optim.SGD([one for one in case.model.parameters() if one.requires_grad], lr=0.05)
    step = 0
    for _ in range(3):
        for batch in case.loader:
            alone = case.before()
            run, model = case.run, case.model
            if form == "step":
                run.step(lambda part: loss_of(model, part), batch)  # noqa: B023
            elif form == "block":
                with run.step() as block:
                    block.backward(loss_of(model, batch))
            else:
                run.backward(loss_of(model, batch))
            case.after(alone, batch["rest"][1]["numbers"])
            case.optimizer.step()
            case.optimizer.zero_grad()
            step += 1
            if step == 3:
                case.bare.first.requires_grad_(True)
                case.optimizer.add_param_group({"params": list(model.parameters())[:2]})
            case.bare.last.requires_grad_(not 5 <= step < 8)
    weights = run._group.texts(str([whole(one).tolist() for one in case.bare.parameters()]))
    return {"error": max(case.errors), "is_alike": len(set(weights)) == 1}


def thaws_in_steps() -> dict[str, Any]:
    return thaws("step")


def thaws_in_blocks() -> dict[str, Any]:
    return thaws("block")


def thaws_with_backward() -> dict[str, Any]:
    return thaws("backward")


def thaws_sharded() -> dict[str, Any]:
    return thaws("step", parallel="fsdp")


def thaws_anew() -> dict[str, Any]:
    """A layer that begins anew, with other values on each rank, has those of the first one."""
    case = Case(half_frozen)
    next(iter(case.loader))
    case.bare.first.reset_parameters()
    case.bare.first.requires_grad_(True)
    case.run.backward(loss_of(case.model, next(iter(case.loader))))
    weights = case.run._group.texts(str([one.tolist() for one in case.bare.parameters()]))
    return {"is_alike": len(set(weights)) == 1}


def thaws_too_late() -> dict[str, Any]:
    case = Case(half_frozen)
    batch = next(iter(case.loader))
    case.bare.first.requires_grad_(True)
    return {"said": said(lambda: case.run.backward(loss_of(case.model, batch)))}


# --- local SGD --------------------------------------------------------------------------------------------------


def local() -> dict[str, Any]:
    """A rank's own steps, also if memory runs out; a layer thaws between two epochs, another one too late."""
    options: dict[str, Any] = {"sync": "local", "round_s": 0.05}
    run = ut.init(seed=1, **options)
    model = run.wrap(half_frozen())
    model.room = 4 if IS_SMALL else 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = run.loader(DATA, global_batch=BATCH, collate_fn=first_come_steps)
    worst = 0.0
    for epoch in run.epochs(4):
        for batch in loader:
            alone = Model()
            alone.load_state_dict(model.state_dict())
            for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                mine.requires_grad_(theirs.requires_grad)
            run.step(lambda part: loss_of(model, part), batch)
            loss_of(alone, batch).backward()
            worst = max(worst, difference(model, alone))
            optimizer.step()
            optimizer.zero_grad()
        run.gather(0.0)
        if epoch == 1:
            if run.rank:
                model.first.reset_parameters()
            model.first.requires_grad_(True)
    weights = run._group.texts(str([one.tolist() for one in model.parameters()]))
    found = {"error": worst, "is_alike": len(set(weights)) == 1, "failures": model.failures}
    model.first.requires_grad_(False)
    for batch in loader:
        model.last.requires_grad_(True)
        model.first.requires_grad_(True)
        found["too late"] = said(partial(run.step, partial(loss_of, model), batch))
        break
    run._balance.close()
    run._metrics.close()
    return found


# --- one rule for zero_grad -------------------------------------------------------------------------------------


def added_up(form: str) -> dict[str, Any]:
    """Without zero_grad, gradients of several batches add up, also if memory runs out in one of them."""
    case = Case(small if form == "step" else Model)
    run, model = case.run, case.model
    alone = case.before()
    numbers: list[list[int]] = []
    for batch in case.loader:
        numbers.append(case.numbers(batch["rest"][1]["numbers"]))
        if form == "step":
            run.step(lambda part: loss_of(model, part), batch)
        elif form == "block":
            with run.step() as block:
                block.backward(loss_of(model, batch))
        else:
            run.backward(loss_of(model, batch))
    for some in numbers:
        loss_of(alone, first_come_steps([DATA[number] for number in some])).backward()
    return {"error": difference(case.bare, alone), "failures": case.bare.failures}


def added_up_by_steps() -> dict[str, Any]:
    return added_up("step")


def added_up_by_blocks() -> dict[str, Any]:
    return added_up("block")


def added_up_by_backward() -> dict[str, Any]:
    return added_up("backward")


def forgotten() -> dict[str, Any]:
    """A script that forgets zero_grad hears of it, and one that sets gradients to zero does not."""
    found = {}
    for name in ("forgotten", "zeros", "none"):
        case = Case()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in case.loader:
                case.run.step(partial(loss_of, case.model), batch)
                case.optimizer.step()
                if name != "forgotten":
                    case.optimizer.zero_grad(set_to_none=name == "none")
        found[name] = [str(one.message) for one in caught if "zero_grad" in str(one.message)]
    return found


# --- run.backward and the loss of all ----------------------------------------------------------------------------


def backward() -> dict[str, Any]:
    """Without a block. The mean loss is that of one process, also in the short last batch."""
    case = Case()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses: list[float] = []

    def compute(batch: Any) -> None:
        loss = loss_of(case.model, batch)
        case.run.backward(loss, scaler=scaler)
        scaler.unscale_(case.optimizer)
        scaler.update()
        numbers = case.numbers(batch["rest"][1]["numbers"])
        expected = float(loss_of(case.before(), first_come_steps([DATA[number] for number in numbers])).detach())
        losses.append(abs(case.run.mean(loss.detach()) - expected))

    found = trained(case, compute)
    return {**found, "loss": max(losses), "steps": case.run.progress.step, "is_clean": _clean(case.run)}


def _clean(run: ut.Run) -> bool:
    latest = run._stepping._history.latest
    return latest is not None and latest.is_clean and latest.forward_done > latest.begun


def main() -> None:
    torch.set_num_threads(1)
    results = {name: globals()[name]() for name in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
