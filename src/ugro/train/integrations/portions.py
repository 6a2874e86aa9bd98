"""Cuts this rank's part of an update into portions: what a library computes in one forward and backward pass.

An update is what one step of the optimizer is about. All ranks know all of it, so they agree without an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ugro.policy.balance.split import in_proportion
from ugro.train.pieces import sizes
from ugro.train.sampler import Order, Progress, Schedule, Slice

_DUMMY_SAMPLES = 2  # of a rank without samples of its own; one would be too few for a BatchNorm


@dataclass(frozen=True, slots=True)
class Portion:
    indices: list[int]
    own: int  # samples that count; 0 if these only let the rank take part
    of: int  # samples of all ranks over which their common mean is taken
    is_first: bool  # of this rank's portions of the update
    is_last: bool
    slice: Slice  # the update, with the cursor after this portion

    @property
    def part(self) -> float:
        return self.own / self.of


def cut(slice_: Slice, at_once: int) -> list[Portion]:
    """Each has at most ``at_once`` samples; their number differs from rank to rank."""
    if not slice_.own:
        return [Portion(slice_.indices[:at_once], 0, slice_.total, True, True, slice_)]
    parts = sizes(slice_.own, -(-slice_.own // at_once))
    found, begin = [], 0
    for number, size in enumerate(parts):
        indices = slice_.indices[begin : begin + size]
        found.append(Portion(indices, size, slice_.total, number == 0, number + 1 == len(parts), slice_))
        begin += size
    return found


def iterations(order: Order, schedule: Schedule, progress: Progress, rank: int, accumulated: int) -> Iterator[Portion]:
    """The rest of the epoch, with ``accumulated`` portions per update on every rank.

    Each portion is a part of one batch of all ranks, the same batches that one process would get.
    """
    permutation = order.of(progress.seed, progress.epoch)
    cursor, step = progress.cursor, progress.step
    while cursor < order.end:
        plan = schedule.at(step)
        batches = _batches(cursor, order, accumulated)
        dealt = [in_proportion(end - begin, plan.shares) for begin, end in batches]
        shares = tuple(sum(of_rank) for of_rank in zip(*dealt, strict=True))
        for number, ((begin, end), of_batch) in enumerate(zip(batches, dealt, strict=True)):
            first = begin + sum(of_batch[:rank])
            indices = permutation[first : first + of_batch[rank]].tolist()
            dummies = permutation[begin : min(begin + _DUMMY_SAMPLES, end)].tolist()
            slice_ = Slice(step, shares, shares[rank], 1, end, [])
            is_last = number + 1 == len(batches)
            yield Portion(indices or dummies, of_batch[rank], end - begin, number == 0, is_last, slice_)
        cursor = batches[-1][1]
        step += 1


def _batches(cursor: int, order: Order, accumulated: int) -> list[tuple[int, int]]:
    """Of the update that ``cursor`` is in, those that are left."""
    size = order.global_batch // accumulated
    update_end = min(order.end, (cursor // order.global_batch + 1) * order.global_batch)
    found = []
    while cursor < update_end:
        end = min((cursor // size + 1) * size, update_end)
        found.append((cursor, end))
        cursor = end
    return found
