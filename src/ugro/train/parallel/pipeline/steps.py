"""Steps of a pipeline: ``run.step(loss_fn, batch)``. The first one measures, and cuts the model."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
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

from ugro.kernel.support.errors import UsageError
from ugro.train.group import Group
from ugro.train.parallel.pipeline import cut as measure
from ugro.train.parallel.pipeline.cut import Cut
from ugro.train.parallel.pipeline.moving import Mover, Optimizers, Pipelined
from ugro.train.rules import partition as micro
from ugro.train.rules.partition import Partition, Problem, is_whole
from ugro.train.rules.partition_planner import Move, equal, moved_layers, owners, plan, review
from ugro.train.rules.shares import Mode
from ugro.train.samples import Parts
from ugro.train.stepping import Stepping
from ugro.train.telemetry import Clock, CpuClock, CudaClock, Moments, Word, after_ready, data_s

# --- stages -----------------------------------------------------------------------------------------------------------
# The stages of this rank in torch's own pipeline, and the schedules that run them.


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


# --- steps ------------------------------------------------------------------------------------------------------------


LossFunction = Callable[[Any], Any]
Record = Callable[[dict[str, Any]], None]

_REMEMBERED = 16  # steps, whose median says how long a rank computes
_LEAST = 3
_REPORTED_AFTER = 8  # steps: how long they took, compared with what was predicted


class Steps:
    def __init__(self, cut: Cut, model: Pipelined, stepping: Stepping, options: Mapping[str, Any]) -> None:
        self._cut, self._model, self._stepping, self._options = cut, model, stepping, options
        self.tensors = cut.tensors
        self._group = stepping.group
        self._names = tuple(stepping.balance.names)
        self._clock: Clock = CudaClock() if self._group.device.type == "cuda" else CpuClock()
        self._watch = Watch(self._clock)
        self._problem: Problem | None = None
        self._total = 0  # samples of a whole batch
        self._micro_batches = 1
        self._before: Moments | None = None
        self._tail_s = 0.0
        self._epoch = 0
        self._steps_of_epoch = 0
        self._busy: list[list[float]] = []  # of whole batches, by rank
        self._measured: list[float] = []
        self.pipe: Pipe | None = None
        self.mover: Mover | None = None

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, batch: Any, scaler: Any = None) -> Any:
        """Returns the mean loss of the batch, on every rank. Gradients are those of the batch in this step."""
        if scaler is not None:
            raise UsageError("a pipeline has no GradScaler: each rank would scale by itself", hint="use bfloat16")
        whole = self._stepping.parts(batch)
        whole.expect_divisible()
        total = whole.samples
        if self.pipe is None:
            self._begin(loss_fn, whole)
        elif self._stepping.progress.epoch != self._epoch:
            self._review()
        moments = self._stepping.begin(self._micro_batches)
        begun = time.perf_counter()
        loss, is_new = self._computed(loss_fn, whole)
        self._add_shared()
        forward_s, backward_s = self._watch.taken_s()
        word = self._word(moments, (forward_s, backward_s), loss, total)
        words = self._stepping.exchanged(word)
        taken_s = time.perf_counter() - begun
        self._tail_s = max(0.0, taken_s - forward_s - backward_s)
        mean = sum(word.loss for word in words)
        words = [replace(word, loss=mean) for word in words]
        self._stepping.conclude(words)
        if not is_new:
            self._note(words, total, taken_s)
        return torch.tensor(mean, device=self._group.device, dtype=torch.float64)

    def _computed(self, loss_fn: LossFunction, batch: Parts) -> tuple[float, bool]:
        pipe = self.pipe
        assert pipe is not None
        for parameter in self._model.parameters():
            parameter.grad = None
        loss, is_any_new, begin = 0.0, False, 0
        for count, size in micro.rounds(batch.samples, self._micro_batches):
            inputs = self._model.captured(loss_fn, batch.part(begin, begin + count * size))
            first = self._model.captured(loss_fn, batch.part(begin, begin + size))
            cut = sample_dimensions(inputs, first, count)
            found, is_new = pipe.run(Work(count, inputs, cut, self._loss(loss_fn, batch, (begin, size))))
            loss, is_any_new, begin = loss + found, is_any_new or is_new, begin + count * size
        return loss, is_any_new

    def _loss(self, loss_fn: LossFunction, batch: Parts, where: tuple[int, int]) -> Callable[[Any, int], Any]:
        first, size = where
        slice_ = self._stepping.slice

        def loss(output: Any, number: int) -> Any:
            begin = first + number * size
            assert slice_ is not None
            return self._model.answered(loss_fn, batch.part(begin, begin + size), output) * slice_.part(begin, size)

        return loss

    def _add_shared(self) -> None:
        """What the first and the last stage both train, such as tied embeddings, gets the sum of their gradients."""
        assert self.pipe is not None
        first, last = self.pipe.partition.stages[0].device, self.pipe.partition.stages[-1].device
        names = [] if self._cut.before is None else self._cut.before.shared
        if first == last or self._group.rank not in (first, last):
            return
        is_first = self._group.rank == first
        for name in names:
            parameter = self._cut.tensors.get(name)
            if not parameter.requires_grad:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            other = torch.empty_like(own)
            peer = last if is_first else first
            for is_sending in (is_first, not is_first):
                distributed.send(own, peer) if is_sending else distributed.recv(other, peer)
            parameter.grad = own + other if is_first else other + own  # the same sum, bit by bit

    def _word(self, moments: Moments, busy: tuple[float, float], loss: float, total: int) -> Word:
        """Times of the previous step's end are sent with this one, as always."""
        stepping, clock = self._stepping, self._clock
        moments.loss = torch.tensor(loss, dtype=torch.float64)
        stepping.finite.take(moments, self._model.parameters())
        moments.ready = moments.synced = clock.now()
        between_s = fetching_s = data_s(clock, moments)
        if moments.since is not None and moments.is_clean:
            between_s = clock.between(moments.since, moments.begun)
        optimizer_s = 0.0 if self._before is None else after_ready(clock, self._before)[1]
        self._before = moments
        own_s = between_s + sum(busy)
        return Word(
            stops=stepping.is_asked_to_stop, step=moments.step, share=total if self._group.rank == 0 else 0,
            micro_batches=self._micro_batches, own_s=own_s, data_s=fetching_s, forward_s=busy[0],
            backward_s=busy[1], loss=loss, tail_s=self._tail_s, optimizer_s=optimizer_s,
            trace_steps=0 if stepping.tracer is None else stepping.tracer.asked(),
        )  # fmt: skip

    def _note(self, words: list[Word], total: int, taken_s: float) -> None:
        self._steps_of_epoch += 1
        if total != self._total:
            return
        self._busy = [*self._busy, [word.forward_s + word.backward_s for word in words]][-_REMEMBERED:]
        self._measured = [*self._measured, taken_s][-_REMEMBERED:]
        if len(self._measured) == _REPORTED_AFTER:
            self._record("measured")

    # --- where it is cut ----------------------------------------------------------------------------------------

    def _begin(self, loss_fn: LossFunction, batch: Parts) -> None:
        options, stepping, total = self._options, self._stepping, batch.samples
        optimizers = Optimizers(stepping.kept, self._cut.tensors)
        each = options.get("stages_per_rank", 1)
        self._total, self._epoch = total, stepping.progress.epoch
        self._micro_batches = options.get("micro_batches") or micro.chosen(total, self._group.ranks, each)
        count, size = micro.rounds(total, self._micro_batches)[0]
        if each > 1 and not micro.is_whole(count, self._group.ranks):
            raise UsageError(
                f"{count} micro-batches cannot be interleaved on {self._group.ranks} ranks",
                hint="give a multiple of the number of ranks: micro_batches=…",
            )
        sample = batch.part(0, size)
        inputs = self._model.captured(loss_fn, sample)
        measure.check(self._cut, inputs, self._group)
        meter = measure.Meter(self._cut, self._group, lambda output: self._model.answered(loss_fn, sample, output))
        found = meter.measured(inputs)
        setting = measure.Setting(self._names, optimizers.bytes_for_each, count, each, can_reorder())
        self._problem = measure.problem(self._cut, found, self._group, setting)
        partition = self._first(self._problem)
        self.mover = Mover(self._cut, optimizers, self._group)
        self.mover.settle(owners(partition))
        self._use(partition)
        # Other noise, such as dropout, on each rank; and not again the same when a run resumes.
        progress = stepping.progress
        torch.manual_seed(progress.seed + 1_000_003 * progress.step + self._group.rank)

    def _first(self, problem: Problem) -> Partition:
        if self._mode is Mode.OFF:
            return equal(problem, int(self._cut.before is not None), int(self._cut.after is not None))
        return plan(problem)

    @property
    def _mode(self) -> Mode:
        balancer = self._stepping.balance.balancer
        return Mode.ADAPTIVE if balancer is None else balancer.mode

    def _review(self) -> None:
        """At the beginning of an epoch: layers move if devices have changed. All ranks have the same numbers."""
        steps, self._steps_of_epoch = self._steps_of_epoch, 0
        self._epoch = self._stepping.progress.epoch
        if len(self._busy) < _LEAST:
            return
        assert self.pipe is not None
        assert self._problem is not None
        assert self.mover is not None
        busy = [median(column) for column in zip(*self._busy, strict=True)]
        slowest = max(link.s_per_byte for row in self._problem.links for link in row)
        found = review(self._problem, self.pipe.partition, busy, Move(slowest, steps))
        self._record("measured")
        self._problem = found.problem
        if self._mode is not Mode.ADAPTIVE or not found.is_moved:
            self.pipe.partition = replace(self.pipe.partition, predicted_s=found.partition.predicted_s)
            return
        before = self.pipe.partition
        self.pipe.close()
        self.mover.move(owners(before), owners(found.partition))
        self._use(found.partition, moved=len(moved_layers(before, found.partition)))

    def _use(self, partition: Partition, moved: int = 0) -> None:
        self.pipe = Pipe(self._cut, partition, self._group, self._watch)
        self._busy, self._measured = [], []
        self._stepping.disturb()
        first = partition.stages[0].device
        shared = set() if self._cut.before is None or self.pipe.has_first else set(self._cut.before.shared)
        self._model.counted = lambda name: name not in shared or self._group.rank == first
        self._model.is_cut = True
        self._model.passed = self._passed
        self._record("planned", moved)

    def _record(self, what: str, moved: int = 0) -> None:
        assert self.pipe is not None
        assert self._problem is not None
        partition = self.pipe.partition
        self._stepping.balance.put(
            {
                "kind": "pipeline",
                "step": self._stepping.progress.step,
                "what": what,
                "ranks": [stage.device for stage in partition.stages],
                "layers": [stage.layers for stage in partition.stages],
                "parts": len(self._cut.parts),
                "micro_batches": self._problem.micro_batches,
                "moved": moved,
                "predicted_s": partition.predicted_s,
                "measured_s": median(self._measured) if self._measured else None,
                "reason": partition.reason,
            }
        )

    def forget_exchanges(self) -> None:
        """What the stages send each other depends on what is trained. All ranks call it."""
        if self.pipe is not None:
            self.pipe.forget()

    # --- without training ---------------------------------------------------------------------------------------

    def _passed(self, *inputs: Any) -> Any:
        """A forward through all stages; the output on every rank."""
        assert self.pipe is not None
        stages = self.pipe.partition.stages
        tensors: Sequence[Any] = inputs
        for at, stage in enumerate(stages):
            if at:
                tensors = self._handed(tensors, stages[at - 1].device, stage.device)
            if stage.device == self._group.rank:
                for part in self._cut.parts[stage.begin : stage.end]:
                    tensors = part(*tensors)
        for other in range(self._group.ranks):
            tensors = self._handed(tensors, stages[-1].device, other)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _handed(self, tensors: Sequence[Any], source: int, target: int) -> Sequence[Any]:
        assert self.mover is not None
        if self._group.rank == source != target:
            self.mover.send([one.cpu() for one in tensors], target)
        elif self._group.rank == target != source:
            return [one.to(self._group.device) for one in self.mover.receive(source)]
        return tensors

    def close(self) -> None:
        """Releases torch's groups, whose threads must not outlive the interpreter."""
        if self.pipe is not None:
            self.pipe.close()
