"""A run whose steps another library makes: shares of each batch by speed, measurements, and what checkpoints need.

The library calls forward and backward, and reports the moments around them here. The gradients stay those of one
process, because each loss is weighted by its part of the batch.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint, loader
from ugro.train import surroundings as start
from ugro.train.checkpoint import VERSION, checked
from ugro.train.integrations.journal import Journal
from ugro.train.loader import Feed, Portion, iterations, order_of
from ugro.train.parallel import way as batchnorm
from ugro.train.parallel.way import Way, described
from ugro.train.rules.balance import Balancer, Batch
from ugro.train.rules.shares import Mode
from ugro.train.run import Run
from ugro.train.samples import Order, Progress, Schedule
from ugro.train.surroundings import Surroundings

_LEAST_WITH_BATCH_NORM = 8
_HEARD_BY = "_ugro_heard_by"


class Balanced:
    def __init__(self, seed: int = 0) -> None:
        """All ranks call it. The random numbers of the script stay as they are."""
        around = Surroundings.of(os.environ)
        _expect_every_step(around)
        Journal().refuse_trial()
        with _untouched_chance():
            self.run = Run(replace(around, resume=None), seed, None)
        self.rank, self.ranks, self.device = self.run.rank, self.run.ranks, self.run.device
        self.is_main = self.run.is_main
        self.order: Order | None = None
        self._stepping = self.run._stepping
        self._clock = self._stepping._history.clock
        self._restored: Mapping[str, Any] | None = None
        self._pauses: list[tuple[Any, Any]] = []
        self._paused_since: Any = None
        self._mean: Any = 0.0  # of the losses of this update, as far as they are computed
        self._is_open = False  # an update has begun
        self.listen()

    @property
    def progress(self) -> Progress:
        return self.run.progress

    @property
    def stops(self) -> bool:
        """All ranks know after the same step that they are to end."""
        return self._stepping.stops

    def listen(self, *, takes_over: bool = False) -> None:
        """Handles SIGTERM instead of an earlier run in this process, or of anybody if it ``takes_over``."""
        heard_by = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        with contextlib.suppress(ValueError):  # not the main thread
            if takes_over or isinstance(heard_by, Run):
                signal.signal(signal.SIGTERM, self.run._asked_to_stop)

    def leave(self) -> None:
        """Ends this rank as one that was asked to; its work is saved."""
        self.run._leave()

    # --- the model ----------------------------------------------------------------------------------------------

    def note_norms(self, model: Any) -> None:
        """Before the data are shared: BatchNorm needs some samples on each rank."""
        if self.ranks > 1 and self.run._least == 1 and batchnorm.has_batch_norm(model):
            batchnorm.warn_of_local(self.ranks)
            self.run._least = _LEAST_WITH_BATCH_NORM

    def attach(self, model: Any, reduce: Callable[[Any, Any], Any] | None = None) -> None:
        """``model`` is in DDP if there are several ranks; ``reduce`` is a hook of torch's, with its state bound."""
        self._stepping.model = model
        self._stepping.way = Way(model, self._stepping.group)
        self._stepping.finite.is_lossy = reduce is not None
        if self.is_main:
            self.run._metrics.put(described(model, "ddp", reduce))
        if self.ranks == 1:
            return
        self.note_norms(model)
        if self.run._least == 1:
            # Sending buffers before every forward would make all ranks wait for the first one.
            model.broadcast_buffers = False
        if not hasattr(model, _HEARD_BY):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            hook = reduce or allreduce_hook
            model.register_comm_hook(None, lambda _, bucket: getattr(model, _HEARD_BY).bucket(bucket, hook))
        setattr(model, _HEARD_BY, self._stepping)  # torch allows one hook, and a model may be trained twice

    # --- data ---------------------------------------------------------------------------------------------------

    def global_batch(self, wanted: int) -> int:
        """The one of the checkpoint, if there is one: it stays when there are more or fewer ranks."""
        return wanted if self._restored is None else int(self._restored["global_batch"])

    def share(self, order: Order, source: Any, *, parts: int = 1, most: int | None = None) -> Schedule:
        """Begins to share the batches of ``order``. ``parts`` of each are computed one after the other on every rank,
        and ``most`` limits what a rank gets of one.
        """
        total = order.global_batch
        least = min(self.run._least * parts, total // self.ranks)
        granule = parts * start.granule(self.device, total, self.ranks * parts)
        batch = Batch(total, self.run._balance.names, max(parts, least), granule)
        around = self.run.surroundings
        # Equal shares that are no multiples of the parts could never be compared with the plan.
        is_odd = around.mode is Mode.ADAPTIVE and total % (self.ranks * parts) != 0
        speeds = around.speeds or ((1.0,) * self.ranks if is_odd else ())
        balancer = Balancer(batch, around.mode, speeds)
        if self._restored is not None and self._restored["balancer"] is not None:
            balancer.restore(self._restored["balancer"])
        if most is not None:
            self._stepping.cap = most * parts
            balancer.limit([self._stepping.cap] * self.ranks)
        own = loader.lead(source.num_workers, source.prefetch_factor)
        leads = self.run._group.gather([float(own)]).wait()
        schedule = Schedule(balancer.plan, int(max(lead for (lead,) in leads)))
        self.run._balance.begin(balancer, schedule)
        self.order = order
        return schedule

    def agree(self, text: str) -> bool:
        """Whether all ranks have the same text. All of them call it."""
        return len(set(self.run._group.texts(text))) == 1

    def begin_epoch(self) -> int:
        """Goes on in an epoch that was interrupted, or begins the next one. Returns a seed for loader processes."""
        progress = self.progress
        if self.order is not None and progress.cursor >= self.order.end:
            progress.epoch, progress.cursor = progress.epoch + 1, 0
        self._is_open = False
        self._stepping.disturb()  # an evaluation may have come before
        return hash((progress.seed, progress.epoch, progress.cursor, self.rank))

    def announce(self, total_steps: int | None = None) -> None:
        """Records how many steps there will be."""
        if self.is_main and self.order is not None:
            record = {"kind": "progress", "step": self.progress.step, "steps_per_epoch": self.order.steps}
            self.run._metrics.put(record | ({} if total_steps is None else {"total_steps": total_steps}))

    def log(self, *, step: int | None = None, **values: Any) -> None:
        self.run.log(step=step, **values)

    # --- a step -------------------------------------------------------------------------------------------------

    def fetching(self) -> None:
        if self._paused_since is not None:
            self._pauses.append((self._paused_since, self._clock.now()))
            self._paused_since = None
        self._stepping.fetching()

    def fetched(self, portion: Portion) -> None:
        """The first portion of an update begins it."""
        self._stepping.fetched(portion.slice)
        if not self._is_open:
            self._is_open, self._mean = True, 0.0
            self._stepping.begin()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What ranks do together, and wait for each other in, is not the time that is balanced."""
        begun = self._clock.now()
        try:
            yield
        finally:
            self._pauses.append((begun, self._clock.now()))

    def pause_until_fetching(self) -> None:
        """The same, from now until this rank fetches its next batch."""
        self._paused_since = self._clock.now()

    def before_backward(self, part_of_mean: Any) -> None:
        """``part_of_mean``: what this portion adds to the mean loss of all ranks."""
        self._stepping.paused(self._pauses)
        self._pauses.clear()
        self._mean = self._mean + part_of_mean
        slice_ = self._stepping.slice
        # Losses are averaged over ranks by their shares.
        self._stepping.forward_done(self._mean * (slice_.total / slice_.own) if slice_ and slice_.own else self._mean)

    def after_backward(self, *, is_synced: bool) -> None:
        self._stepping.backward_done()
        if is_synced and self._is_open:
            self._is_open = False
            self._stepping.finish()
        elif self._stepping.slice is not None:
            self.progress.cursor = self._stepping.slice.cursor

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        balancer = self.run._balance.balancer
        return {
            "version": VERSION,
            **asdict(self.progress),
            "global_batch": None if self.order is None else self.order.global_batch,
            "balancer": balancer.state() if balancer else None,
            "ranks": self.ranks,
        }

    def restore(self, state: Mapping[str, Any], where: object = "this checkpoint") -> None:
        """Before the data are shared."""
        self._restored = checked(state, where)
        for name in ("seed", "epoch", "cursor", "step"):
            setattr(self.progress, name, int(state[name]))

    def expect_finite(self) -> None:
        """Raises on all ranks before a checkpoint of parameters that are not finite. All of them call it."""
        self._stepping.expect_finite()

    def random_states(self) -> list[str]:
        """Of every rank, on every rank."""
        return [content.decode() for content in self.run._group.contents(checkpoint.random_state())]

    def note_checkpoint(self, path: object) -> None:
        if self.is_main:
            self.run._metrics.put({"kind": "checkpoint", "step": self.progress.step, "path": str(path)})


def _expect_every_step(around: Surroundings) -> None:
    """A library's loop exchanges gradients in every step, and with the ranks that it began with."""
    if around.sync.is_local:
        raise UsageError(
            "local SGD needs the loop of ugro.train, and this library has its own", hint="leave out train_sync: local"
        )
    if around.min_ranks is not None:
        raise UsageError(
            "an elastic training needs the loop of ugro.train, and this library has its own",
            hint="leave out elastic.min_ranks; the job is retried from its last checkpoint all the same",
        )


@contextlib.contextmanager
def _untouched_chance() -> Iterator[None]:
    import torch

    pythons = random.getstate()
    local = int(os.environ.get("LOCAL_RANK") or 0)
    devices = [local % torch.cuda.device_count()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
    random.setstate(pythons)


# --- turns ------------------------------------------------------------------------------------------------------------
# A training loader for libraries whose scripts take one batch after the other: each is this rank's part of one.


class Turns:
    """The script's loader, dealt by speed: batches of all ranks are as large as before."""

    def __init__(
        self, balanced: Balanced, source: Any, *, size: int, accumulated: int, most: int | None = None
    ) -> None:
        """``size``: of the batch of all ranks. ``accumulated`` of them are one update, and ``most`` of the samples of
        one are given to one rank.
        """
        self.dataset = source.dataset
        self.portion: Portion | None = None  # what is being computed
        self.before_batch: Callable[[], None] | None = None  # between two batches of the same epoch
        self._balanced = balanced
        self._source, self._accumulated, self._most = source, accumulated, most
        self._size = size
        self._is_placed = True  # where the next epoch begins was chosen, and is not what an earlier loop has left
        self._share()

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self._order.end // self._size)

    def __iter__(self) -> Iterator[Any]:
        balanced = self._balanced
        if not self._is_placed:
            balanced.progress.cursor = self._order.end  # a loop that was left early does not go on
        self._is_placed = False
        seed = balanced.begin_epoch()
        portions = self._feed.epoch(seed)
        is_first = True
        while True:
            if not is_first and self.before_batch is not None and balanced.progress.cursor < self._order.end:
                self.before_batch()
            is_first = False
            balanced.fetching()
            found = next(portions, None)
            if found is None:
                break
            self.portion, batch = found
            balanced.fetched(self.portion)
            yield batch
        self.portion = None

    @property
    def is_at_last(self) -> bool:
        """The batch that is being computed is the last one of its epoch."""
        return self.portion is not None and self.portion.slice.cursor >= self._order.end

    def weight(self) -> float:
        """By what the mean loss of this rank is multiplied."""
        return 1.0 if self.portion is None else self._balanced.ranks * self.portion.part

    def go_to(self, batches: int) -> None:
        """So many batches of this epoch are done."""
        self._balanced.progress.cursor = min(batches * self._size, self._order.end)
        self._is_placed = True

    # --- checkpoints: names that libraries look for -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._balanced.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the samples that were used, with batches as large as they were."""
        self._balanced.restore(state)
        self._is_placed = True
        self._share()

    def _share(self) -> None:
        balanced, source = self._balanced, self._source
        _expect_samples(source)
        total = balanced.global_batch(self._size * self._accumulated)
        if total % self._accumulated:
            raise UsageError(
                f"the checkpoint's updates of {total} samples cannot be made of {self._accumulated} batches",
                hint="resume with as many accumulated batches as before",
            )
        self._size = total // self._accumulated
        self._order = order_of(source.sampler, total, drops_last=source.drop_last, agree=balanced.agree)
        schedule = balanced.share(self._order, source, parts=self._accumulated, most=self._most)
        order, accumulated = self._order, self._accumulated
        self._feed = Feed(
            source, lambda: iterations(order, schedule, balanced.progress, balanced.rank, accumulated), self.__len__
        )


def _expect_samples(source: Any) -> None:
    from torch.utils.data import BatchSampler, IterableDataset

    if isinstance(source.dataset, IterableDataset):
        raise UsageError("a dataset without a length cannot be shared by speed", hint="use one with indices")
    if type(source.batch_sampler) is not BatchSampler:
        raise UsageError(
            f"batches of {type(source.batch_sampler).__name__} cannot be shared by speed",
            hint="give the loader a batch_size, and a sampler if the order matters",
        )
