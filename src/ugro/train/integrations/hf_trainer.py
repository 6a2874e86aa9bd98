"""Hugging Face Trainer on unequal ranks: shares of a constant global batch, in portions that fit every device.

The global batch is that of the script's own TrainingArguments: per_device_train_batch_size × ranks ×
gradient_accumulation_steps. A rank computes at most per_device_train_batch_size samples at once, a faster rank more
often. Evaluation is the Trainer's own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint as places
from ugro.train.integrations.balanced import Balanced
from ugro.train.integrations.huggingface import UgroCallback
from ugro.train.integrations.journal import Supported
from ugro.train.loader import Feed, Portion, cut, order_of
from ugro.train.samples import slices
from ugro.train.surroundings import Surroundings

Supported("transformers", (5, 20), (6,)).check()
Supported("accelerate", (1, 1), (2,)).check()

import torch  # noqa: E402
from transformers import Trainer  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

_TRAINER_STATE = "trainer_state.json"
# Their compute_loss keeps to the Trainer's rules about num_items_in_batch.
_KNOWN = ("transformers", "trl", "ugro")
_IGNORED = -100  # a label that does not count


class Slot(list[tuple[Portion, Any]]):
    """What stands for one of the Trainer's own batches: any number of portions, with those of the last slot synced."""

    is_last = False


class UgroTrainerMixin:
    """Put it before another Trainer: ``class Mine(UgroTrainerMixin, Seq2SeqTrainer): pass``."""

    ugro_at_once: int | None = None  # samples that a device computes at once; None: per_device_train_batch_size

    # What the Trainer has; declared for readers and type checkers.
    args: Any
    accelerator: Any
    model: Any
    state: Any
    control: Any

    _ugro: Balanced | None = None
    _ugro_feed: Feed
    _ugro_epoch: Any = None
    _ugro_portions: Iterator[tuple[Portion, Any]]
    _ugro_portion: Portion | None = None
    _ugro_factor = 0.0  # of the loss that is being computed
    _ugro_loss: Any = None  # the weighted losses of this slot
    _ugro_weights: dict[int, float]
    _ugro_resumed: Path | None = None

    # --- the training -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.args.n_gpu > 1:
            raise UsageError("one process has several GPUs", hint="launch one rank per GPU: ugro launch, or torchrun")
        if self.args.world_size != (ranks := Surroundings.of(os.environ).ranks):
            raise UsageError(
                f"the Trainer knows {self.args.world_size} of {ranks} ranks",
                hint="without GPUs it needs TrainingArguments(use_cpu=True)",
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # type: ignore[attr-defined]
            raise UsageError("UgroTrainer shares batches in DDP only", hint="use the Trainer with DeepSpeed or FSDP")
        if self.args.auto_find_batch_size and ranks > 1:
            raise UsageError("auto_find_batch_size works on one rank only", hint="choose per_device_train_batch_size")
        # Ranks have different numbers of tokens: a mean of their means would be another training.
        self.args.average_tokens_across_devices = True
        self._ugro_plain_backward = self.accelerator.backward
        self.accelerator.backward = self._ugro_backward

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **more: Any) -> Any:
        """Resumes from UGRO's checkpoint if there is one, whatever the script asks for: it is the newer one."""
        _expect_declared(self)
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._ugro = Balanced(seed)
        self._ugro_resumed = self._ugro_checkpoint(resume_from_checkpoint)
        if self._ugro_resumed is not None:
            resume_from_checkpoint = str(self._ugro_resumed)
            if (state := places.read_state(self._ugro_resumed)) is not None:
                self._ugro.restore(state, self._ugro_resumed)
        callback = UgroCallback(self._ugro)
        self.add_callback(callback)  # type: ignore[attr-defined]
        try:
            return super().train(resume_from_checkpoint, *others, **more)  # type: ignore[misc]
        finally:
            self.remove_callback(callback)  # type: ignore[attr-defined]

    def _ugro_checkpoint(self, asked: str | bool | None) -> Path | None:
        found = places.resumable(_TRAINER_STATE)
        if found is not None:
            return found.parent
        if asked is not True:
            return Path(asked) if asked else None
        newest = get_last_checkpoint(self.args.output_dir)
        if newest is None:
            raise UsageError(f"there is no checkpoint in {self.args.output_dir}", hint="train without one first")
        return Path(newest)

    def _prepare_for_training(self, *others: Any, **more: Any) -> Any:
        prepared = super()._prepare_for_training(*others, **more)  # type: ignore[misc]
        assert self._ugro is not None
        self._ugro.attach(prepared[0])
        self._ugro.announce(int(self.state.max_steps))
        return prepared

    # --- data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """As long as the Trainer expects; what it loads comes from ``get_batch_samples``."""
        source = super().get_train_dataloader()  # type: ignore[misc]
        balanced, args = self._ugro, self.args
        if balanced is None:
            return source
        self.accelerator._dataloaders = [one for one in self.accelerator._dataloaders if one is not source]
        _expect_samples(source.dataset, args)
        wanted = self.get_total_train_batch_size(args)  # type: ignore[attr-defined]
        sampler = self._get_train_sampler(source.dataset)  # type: ignore[attr-defined]
        order = order_of(
            sampler, balanced.global_batch(wanted), drops_last=args.dataloader_drop_last, agree=balanced.agree
        )
        balanced.note_norms(self.model)
        at_once = self.ugro_at_once or self._train_batch_size  # type: ignore[attr-defined]
        self._ugro_go_on(order.steps, order.global_batch)
        schedule = balanced.share(order, source)

        def portions() -> Iterator[Portion]:
            for slice_ in slices(order, schedule, balanced.progress, balanced.rank):
                yield from cut(slice_, at_once)

        self._ugro_feed = Feed(source, portions, lambda: order.steps)
        return _stand_in(order.samples, order.steps * args.gradient_accumulation_steps)

    def _ugro_go_on(self, steps: int, global_batch: int) -> None:
        """The Trainer's own count decides, since it is what the learning rate follows."""
        assert self._ugro is not None
        done = 0
        if self._ugro_resumed is not None and (self._ugro_resumed / _TRAINER_STATE).exists():
            done = int(json.loads((self._ugro_resumed / _TRAINER_STATE).read_text())["global_step"])
        progress = self._ugro.progress
        progress.step, progress.epoch = done, done // steps
        progress.cursor = 0 if self.args.ignore_data_skip else done % steps * global_batch

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        balanced = self._ugro
        if balanced is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc,no-any-return]
        if epoch_iterator is not self._ugro_epoch:
            self._ugro_epoch = epoch_iterator
            self._ugro_portions = self._ugro_feed.epoch(balanced.begin_epoch())
        balanced.fetching()
        update = _next_update(self._ugro_portions)
        if not update:
            return [], None
        balanced.fetched(update[-1][0])
        with balanced.pause():
            num_items = self._ugro_weigh(update, num_batches, device)
        return _slots(update, num_batches), num_items

    def _ugro_weigh(self, update: list[tuple[Portion, Any]], num_batches: int, device: Any) -> Any:
        """Notes by what each portion's loss is multiplied. Returns what the Trainer passes to the loss."""
        assert self._ugro is not None
        real = [batch for portion, batch in update if portion.own]
        counted = real or [_without_labels(update[0][1])]
        num_items = self._get_num_items_in_batch(counted, device)  # type: ignore[attr-defined]
        if num_items is not None and self._ugro_is_scaled(num_items):
            # The loss is a sum over labels, divided by the labels of all ranks.
            self._ugro_weights = {id(portion): float(portion.own > 0) for portion, _ in update}
            return num_items
        own = [self._ugro_items(portion, batch) for portion, batch in update]
        everybody = sum(items for (items,) in self._ugro.run._group.gather([float(sum(own))]).wait())
        divided_by = 1 if self._ugro_is_scaled(num_items) else num_batches
        scale = self._ugro.ranks * divided_by / everybody if everybody else 0.0
        self._ugro_weights = {id(portion): scale * items for (portion, _), items in zip(update, own, strict=True)}
        return num_items

    def _ugro_is_scaled(self, num_items: Any) -> bool:
        """Whether the loss is not divided by the number of accumulated batches: as the Trainer decides it."""
        declared = getattr(self, "loss_is_scaled_for_ga", None)
        if declared is not None:
            return bool(declared)
        accepts = self.model_accepts_loss_kwargs  # type: ignore[attr-defined]
        return (accepts and num_items is not None) or self.compute_loss_func is not None  # type: ignore[attr-defined]

    def _ugro_items(self, portion: Portion, batch: Any) -> int:
        """What the mean loss of a portion is a mean over."""
        if not portion.own:
            return 0
        labels: Any = batch.get("labels") if hasattr(batch, "get") else None
        if not torch.is_tensor(labels):
            return portion.own
        if self._loss_shifts_labels and labels.dim() > 1:  # type: ignore[attr-defined]
            labels = labels[..., 1:]
        return int(labels.ne(_IGNORED).sum())

    # --- a step -------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        if not isinstance(inputs, Slot):
            return super().training_step(model, inputs, num_items_in_batch, **more)  # type: ignore[misc]
        self._ugro_loss = torch.zeros((), device=self.args.device)
        for number, (portion, batch) in enumerate(inputs, start=1):
            is_synced = inputs.is_last and number == len(inputs)
            self._ugro_portion, self._ugro_factor = portion, self._ugro_weights[id(portion)]
            with contextlib.nullcontext() if is_synced else self.accelerator.no_sync(model):
                super().training_step(model, batch, num_items_in_batch, **more)  # type: ignore[misc]
            self._ugro_portion = None
            assert self._ugro is not None
            self._ugro.after_backward(is_synced=is_synced)
        return self._ugro_loss

    def _ugro_backward(self, loss: Any, **options: Any) -> None:
        if self._ugro_portion is not None and self._ugro is not None:
            loss = loss * self._ugro_factor
            self._ugro_loss = self._ugro_loss + loss.detach()
            self._ugro.before_backward(loss.detach() / self._ugro.ranks)
        self._ugro_plain_backward(loss, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        batches = [batch for _, batch in inputs] if isinstance(inputs, Slot) else [inputs]
        return sum(int(super(UgroTrainerMixin, self).floating_point_ops(batch)) for batch in batches)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Ranks add up their tokens, so each calls it once."""
        if isinstance(inputs, Slot):
            real = [batch for portion, batch in inputs if portion.own]
            inputs = _flat(real, getattr(self.model, "main_input_name", "input_ids"))
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *others: Any, **more: Any) -> None:
        balanced = self._ugro
        assert balanced is not None
        if balanced.stops:
            self.control.should_save, self.control.should_evaluate = True, False
        with balanced.pause():
            super()._maybe_log_save_evaluate(*others, **more)  # type: ignore[misc]
        if balanced.stops:
            balanced.leave()

    def _save_checkpoint(self, model: Any, trial: Any, *others: Any) -> None:
        balanced = self._ugro
        if balanced is not None:
            balanced.expect_finite()
        super()._save_checkpoint(model, trial, *others)  # type: ignore[misc]
        if balanced is None:
            return
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
        _gather_random_states(balanced, folder)
        if balanced.is_main:
            places.write_state(folder, balanced.state())
            places.publish(folder, folder.name, self.args.save_total_limit)
        balanced.note_checkpoint(folder)
        balanced.run._group.barrier()  # no rank continues before it is complete


class UgroTrainer(UgroTrainerMixin, Trainer):  # type: ignore[misc]
    """``from ugro.train.integrations.huggingface import UgroTrainer as Trainer``"""


def _expect_declared(trainer: Any) -> None:
    """A loss of the script's own may be a mean over its batch, or over ``num_items_in_batch``."""
    where = type(trainer).compute_loss.__module__.split(".")[0]
    is_declared = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
    if where not in _KNOWN and not is_declared and trainer.model_accepts_loss_kwargs:
        raise UsageError(
            f"{type(trainer).__name__}.compute_loss does not say what its loss is a mean over",
            hint="set the class attribute loss_is_scaled_for_ga: False for a mean over the batch that it is given, "
            "True if it divides by num_items_in_batch and multiplies by the number of processes",
        )


def _expect_samples(dataset: Any, args: Any) -> None:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError("a dataset without a length cannot be shared by speed", hint="use one with indices")
    if args.train_sampling_strategy == "batch_rebalance":
        raise UsageError("batch_rebalance excludes shares by speed", hint="train_sampling_strategy='random'")


def _stand_in(samples: int, batches: int) -> Any:
    """The Trainer counts it and skips in it; nobody loads from it."""
    numbers = [[number] for number in range(batches)]
    return torch.utils.data.DataLoader(_Samples(samples), batch_sampler=numbers)


class _Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _next_update(portions: Iterator[tuple[Portion, Any]]) -> list[tuple[Portion, Any]]:
    """All portions of this rank; empty at the end of the epoch."""
    found: list[tuple[Portion, Any]] = []
    for portion, batch in portions:
        found.append((portion, batch))
        if portion.is_last:
            break
    return found


def _slots(update: list[tuple[Portion, Any]], count: int) -> list[Slot]:
    """As many as the Trainer accumulates; the last one is never empty."""
    whole, more = divmod(len(update), count)
    slots, begin = [], 0
    for number in range(count):
        end = begin + whole + (number >= count - more)
        slots.append(Slot(update[begin:end]))
        begin = end
    slots[-1].is_last = True
    return slots


def _without_labels(batch: Any) -> Any:
    """A rank without samples takes part in counting, with nothing."""
    empty = dict(batch)
    for name in ("labels", "shift_labels"):
        if torch.is_tensor(empty.get(name)):
            empty[name] = torch.full_like(empty[name], _IGNORED)
    return empty


def _flat(batches: list[Any], main_input: str) -> dict[str, Any]:
    names = [name for name in (main_input, "attention_mask") if all(name in batch for batch in batches)]
    if not batches:
        return {main_input: torch.zeros(0), "attention_mask": torch.zeros(0)}
    return {name: torch.cat([batch[name].flatten() for batch in batches]) for name in names}


def _gather_random_states(balanced: Balanced, folder: Path) -> None:
    """Each rank wrote its own, on its node; a checkpoint is a folder on one."""
    name = "rng_state_{}.pth" if balanced.ranks > 1 else "rng_state.pth"
    own = folder / name.format(balanced.rank)
    contents = balanced.run._group.contents(own.read_bytes() if own.exists() else b"")
    if balanced.is_main:
        for rank, content in enumerate(contents):
            if content and not (path := folder / name.format(rank)).exists():
                path.write_bytes(content)
