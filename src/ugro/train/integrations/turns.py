"""A training loader for libraries whose scripts take one batch after the other: each is this rank's part of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.integrations.balanced import Balanced
from ugro.train.integrations.feed import Feed
from ugro.train.integrations.orders import order_of
from ugro.train.integrations.portions import Portion, iterations


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
