"""A rank's script: in several ways, does a pipeline train as one process does?

    python -m tests.rig.pipelines SCENARIO…        (as one of several ranks)

The result: for each scenario, the largest difference of losses and weights, and what else is worth knowing.
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
from ugro.kernel.support.errors import UgroError

TOKENS, LENGTH, WIDTH, BATCH = 11, 5, 8, 24
SAMPLES = 3 * BATCH + 7  # the last batch is short, and cannot be cut evenly


class Tied(nn.Module):  # type: ignore[misc]
    """As language models are: what is before and after the layers shares its weights."""

    def __init__(self, layers: int = 7) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.head.weight = self.tokens.weight

    def embed(self, numbers: Any) -> Any:
        return self.tokens(numbers) + self.places

    def logits(self, x: Any) -> Any:
        return self.head(self.norm(x)) * self.scale

    def forward(self, numbers: Any) -> Any:
        x = self.embed(numbers)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


class StepsFirst(Tied):
    """Steps × samples, of another length in each batch."""

    def embed(self, numbers: Any) -> Any:
        return self.tokens(numbers) + self.places[: len(numbers), None]


SLOW_S = [0.0]  # for each layer, on this rank


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        if SLOW_S[0]:
            time.sleep(SLOW_S[0])
        return x + self.mixing(x)


def data() -> Any:
    made = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=made)
    return torch.utils.data.TensorDataset(numbers, (numbers * 3 + 1) % TOKENS)


def loss_of(model: Any, numbers: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(model(numbers).flatten(0, 1), targets.flatten())


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().double()


def compared(
    make: Callable[[], nn.Module], epochs: int = 2, before_epoch: Any = None, before_step: Any = None,
    loading: Any = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains the pipeline, and beside it one process that has the whole model."""
    run = ut.init(seed=1)
    model, alone = run.wrap(made(make), parallel="pipeline", **options), made(make)
    optimizer, beside = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, alone))
    run.keep(model=model, optimizer=optimizer)
    loader = run.loader(**{"dataset": data(), **(loading or {})}, global_batch=BATCH)
    errors, norms, samples, cuts = [], [], 0, []
    for epoch in run.epochs(epochs):
        if before_epoch is not None:
            before_epoch(run, epoch)
        for numbers, targets in loader:
            samples += numbers.shape[0 if loading is None else 1]
            if before_step is not None:
                before_step(run.progress.step, [model.module, alone], optimizer, beside)
            loss = run.step(lambda part: loss_of(model, *part), (numbers, targets))
            norm = model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            beside.zero_grad()
            expected = loss_of(alone, numbers, targets)
            expected.backward()
            norms.append(abs(float(norm) - float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))))
            beside.step()
            errors.append(abs(float(loss) - float(expected)))
            cuts.append([stage.layers for stage in model_pipe(run).partition.stages])
    path = run.checkpoint()
    with torch.no_grad():
        outputs = float((model(data()[:4][0]) - alone(data()[:4][0])).abs().max())
    own = model.state_dict()
    differences = [float((one - own[name]).abs().max()) for name, one in alone.state_dict().items() if name in own]
    found = {"loss": max(errors), "norm": max(norms), "weights": max(differences), "outputs": outputs}
    if path is not None:
        found["checkpoint"] = _checkpoint_error(path, alone, beside)
    run._metrics.close()
    return {"error": max(found.values()), **found, "own": len(own), "samples": samples, "cuts": cuts}


def model_pipe(run: ut.Run) -> Any:
    way: Any = run._stepping.way
    return way._steps.pipe


def _checkpoint_error(path: Path, alone: nn.Module, optimizer: Any) -> float:
    """One process can load it, and has then what the one beside has."""
    objects = torch.load(path, weights_only=True)["objects"]
    error = max(float((objects["model"][name] - one).abs().max()) for name, one in alone.state_dict().items())
    expected, found = optimizer.state_dict(), objects["optimizer"]
    if found["param_groups"] != expected["param_groups"] or sorted(found["state"]) != sorted(expected["state"]):
        return 1e9
    pairs = [(one[key], found["state"][at][key]) for at, one in expected["state"].items() for key in one]
    return max(error, *(float((one - other).abs().max()) for one, other in pairs))


# --- scenarios --------------------------------------------------------------------------------------------------


def tied() -> dict[str, Any]:
    return compared(Tied, layers="blocks", before="embed", after="logits")


def sequential() -> dict[str, Any]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Sequential(Block(), Block(), Block()), Head())

    return compared(make, layers="1", micro_batches=5)


class Head(nn.Linear):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(WIDTH, TOKENS)


def interleaved() -> dict[str, Any]:
    return compared(Tied, layers="blocks", before="embed", after="logits", stages_per_rank=2)


def moved() -> dict[str, Any]:
    """One device becomes slow after the first epoch: in the third one, it has fewer layers."""

    def slow_down(run: ut.Run, epoch: int) -> None:
        SLOW_S[0] = 0.012 if epoch and run.rank == 0 else 0.002

    try:
        options = {"layers": "blocks", "before": "embed", "after": "logits", "micro_batches": 6}
        found = compared(lambda: Tied(10), epochs=3, before_epoch=slow_down, **options)
    finally:
        SLOW_S[0] = 0.0
    return {**found, "records": _records()}


def _records() -> list[dict[str, Any]]:
    """What the first rank wrote about pipelines in this run."""
    path = Path(os.environ["UGRO_OUTPUT"], "metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(at for at, record in enumerate(records) if record["kind"] == "run")
    return [record for record in records[last:] if record["kind"] in ("pipeline", "profile")]


def steps_first() -> dict[str, Any]:
    """Sequences of unequal length, and a loss that is the mean over their tokens."""
    numbers, targets = data().tensors
    lengths = [1 + at % LENGTH for at in range(SAMPLES)]

    def collate(samples: list[Any]) -> Any:
        own, wanted = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(own), nn.utils.rnn.pad_sequence(wanted, padding_value=-100)

    rows = [(numbers[at][:length], targets[at][:length]) for at, length in enumerate(lengths)]
    rows[BATCH:] = [(one[:3], other[:3]) for one, other in rows[BATCH:]]
    loading = {"dataset": rows, "collate_fn": collate, "weights": [len(one) for one, _ in rows], "shuffle": False}
    return compared(StepsFirst, loading=loading, layers="blocks", before="embed", after="logits")


def thawing() -> dict[str, Any]:
    """All but a norm is frozen at first; the weights that are tied thaw, too; others freeze later."""

    def make() -> nn.Module:
        model = Tied()
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
        return model

    def before_step(step: int, models: list[Any], *optimizers: Any) -> None:
        for model in models:
            if step == 3:
                model.requires_grad_(True)
            if step == 6:
                model.blocks[0].requires_grad_(False)
                model.blocks[-1].requires_grad_(False)

    return compared(make, epochs=2, before_step=before_step, layers="blocks", before="embed", after="logits")


def hugging_face() -> dict[str, Any]:
    """A real GPT-2 with its tied embeddings, whose layers return what they like and take masks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, use_cache=False, attn_implementation="eager",
    )  # fmt: skip

    class Logits(GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, numbers: Any) -> Any:
            return super().forward(numbers).logits

    def before(model: Any, numbers: Any) -> Any:
        return model.transformer.wte(numbers) + model.transformer.wpe(torch.arange(numbers.shape[1]))

    def call(layer: Any, x: Any) -> Any:
        mask = torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)[None, None]
        found = layer(x, attention_mask=mask)
        return found if isinstance(found, torch.Tensor) else found[0]

    def after(model: Any, x: Any) -> Any:
        return model.lm_head(model.transformer.ln_f(x))

    return compared(lambda: Logits(config), layers="transformer.h", before=before, after=after, call=call)


def attempted(make: Callable[[], nn.Module], loss: Any = loss_of, *, keeps: bool = True, **options: Any) -> str:
    """What a mistake says."""
    is_block = options.pop("is_block", False)
    try:
        run = ut.init(seed=1)
        model = run.wrap(made(make), parallel="pipeline", **options)
        if keeps:
            run.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if is_block:
            run.step()
        run.step(lambda part: loss(model, *part), next(iter(run.loader(data(), global_batch=BATCH))))
    except UgroError as error:
        return f"{error} ({error.hint})"
    return "nothing"


def nonsense() -> dict[str, Any]:
    cut: dict[str, Any] = {"layers": "blocks", "before": "embed", "after": "logits"}
    return {
        "no layers": attempted(Tied),
        "unknown layers": attempted(Tied, layers="layers"),
        "layers of another model": attempted(Tied, layers=Tied().blocks),
        "unknown before": attempted(Tied, layers="blocks", before="embedding"),
        "layers too deep": attempted(lambda: nn.Sequential(Tied()), layers="0.blocks"),
        "incomplete": attempted(Tied, **{**cut, "after": lambda model, x: model.head(x)}),
        "unknown option": attempted(Tied, **cut, depth=3),
        "no micro-batches": attempted(Tied, **cut, micro_batches=0),
        "a block": attempted(Tied, **cut, is_block=True),
        "no optimizer": attempted(Tied, keeps=False, **cut),
        "too few layers": attempted(lambda: Tied(1), **cut, stages_per_rank=2),
        "no call": attempted(Tied, lambda model, *_: torch.zeros(()), **cut),
        "no tensors": attempted(Tied, lambda model, *_: model(3), **cut),
        "by name": attempted(Tied, lambda model, numbers, targets: model(numbers=numbers), **cut),
        "a dict": attempted(Tied, **{**cut, "call": lambda layer, x: {"x": x}}),
    }


def main() -> None:
    torch.set_num_threads(1)
    known = (tied, sequential, interleaved, moved, steps_first, thawing, hugging_face, nonsense)
    results = {one.__name__: one() for one in known if one.__name__ in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
