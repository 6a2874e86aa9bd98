"""A rank's script: in several ways of training, is the gradient that of one process on the whole batch?

    python -m tests.rig.gradients SCENARIO…        (as one of several ranks)

The result: for each scenario, the largest error over all steps, and what else is worth knowing.
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
from tests.rig import pipelines, ranks, rounds

FEATURES = 6
BATCH = 21
# Nine whole batches and a last one of two, of which one of three ranks gets nothing.
SAMPLES = 9 * BATCH + 2


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=made)
        self.targets = torch.randn(SAMPLES, dtype=torch.float64, generator=made)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        return index, self.inputs[index], self.targets[index]


DATA = Samples()


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def normalised() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss_of(model: nn.Module, inputs: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(model(inputs).squeeze(-1), targets)


class Judge:
    """Compares with one process, which has all samples; at the end, since asking the others takes time."""

    def __init__(self, run: ut.Run, model: Any, make: Callable[[], nn.Module]) -> None:
        self.run, self.model, self.make = run, model, make
        self.reference: Any = None
        self.steps: list[tuple[Any, list[int], list[Any], list[Any]]] = []

    @property
    def module(self) -> Any:
        return getattr(self.model, "module", self.model)

    def before(self) -> None:
        self.reference = self.make()
        self.reference.load_state_dict({name: whole(one) for name, one in self.module.state_dict().items()})

    def after(self, indices: Any) -> None:
        own = [] if self.run._stepping.is_dummy else indices.tolist()
        found = [parameter.grad for parameter in self.module.parameters()]
        gradients = [None if one is None else whole(one).clone() for one in found]
        self.steps.append((self.reference, own, gradients, [buffer.clone() for buffer in _statistics(self.module)]))

    def verdict(self, loss: Callable[..., Any] = loss_of, epochs: int = 1, **more: Any) -> dict[str, Any]:
        everybody = [json.loads(text) for text in self.run._group.texts(json.dumps([step[1] for step in self.steps]))]
        batches = [[index for part in parts for index in part] for parts in zip(*everybody, strict=True)]
        errors = [_error(*step, batch, loss) for step, batch in zip(self.steps, batches, strict=True)]
        return {
            "error": max(errors),
            "shares": [[len(part) for part in parts] for parts in zip(*everybody, strict=True)],
            "seen_once": sorted(index for batch in batches for index in batch) == sorted(list(range(SAMPLES)) * epochs),
            **more,
        }


def whole(one: Any) -> Any:
    """Of a tensor that is spread over the ranks, all of it."""
    return one.full_tensor() if hasattr(one, "full_tensor") else one


def _error(
    model: Any, own: list[int], gradients: list[Any], statistics: list[Any], batch: list[int], loss: Callable[..., Any]
) -> float:
    loss(model, DATA.inputs[batch], DATA.targets[batch]).backward()
    pairs = list(zip(gradients, [parameter.grad for parameter in model.parameters()], strict=True))
    pairs += zip(statistics, _statistics(model), strict=True)
    if any((mine is None) is not (theirs is None) for mine, theirs in pairs):
        return 1e9  # an optimizer moves what has a gradient of zero, and leaves alone what has none
    pairs = [pair for pair in pairs if pair[0] is not None]
    scale = max(float(theirs.abs().max()) for _, theirs in pairs)  # some gradients are zero but for rounding
    # NaN is an error, whichever way it is compared.
    return max(float((mine - theirs).abs().max()) / scale if mine.isfinite().all() else 1e9 for mine, theirs in pairs)


def _statistics(model: Any) -> list[Any]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith(("mean", "var"))]


def begin(make: Callable[[], nn.Module] = mlp, **options: Any) -> tuple[ut.Run, Any, Any, Any, Judge]:
    run = ut.init(seed=1, balance=options.pop("balance", None), speeds=options.pop("speeds", ()))
    workers, weights = options.pop("num_workers", 0), options.pop("weights", None)
    model = run.wrap(make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = run.loader(DATA, global_batch=BATCH, num_workers=workers, weights=weights)
    return run, model, optimizer, loader, Judge(run, model, make)


def work(run: ut.Run, inputs: Any) -> None:
    """Ranks of different speeds."""
    time.sleep(0.003 * (run.rank + 1) * len(inputs))


# --- scenarios --------------------------------------------------------------------------------------------------


def adaptive(**options: Any) -> dict[str, Any]:
    run, model, optimizer, loader, judge = begin(**options)
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            work(run, inputs)
            loss = step.loss(loss_of(model, inputs, targets))
            step.backward(loss)
            judge.after(indices)
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict()


def adaptive_with_workers() -> dict[str, Any]:
    return adaptive(num_workers=2)


def static() -> dict[str, Any]:
    return adaptive(balance="static", speeds=(1, 0.5, 0.25))


def fully_sharded() -> dict[str, Any]:
    """The others of this kind are in ``spread``."""
    return adaptive(parallel="fsdp", balance="static", speeds=(1, 0.5, 0.25))


def pipeline() -> dict[str, Any]:
    """Tied weights, a short last batch, and a checkpoint that one process can load."""
    return pipelines.tied()


def local_rounds() -> dict[str, Any]:
    """Ranks of unequal speed take their own steps, and average their models."""
    arguments = rounds.parse(["--sgd", "--lr", "0.05", "--pause", "0.0001", "--round", "0.2"])
    output = Path(os.environ["UGRO_OUTPUT"]) / "local_rounds"
    run = rounds.begun(arguments, output)
    seen = Path(os.environ["RESULT"]).with_suffix(".seen")
    found = rounds.trained(run, arguments, seen)
    steps = [json.loads(text) for text in run.texts(json.dumps(found.pop("steps")))]
    expected = rounds.alone(steps)
    epochs = zip(found["weights"], expected, strict=True)
    pairs = [pair for mine, theirs in epochs for pair in zip(mine, theirs, strict=True)]
    used = sorted((epoch, index) for rank in steps for epoch, _, some in rank for index in some)
    run._balance.close()
    run._metrics.close()
    return {
        "error": max(abs(mine - theirs) / max(1e-3, abs(theirs)) for mine, theirs in pairs),
        "seen_once": used == [(epoch, index) for epoch in range(arguments.epochs) for index in range(rounds.SAMPLES)],
        "step": found["step"],
        "lr_scale": run.lr_scale,
        "profiles": ranks.metrics(output / "metrics.jsonl", "profile") if run.is_main else [],
        "progress": ranks.metrics(output / "metrics.jsonl", "progress") if run.is_main else [],
    }


def micro_batches() -> dict[str, Any]:
    run, model, optimizer, loader, judge = begin(balance="static", speeds=(1, 0.5, 0.25))
    for batch in loader:
        judge.before()
        with run.step() as step:
            for _, inputs, targets in step.micro_batches(batch, count=run.rank + 1):
                step.backward(step.loss(loss_of(model, inputs, targets)))
            judge.after(batch[0])
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict()


def own_no_sync() -> dict[str, Any]:
    run, model, optimizer, loader, judge = begin(balance="static", speeds=(1, 0.5, 0.25))
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            first = min(run.rank, len(inputs) - 1)  # nothing, one or two samples apart
            if first:
                with model.no_sync():
                    step.backward(loss_of(model, inputs[:first], targets[:first]), samples=first)
            step.backward(loss_of(model, inputs[first:], targets[first:]), samples=len(inputs) - first)
            judge.after(indices)
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict()


def half_precision() -> dict[str, Any]:
    run, model, optimizer, loader, judge = begin(lambda: mlp().float(), balance="static", speeds=(1, 0.5, 0.25))

    def loss(model: Any, inputs: Any, targets: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs.float()).squeeze(-1)
        return nn.functional.mse_loss(outputs.float(), targets.float())

    scaler = torch.amp.GradScaler("cpu")
    norms = []
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            step.backward(step.loss(loss(model, inputs, targets)), scaler=scaler)
            scaler.unscale_(optimizer)
            judge.after(indices)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return judge.verdict(loss, norms=norms)


def synchronised_batch_norm() -> dict[str, Any]:
    run, model, optimizer, loader, judge = begin(
        normalised, sync_batchnorm=True, balance="static", speeds=(1, 0.5, 0.25)
    )
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            step.backward(step.loss(loss_of(model, inputs, targets)))
            judge.after(indices)
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict()


def synchronised_batch_norm_of_gpus() -> dict[str, Any]:
    """torch's own layer, with kernels of the tests; ranks have unequal shares, and one has none of the last batch."""
    from tests.rig.cuda_kernels import PretendedGpu
    from ugro.train.parallel import way as batchnorm

    run, model, optimizer, loader, judge = begin(normalised, balance="static", speeds=(1, 0.5, 0.25))
    batchnorm.synchronised(model, run._stepping.company, is_on_gpu=True)
    for indices, inputs, targets in loader:
        judge.before()
        with run.step() as step:
            with PretendedGpu():
                step.backward(step.loss(loss_of(model, inputs, targets)))
            judge.after(indices)
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict(layers=[type(one).__name__ for one in judge.module])


def weights_of(inputs: Any) -> Any:
    """How much samples count, as if they had from one to about ten words."""
    return 1 + (inputs[:, 0].abs() * 4).floor()


def weighted_loss(model: nn.Module, inputs: Any, targets: Any) -> Any:
    weights = weights_of(inputs)
    return ((model(inputs).squeeze(-1) - targets).square() * weights).sum() / weights.sum()


def weighted() -> dict[str, Any]:
    """Every third step each in another way: at once, in micro-batches, in parts that the script makes."""
    weights = weights_of(DATA.inputs)
    run, model, optimizer, loader, judge = begin(balance="static", speeds=(1, 0.5, 0.25), weights=weights)
    for number, batch in enumerate(loader):
        judge.before()
        with run.step() as step:
            if number % 3 == 2:
                _, inputs, targets = batch
                first = min(2, len(inputs) - 1)
                if first:
                    with model.no_sync():
                        step.backward(weighted_loss(model, inputs[:first], targets[:first]), samples=first)
                rest = weighted_loss(model, inputs[first:], targets[first:])
                step.backward(rest, samples=len(inputs) - first)
            else:
                for _, inputs, targets in step.micro_batches(batch, count=1 + number % 3 * 2):
                    step.backward(step.loss(weighted_loss(model, inputs, targets)))
            judge.after(batch[0])
            optimizer.step()
            optimizer.zero_grad()
    return judge.verdict(weighted_loss)


def weighted_out_of_memory() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    weights = weights_of(DATA.inputs)
    run, model, optimizer, loader, judge = begin(
        lambda: Small(2 if rank == 1 else 1000, is_in_backward=True), weights=weights
    )
    for batch in loader:
        judge.before()
        judge.reference.room = SAMPLES
        run.step(lambda part: weighted_loss(model, part[1], part[2]), batch)
        judge.after(batch[0])
        optimizer.step()
        optimizer.zero_grad()
    return judge.verdict(weighted_loss, failures=model.module.failures)


class Explosive(torch.autograd.Function):  # type: ignore[misc]
    """Runs out of memory on the way back."""

    @staticmethod
    def forward(context: Any, values: Any, is_lit: bool) -> Any:
        context.is_lit = is_lit
        return values.clone()

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        if context.is_lit:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return gradients, None


class Small(nn.Module):  # type: ignore[misc]
    """A model on a device that holds only so many samples; the middle layer is where it goes wrong."""

    def __init__(self, room: int, is_in_backward: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(FEATURES, 32).double(), nn.Linear(32, 1).double()
        self.room, self.is_in_backward = room, is_in_backward
        self.failures = 0

    def forward(self, inputs: Any) -> Any:
        is_lit = len(inputs) > self.room
        self.failures += is_lit
        if is_lit and not self.is_in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return self.last(Explosive.apply(torch.tanh(self.first(inputs)), is_lit))


def out_of_memory(is_in_backward: bool = False, room: int = 4) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    run, model, optimizer, loader, judge = begin(lambda: Small(room if rank == 1 else 1000, is_in_backward))
    for batch in loader:
        judge.before()
        judge.reference.room = SAMPLES
        run.step(lambda part: loss_of(model, part[1], part[2]), batch)
        judge.after(batch[0])
        optimizer.step()
        optimizer.zero_grad()
    plan = run.plan
    balancer = run._balance.balancer
    assert balancer is not None
    return judge.verdict(failures=model.module.failures, plan=plan, caps=balancer.caps)


def out_of_memory_in_backward() -> dict[str, Any]:
    return out_of_memory(is_in_backward=True)


class Fuse(torch.autograd.Function):  # type: ignore[misc]
    """Runs out of memory on the way back, once."""

    @staticmethod
    def forward(context: Any, values: Any, model: Branches, place: str) -> Any:
        context.model, context.place = model, place
        return values.clone()

    @staticmethod
    def backward(context: Any, gradients: Any) -> Any:
        context.model.reach(context.place)
        return gradients, None, None


class Branches(nn.Module):  # type: ignore[misc]
    """One branch is for some samples only, one for none. Memory runs out once where ``lit`` says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(FEATURES, 32).double(), nn.Linear(32, 1).double()
        self.some, self.never = nn.Linear(32, 32).double(), nn.Linear(32, 32).double()
        self.lit = ""
        self.failures = 0
        self.first.bias.register_hook(lambda gradient: self.reach("first layer"))

    def reach(self, place: str) -> None:
        if self.lit == place:
            self.lit = ""
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    def forward(self, inputs: Any) -> Any:
        hidden = Fuse.apply(torch.tanh(self.first(inputs)), self, "middle")
        self.reach("forward")
        if self.is_used(inputs):
            hidden = hidden + torch.tanh(self.some(hidden)) * (inputs[:, :1] > 0)
        return Fuse.apply(self.last(hidden), self, "last layer")

    def is_used(self, inputs: Any) -> bool:
        return bool((inputs[:, 0] > 0).any())


class Fixed(Branches):
    """The same layers in every step, as a static graph wants it."""

    def is_used(self, inputs: Any) -> bool:
        return True


PLACES = ("before", "forward", "last layer", "middle", "first layer", "bucket 0", "bucket 1")


def out_of_memory_with_unused_layers(make: type[Branches] = Branches, **options: Any) -> dict[str, Any]:
    """Each rank in turn runs out of memory at each place, also in the first steps, in which DDP arranges itself."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    module = make()

    def hook(state: Any, bucket: Any) -> Any:
        module.reach(f"bucket {bucket.index()}")  # as one does that needs memory of its own
        return allreduce_hook(state, bucket)

    run, model, optimizer, loader, judge = begin(
        lambda: module, bucket_cap_mb=0.001, comm_hook=hook, **(options or {"find_unused_parameters": True})
    )
    judge.make = make
    failures = 0
    for epoch in range(2):
        for number, batch in enumerate(loader):
            count = epoch * 10 + number
            judge.before()
            if run.rank == count % run.ranks and len(batch[0]) > 1:
                module.lit = PLACES[(count // run.ranks + number) % len(PLACES)]

            def loss(part: Any) -> Any:
                module.reach("before")
                return loss_of(model, part[1], part[2])

            run.step(loss, batch)
            judge.after(batch[0])
            optimizer.step()
            optimizer.zero_grad()
            failures, module.lit = module.failures, ""
            run._stepping.cap = None  # else there would be no room for one sample after so many failures
        run.progress.epoch, run.progress.cursor = epoch + 1, 0
    return judge.verdict(epochs=2, failures=failures)


def out_of_memory_with_static_graph() -> dict[str, Any]:
    return out_of_memory_with_unused_layers(Fixed, static_graph=True)


def out_of_memory_in_many_buckets() -> dict[str, Any]:
    return out_of_memory_with_unused_layers(Whole, find_unused_parameters=False)


class Whole(Fixed):
    def __init__(self) -> None:
        super().__init__()
        del self.never


def out_of_memory_everywhere() -> dict[str, Any]:
    """No device can hold its share, nor all together the batch."""
    run, model, optimizer, loader, judge = begin(lambda: Small(3, is_in_backward=True))
    for batch in loader:
        judge.before()
        judge.reference.room = SAMPLES
        run.step(lambda part: loss_of(model, part[1], part[2]), batch)
        judge.after(batch[0])
        optimizer.step()
        optimizer.zero_grad()
    return judge.verdict(failures=model.module.failures, plan=run.plan)


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for name in sys.argv[1:]:
        begun = time.perf_counter()
        results[name] = {**globals()[name](), "seconds": time.perf_counter() - begun}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
