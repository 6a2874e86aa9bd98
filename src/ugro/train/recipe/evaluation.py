"""Evaluation on all ranks: each sample once, faster ranks take more, and sums are added before anything is divided."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ugro.train.recipe.talk import say
from ugro.train.run import Run


def own_part(count: int, shares: Sequence[int], rank: int) -> range:
    """This rank's samples, in proportion to its share of a batch."""
    total, before = sum(shares), sum(shares[:rank])
    return range(count * before // total, count * (before + shares[rank]) // total)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """``model`` is the one inside run.wrap: ranks compute alone, without an exchange."""
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def own_batches(run: Run, dataset: Any, collate: Any) -> Any:
    """Batches of this rank's part, as large as its share of a training batch, for which there is memory."""
    from torch.utils.data import DataLoader, Subset

    part = own_part(len(dataset), run.plan, run.rank)
    return DataLoader(Subset(dataset, part), batch_size=max(1, run.plan[run.rank]), collate_fn=collate)


def summed(run: Run, numbers: Sequence[float]) -> list[float]:
    return [math.fsum(one) for one in zip(*run.gather(*numbers), strict=True)]


def report(run: Run, scores: Mapping[str, float]) -> None:
    """Logged as val/loss and so on."""
    if run.is_main:
        run.log(step=None, **{f"val/{name}": value for name, value in scores.items()})
    words = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
    say(run, f"epoch {run.progress.epoch + 1}  evaluation: {words}")


class Counts:
    """What a classification got right, by class."""

    def __init__(self, classes: int) -> None:
        import torch

        self.loss = 0.0
        self._right, self._said, self._true = torch.zeros(3, classes, dtype=torch.float64)

    def add(self, logits: Any, labels: Any) -> None:
        """Of one batch."""
        import torch

        logits, labels = logits.detach().float().cpu(), labels.cpu()
        self.loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        said = logits.argmax(-1)
        for counts, found in ((self._right, labels[said == labels]), (self._said, said), (self._true, labels)):
            counts += torch.bincount(found, minlength=len(counts)).to(counts.dtype)

    def scores(self, run: Run) -> dict[str, float]:
        """Over the samples of all ranks."""
        classes = len(self._true)
        own = [self.loss, *self._right.tolist(), *self._said.tolist(), *self._true.tolist()]
        loss, *rest = summed(run, own)
        right, said, true = rest[:classes], rest[classes : 2 * classes], rest[2 * classes :]
        samples = sum(true)
        return {"loss": loss / samples, "accuracy": sum(right) / samples, "f1": macro_f1(right, said, true)}


def macro_f1(right: Sequence[float], said: Sequence[float], true: Sequence[float]) -> float:
    """The mean over classes that occur, in the data or among the answers."""
    each = [2 * r / (s + t) for r, s, t in zip(right, said, true, strict=True) if s + t]
    return sum(each) / len(each) if each else 0.0


class Results:
    """The newest scores, which a checkpoint keeps: a training that resumes after its end still reports them."""

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = dict(state["scores"])
