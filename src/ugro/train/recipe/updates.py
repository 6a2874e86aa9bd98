"""One update of the parameters: gradients of the whole batch, clipped, then optimizer and learning rate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

from ugro.train.recipe.precision import Precision
from ugro.train.recipe.talk import Progress, size_of
from ugro.train.run import Run

_LARGEST_NORM = 1.0


class Updates:
    def __init__(
        self,
        run: Run,
        model: Any,
        arguments: argparse.Namespace,
        precision: Precision,
        steps_per_epoch: int,
        lr: float,
    ) -> None:
        """``lr`` is the default of --lr."""
        import torch

        self._run, self._precision = run, precision
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self.steps = steps_of(arguments, steps_per_epoch)
        self.epochs = math.ceil(self.steps / steps_per_epoch)
        self._every = arguments.checkpoint_steps
        self.lr = arguments.lr or lr
        self.optimizer = torch.optim.AdamW(_groups(self._parameters, arguments.weight_decay), lr=self.lr)
        rule = rise_and_fall(self.steps, math.ceil(arguments.warmup * self.steps))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rule)
        self.scaler = precision.scaler()
        self._progress = Progress(run, self.steps)

    def kept(self) -> dict[str, Any]:
        """For run.keep."""
        found = {"optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
        return {name: one for name, one in found.items() if one is not None}

    def step(self, loss_of: Callable[[Any], Any], batch: Any) -> None:
        """``loss_of`` gives the mean loss of a part of the batch."""
        import torch

        loss = self._run.step(self._in_precision(loss_of), batch, scaler=self.scaler)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, _LARGEST_NORM)
        rate = self.schedule.get_last_lr()[0]
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self._run.log(loss=loss, lr=rate, grad_norm=norm)
        self._progress.step(loss.item, rate)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The rest of the epoch, or of --steps, with checkpoints on the way."""
        while_trained = iter(loader) if not self._is_over else iter(())
        for batch in while_trained:
            yield batch
            if self._is_over:
                return
            if self._every and self._run.progress.step % self._every == 0:
                self._run.checkpoint()

    @property
    def _is_over(self) -> bool:
        """A trial, which measures a few steps before a launch, ends by itself."""
        return self._run.surroundings.trial is None and self._run.progress.step >= self.steps

    def facts(self) -> dict[str, str]:
        """For the model card."""
        trained = sum(one.numel() for one in self._parameters)
        size_bytes = sum(one.numel() * one.element_size() for one in self._parameters)
        return {
            "steps": f"{self._run.progress.step:,}",
            "trained parameters": f"{trained:,}",
            "gradients exchanged in a step": size_of(size_bytes),
            "peak learning rate": f"{self.lr:.3g}",
            "precision": self._precision.name,
        }

    def _in_precision(self, loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def computed(part: Any) -> Any:
            with self._precision.autocast():
                return loss_of(part)

        return computed


def rise_and_fall(steps: int, rising: int) -> Callable[[int], float]:
    """The learning rate's factor: up in a line, then down along half a cosine."""

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising)))

    return factor


def steps_of(arguments: argparse.Namespace, steps_per_epoch: int) -> int:
    whole = int(arguments.epochs * steps_per_epoch)
    return min(whole, int(arguments.steps)) if arguments.steps else whole


def _groups(parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Biases and the scales of norms are not decayed."""
    matrices = [one for one in parameters if one.dim() > 1]
    others = [one for one in parameters if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
