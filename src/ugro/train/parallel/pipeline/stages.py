"""The stages of this rank in torch's own pipeline, and the schedules that run them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from ugro.core.errors import UsageError
from ugro.policy.partition.micro_batches import is_whole
from ugro.policy.partition.problem import Partition
from ugro.train.clock import Clock
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Cut

Loss = Callable[[Any, int], Any]  # of the output for a micro-batch, and its number
_MOST_SHAPES = 16  # whose schedules are kept: sequences may be of another length in every step


@dataclass(frozen=True, slots=True)
class Work:
    count: int  # micro-batches
    inputs: tuple[Any, ...]  # of all of them
    dimensions: tuple[int, ...]  # of the samples, in each input
    loss: Loss

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.count, self.dimensions, *(tuple(one.shape) for one in self.inputs))


def sample_dimensions(inputs: Sequence[Any], first: Sequence[Any], count: int) -> tuple[int, ...]:
    """Where torch is to cut the inputs: what is larger than in the first of the micro-batches."""
    return tuple(_sample_dimension(one, part) if count > 1 else 0 for one, part in zip(inputs, first, strict=True))


def _sample_dimension(one: Any, part: Any) -> int:
    places = [place for place, (many, few) in enumerate(zip(one.shape, part.shape, strict=True)) if many != few]
    if len(places) != 1:
        raise UsageError(
            f"an input of the model ({tuple(one.shape)}) is {tuple(part.shape)} for fewer samples, and cannot be cut",
            hint="before=lambda model, x: … adds what is the same for all samples",
        )
    return places[0]


def can_reorder() -> bool:
    """Whether this version of torch makes groups with the ranks in another order."""
    return "sort_ranks" in inspect.signature(distributed.new_group).parameters


class Watch:
    """How long this rank computes in a step, apart from its waiting."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: dict[bool, list[tuple[Any, Any]]] = {True: [], False: []}

    @contextlib.contextmanager
    def computing(self, *, is_forward: bool) -> Iterator[None]:
        begun = self._clock.now()
        yield
        self._spans[is_forward].append((begun, self._clock.now()))

    def taken_s(self) -> tuple[float, float]:
        """Forward and backward since the last call."""
        forward, backward = (
            sum(self._clock.between(begun, ended) for begun, ended in self._spans[is_forward])
            for is_forward in (True, False)
        )
        self._spans = {True: [], False: []}
        return forward, backward


class _WatchedStage(PipelineStage):  # type: ignore[misc]
    watch: Watch

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.watch.computing(is_forward=True):
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.watch.computing(is_forward=False):
            return super().backward_one_chunk(*args, **options)


class Pipe:
    """All stages as one partition has them. Its schedules are made when they are first needed."""

    def __init__(self, cut: Cut, partition: Partition, group: Group, watch: Watch) -> None:
        self.partition = partition
        self._cut, self._group, self._watch = cut, group, watch
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._loss: Loss | None = None  # of the step that runs
        order = list(partition.order)
        # Torch gives the first stage to the first rank of the group.
        is_given = order == sorted(order)
        self._members = None if is_given else distributed.new_group(order, sort_ranks=False)
        self.own = [at for at, stage in enumerate(partition.stages) if stage.device == group.rank]
        self.has_first, self.has_last = 0 in self.own, len(partition.stages) - 1 in self.own

    def run(self, work: Work) -> tuple[float, bool]:
        """Forward and backward of some micro-batches of one size; all ranks have the same ones.

        Returns the sum of the losses, 0 where the last stage is not, and whether this shape is new: torch then runs a
        micro-batch only to see what the stages exchange.
        """
        shape = work.shape
        is_new = shape not in self._schedules
        if is_new:
            if len(self._schedules) >= _MOST_SHAPES:
                self._schedules.clear()
            self._schedules[shape] = self._schedule(work)
        schedule, self._loss = self._schedules[shape], work.loss
        losses: list[Any] = []
        target = torch.arange(work.count) if self.has_last else None
        schedule.step(*(work.inputs if self.has_first else ()), target=target, losses=losses, return_outputs=False)
        return sum(float(one.detach()) for one in losses), is_new

    def _watched_loss(self, output: Any, number: Any) -> Any:
        assert self._loss is not None
        with self._watch.computing(is_forward=True):
            return self._loss(output, int(number))

    def _schedule(self, work: Work) -> Any:
        stages = [self._stage(at) for at in self.own]
        ranks, count = len(self.partition.order), work.count
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._watched_loss, "scale_grads": False}
        if len(stages) == 1:
            made = (Schedule1F1B if count >= ranks else ScheduleGPipe)(stages[0], **options)
        else:
            is_interleaved = count >= ranks and is_whole(count, ranks)
            made = (ScheduleInterleaved1F1B if is_interleaved else ScheduleLoopedBFS)(stages, **options)
        if self.has_first:  # an option of all schedules but one
            made._args_chunk_spec = tuple(map(TensorChunkSpec, work.dimensions))
        return made

    def _stage(self, at: int) -> PipelineStage:
        stage = self.partition.stages[at]
        module = self._cut.stage(stage.begin, stage.end)
        made = _WatchedStage(module, at, len(self.partition.stages), self._group.device, group=self._members)
        made.watch = self._watch
        return made

    def forget(self) -> None:
        self._schedules.clear()
        self._loss = None

    def close(self) -> None:
        self.forget()
        if self._members is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._members)
        self._members = None
