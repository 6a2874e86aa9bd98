"""A rank's script: loaders and samplers of its own, given to run.loader. Is every sample used as they would use it?

python -m tests.rig.own_loaders SCENARIO…        (as one of several ranks, or alone)
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import ugro.train as ut
from tests.rig.batches import BATCH, DATA, SAMPLES, SPEEDS, first_come_steps, said


def own_loaders() -> dict[str, Any]:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

    options = {"collate_fn": first_come_steps, "num_workers": 1, "generator": torch.Generator().manual_seed(4)}
    drawn = WeightedRandomSampler([1.0 + number for number in range(SAMPLES)], 2 * BATCH + 4)
    found = {}
    for name, given, more in (
        ("in a row", DataLoader(DATA, batch_size=BATCH, collate_fn=first_come_steps), {}),
        ("shuffled", DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True, **options), {"global_batch": BATCH}),
        ("drawn", DataLoader(DATA, batch_size=BATCH, sampler=drawn, collate_fn=first_come_steps), {}),
        ("batches", DataLoader(DATA, batch_sampler=BatchSampler(drawn, BATCH, False), collate_fn=first_come_steps), {}),
        ("a sampler", DATA, {"sampler": drawn, "global_batch": BATCH, "collate_fn": first_come_steps}),
        ("random", DataLoader(DATA, batch_size=BATCH, sampler=RandomSampler(DATA), collate_fn=first_come_steps), {}),
        ("sequential", DATA, {"sampler": SequentialSampler(DATA), "global_batch": BATCH, "shuffle": False}),
    ):
        found[name] = _epochs(given, more)
    return found


def _epochs(given: Any, more: dict[str, Any]) -> list[list[list[int]]]:
    """The samples of all ranks in each batch of two epochs; once more, resumed in the middle of the second one."""
    run = ut.init(seed=1, balance="static", speeds=SPEEDS)
    loader = run.loader(given, **more)
    epochs = []
    for _ in range(2):
        batches = [_numbers(run, batch) for batch in loader]
        assert len(batches) == len(loader)
        epochs.append(batches)
    run = ut.init(seed=1, balance="static", speeds=SPEEDS)
    run.progress.epoch, run.progress.cursor = 1, BATCH
    rest = [_numbers(run, batch) for batch in run.loader(given, **more)]
    assert rest == epochs[1][1:], (rest, epochs[1])
    return epochs


def _numbers(run: ut.Run, batch: Any) -> list[int]:
    own = batch["rest"][1]["numbers"].tolist() if "rest" in batch else batch["number"].tolist()
    texts = run._group.texts(json.dumps([] if run._stepping.is_dummy else own))
    return [number for text in texts for number in json.loads(text)]


def foreign_loaders() -> dict[str, Any]:
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            yield from range(4)

    class Fickle:
        """Draws with numbers that nobody knows of."""

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Any:
            return iter(sorted(range(SAMPLES), key=lambda _: os.urandom(4)))

    batches = BatchSampler(SequentialSampler(DATA), 3, False)

    class Own(BatchSampler):  # type: ignore[misc]
        pass

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "a stream": (Stream(), {"global_batch": 4}),
        "a loader of a stream": (DataLoader(Stream(), batch_size=4), {}),
        "a generator": (iter(range(3)), {"global_batch": 4}),
        "no batches": (DataLoader(DATA, batch_size=None), {}),
        "own batches": (DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 3, False)), {}),
        "no size": (DATA, {}),
        "batch_size": (DATA, {"batch_size": 4}),
        "batch_sampler": (DATA, {"batch_sampler": batches, "global_batch": 4}),
        "twice": (DataLoader(DATA, batch_size=4), {"num_workers": 2}),
        "two orders": (DATA, {"sampler": SequentialSampler(DATA), "shuffle": True, "global_batch": 4}),
        "fickle": (DATA, {"sampler": Fickle(), "global_batch": 4}),
        "nothing": (DATA, {"global_batch": 0}),
    }
    return {name: said(partial(ut.init().loader, given, **more)) for name, (given, more) in cases.items()}


def stateful_loader() -> Any:
    """None: torchdata is not installed."""
    try:
        torchdata = import_module("torchdata.stateful_dataloader")
    except ImportError:
        return None
    return _epochs(torchdata.StatefulDataLoader(DATA, batch_size=BATCH, collate_fn=first_come_steps, num_workers=1), {})


def main() -> None:
    torch.set_num_threads(1)
    results = {name: globals()[name]() for name in sys.argv[1:]}
    Path(os.environ["RESULT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
