"""Loads this rank's portions with the options of the script's own loader: its workers, its collate function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ugro.train.integrations.portions import Portion

OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


@dataclass(slots=True)
class _Indices:
    """For torch's loader, which may request some long before they are used."""

    make: Callable[[], Iterator[Portion]]
    handed_out: deque[Portion]
    count: Callable[[], int]

    def __iter__(self) -> Iterator[list[int]]:
        for portion in self.make():
            self.handed_out.append(portion)
            yield portion.indices

    def __len__(self) -> int:
        return self.count()


class Feed:
    """Portions with their batches, of one epoch each time."""

    def __init__(self, source: Any, make: Callable[[], Iterator[Portion]], count: Callable[[], int]) -> None:
        """``source`` is the script's loader; only its dataset and its options are used."""
        import torch
        from torch.utils.data import DataLoader

        options = {name: getattr(source, name) for name in OPTIONS if hasattr(source, name)}
        self._chance = torch.Generator()
        self._handed_out: deque[Portion] = deque()
        indices = _Indices(make, self._handed_out, count)
        self._torchs = DataLoader(source.dataset, batch_sampler=indices, generator=self._chance, **options)

    def epoch(self, seed: int) -> Iterator[tuple[Portion, Any]]:
        """``seed`` is the source of the loader processes' seeds: the script's own random numbers are not used."""
        self._handed_out.clear()
        self._chance.manual_seed(seed % 2**63)
        for batch in self._torchs:
            yield self._handed_out.popleft(), batch
