"""One rank of a training run: ``run = ugro.train.init()``."""

from __future__ import annotations

import atexit
import inspect
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, overload

from ugro.core.errors import UsageError
from ugro.policy.balance.advice import Advice
from ugro.policy.balance.mode import Mode
from ugro.policy.balance.planner import Balancer, Batch
from ugro.train import batchnorm, checkpoint, loader
from ugro.train.balance import Balance
from ugro.train.clock import CpuClock, CudaClock
from ugro.train.group import Group
from ugro.train.guard import Guard, LossFunction
from ugro.train.loader import Loader
from ugro.train.metrics import Metrics, kept
from ugro.train.part import PartOfShare
from ugro.train.sampler import Order, Progress, Schedule, Slice
from ugro.train.step import Step
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings, mode
from ugro.train.telemetry import History
from ugro.train.trace import Tracer
from ugro.train.trial import Trial, Wish, leave

_LEAST_WITH_BATCH_NORM = 8
_CHECKPOINTS_KEPT = 3
_TERMINATED = 128 + signal.SIGTERM


def init(
    *,
    seed: int = 0,
    balance: str | None = None,
    speeds: tuple[float, ...] = (),
    output: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoints_kept: int | None = _CHECKPOINTS_KEPT,
) -> Run:
    """Joins the other ranks. Defaults come from the environment, as set by UGRO or torchrun.

    ``balance`` is off, static or adaptive; ``speeds`` are the initial speeds of the ranks; ``resume`` is a checkpoint
    or a folder of checkpoints.
    """
    surroundings = Surroundings.of(os.environ)
    if balance is not None:
        surroundings = replace(surroundings, mode=mode(balance))
    if speeds:
        surroundings = replace(surroundings, speeds=tuple(speeds))
    if output is not None:
        folder = Path(output).absolute()
        surroundings = replace(surroundings, output=folder, checkpoints=folder / "checkpoints")
    if resume is not None:
        surroundings = replace(surroundings, resume=Path(resume))
    if (wish := Wish.of(surroundings.trial)) is not None:  # measures each rank as it is, from the beginning
        how = surroundings.mode if wish.is_joint else Mode.OFF
        surroundings = replace(surroundings, resume=None, mode=how)
    return Run(surroundings, seed, checkpoints_kept)


class Run:
    def __init__(self, surroundings: Surroundings, seed: int, checkpoints_kept: int | None) -> None:
        self.device = _device(surroundings.local_rank)
        self.surroundings = surroundings
        self.progress = Progress(seed)
        self._checkpoints_kept = checkpoints_kept
        self._group = Group(surroundings, self.device)
        self.rank, self.ranks = self._group.rank, self._group.ranks
        self._metrics = Metrics(_metrics_path(surroundings.output, self.rank), self._stamp())
        names = _distinct(nodes := self._group.texts(surroundings.node))
        main = self._metrics if self.is_main else None
        self._balance = Balance(names, main)
        self._stepping = Stepping(self._group, History(_clock(self.device)), self._balance, self.progress)
        self._stepping.tracer = self._tracer = _tracer(surroundings, self.rank, self.device)
        self._stepping.part = PartOfShare(surroundings.run_folder, _run_name(surroundings))
        self._stepping.trial = self._trial = Trial.of(surroundings.trial, self._group, nodes, main)
        self._kept: dict[str, Any] = {}
        self._has_left = False
        self._resumed = None if surroundings.resume is None else checkpoint.read(surroundings.resume)
        self._loader: Loader | None = None
        self._epochs: int | None = None
        self._guard: Guard | None = None
        self._least = self._least_in_company = 1
        _seed(seed)
        self._listen()
        # Exit handlers run in reverse order: the writer's, registered with its first record, runs before these two.
        if self.device.type == "cpu":  # NCCL's threads might wait for dead peers
            atexit.register(self._part)
        atexit.register(self._end_at_once)
        if self.is_main:
            self._introduce(names)
            atexit.register(self._balance.close)
        atexit.register(self._end_early_trial)  # runs before the writer's

    @property
    def is_main(self) -> bool:
        """True on one rank: the one that writes for all."""
        return self.rank == 0

    @property
    def plan(self) -> tuple[int, ...]:
        """The current shares; empty before there is a loader."""
        balancer = self._balance.balancer
        return balancer.plan.shares if balancer else ()

    def advice(self) -> Advice | None:
        """Whether all ranks are worth having; None until every rank was measured."""
        return self._balance.advice()

    # --- the model ----------------------------------------------------------------------------------------------

    def wrap(self, model: Any, *, sync_batchnorm: bool = False, comm_hook: Any = None, **options: Any) -> Any:
        """Moves the model to this rank's device and, with several ranks, wraps it in DDP with ``options``."""
        if self._stepping.model is not None:
            raise UsageError("a run has one model", hint="put several into one torch.nn.Module")
        model = model.to(self.device)
        if batchnorm.has_batch_norm(model) and not sync_batchnorm:
            self._least_in_company = _LEAST_WITH_BATCH_NORM
        if self.ranks > 1 and batchnorm.has_batch_norm(model):
            if sync_batchnorm:
                model = batchnorm.synchronised(model, self._stepping.company)
            else:
                batchnorm.warn_of_local(self.ranks)
                self._least = _LEAST_WITH_BATCH_NORM
        if self.ranks > 1:
            model = self._distributed(model, comm_hook, options)
        self._stepping.model = model
        if self.is_main:
            self._describe(model, comm_hook)
        _seed(self.progress.seed + self.rank)  # each rank has its own noise, such as dropout
        return model

    def _distributed(self, model: Any, comm_hook: Any, options: dict[str, Any]) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.nn.parallel import DistributedDataParallel

        devices = [self.device.index] if self.device.type == "cuda" else None
        # Sending buffers before every forward would make all ranks wait for the slowest once more.
        buffers = _name_of_buffer_option(DistributedDataParallel)
        # Gradients in the exchange buffers need no copy: less memory, and less work for the slowest rank.
        defaults = {"device_ids": devices, buffers: False, "gradient_as_bucket_view": True}
        model = DistributedDataParallel(model, **{**defaults, **options})
        reduce = comm_hook or allreduce_hook
        model.register_comm_hook(None, lambda state, bucket: self._stepping.bucket(bucket, reduce))
        return model

    def _describe(self, model: Any, comm_hook: Any) -> None:
        """Records what every step exchanges."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._metrics.put(
            {
                "kind": "model",
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained),
                "comm_hook": None if comm_hook is None else getattr(comm_hook, "__name__", type(comm_hook).__name__),
            }
        )

    # --- data ---------------------------------------------------------------------------------------------------

    def loader(
        self, dataset: Any, *, global_batch: int, shuffle: bool = True, drop_last: bool = False, granule: int = 1,
        seed: int | None = None, **options: Any,
    ) -> Loader:  # fmt: skip
        """This rank's share of each global batch. ``options`` are torch's: num_workers, collate_fn, pin_memory…"""
        if self._loader is not None:
            raise UsageError("a run has one training loader", hint="use torch's own DataLoader for evaluation")
        if seed is not None and self._resumed is None:
            self.progress.seed = seed
        batch = Batch(global_batch, self._balance.names, min(self._least, global_batch // self.ranks), granule)
        balancer = Balancer(batch, self.surroundings.mode, self.surroundings.speeds)
        if self._resumed is not None:
            self._restore_balance(balancer, global_batch)
        schedule = Schedule(balancer.plan, self._lead(options))
        self._balance.begin(balancer, schedule)
        order = Order(len(dataset), global_batch, shuffle, drop_last)
        self._loader = Loader(self, dataset, order, schedule, self.rank, options)
        if self._trial is not None:
            self._trial.begin(min(global_batch, order.end), self._least_in_company)
            schedule.total_at, self._loader.is_endless = self._trial.total_at, True
        self._announce()
        return self._loader

    def _lead(self, options: dict[str, Any]) -> int:
        own = loader.lead(options.get("num_workers", 0), options.get("prefetch_factor"))
        return int(max(lead for (lead,) in self._group.gather([float(own)]).wait()))

    def _restore_balance(self, balancer: Balancer, global_batch: int) -> None:
        assert self._resumed is not None
        progress = self._resumed["progress"]
        if progress["cursor"] and progress["global_batch"] not in (None, global_batch):
            raise UsageError(
                f"the checkpoint is in the middle of an epoch with global batches of {progress['global_batch']}",
                hint="resume with the same global_batch",
            )
        if self._resumed["balancer"] is not None and balancer.restore(self._resumed["balancer"]):
            self._stepping.cap = balancer.caps[self.rank]

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs, including one that was interrupted."""
        if self._resumed is not None and not self._kept:
            raise UsageError(
                "there is a checkpoint to resume from", hint="call run.keep(model=…, optimizer=…) before the epochs"
            )
        self._go_on()
        self._epochs = count
        self._announce()
        progress = self.progress
        for epoch in range(progress.epoch, count):
            if progress.epoch != epoch:
                progress.epoch, progress.cursor = epoch, 0
            yield epoch
            if epoch + 1 < count:
                progress.epoch, progress.cursor = epoch + 1, 0
                self.boundary()

    def _announce(self) -> None:
        """Records how many steps there will be, as far as it is known."""
        if not self.is_main or self._loader is None:
            return
        order, progress = self._loader.order, self.progress
        record = {"kind": "progress", "step": progress.step, "steps_per_epoch": order.steps}
        if self._epochs is not None:
            steps_used = -(-progress.cursor // order.global_batch)  # of the epoch that was interrupted
            left = (self._epochs - progress.epoch) * order.steps - steps_used
            record |= {"epochs": self._epochs, "total_steps": progress.step + max(0, left)}
        self._metrics.put(record)

    def _go_on(self) -> None:
        """Restores the random generators of as many ranks as there were."""
        if self._resumed is None:
            return
        states = self._resumed["random"]
        if self.rank < len(states):
            checkpoint.set_random_state(states[self.rank].encode())
        self._resumed["objects"].clear()  # they are in use; free the second copy

    # --- a step -------------------------------------------------------------------------------------------------

    @overload
    def step(self) -> Step: ...
    @overload
    def step(self, loss_fn: LossFunction, batch: Any, *, scaler: Any = None) -> Any: ...
    def step(self, loss_fn: LossFunction | None = None, batch: Any = None, *, scaler: Any = None) -> Any:
        """``with run.step() as step:``, or with arguments the complete step, which survives running out of memory."""
        if loss_fn is None:
            return Step(self._stepping)
        if self._guard is None:
            if self._stepping.model is None:
                raise UsageError("there is no model yet", hint="model = run.wrap(model)")
            self._guard = Guard(self._stepping)
            if self._balance.balancer is not None:
                self._balance.balancer.can_accumulate = True
        return self._guard.step(loss_fn, batch, scaler)

    def fetching(self) -> None:
        self._stepping.fetching()

    def fetched(self, slice_: Slice) -> None:
        self._stepping.fetched(slice_)

    def exhausted(self) -> None:
        self._stepping.exhausted()

    def boundary(self) -> None:
        """Runs between two steps, the same two on all ranks, and ends the run if it was asked to stop."""
        if self._stepping.stops:
            if self._trial is not None:
                self._end_trial(self._trial)
            if self._kept:
                self._save()
            self._leave()

    def _end_early_trial(self) -> None:
        """Of a script that has ended before its trial was over; after an error, other ranks may be gone."""
        if self._trial is not None and self._trial.has_steps and getattr(sys, "last_type", None) is None:
            self._end_trial(self._trial)

    def _end_trial(self, trial: Trial) -> None:
        """Before the script does anything with what it has trained."""
        trained = self._stepping.model.parameters() if self._stepping.model is not None else ()
        size_bytes = sum(one.numel() * one.element_size() for one in trained if one.requires_grad)
        trial.end(size_bytes, can_accumulate=self._guard is not None)
        self._balance.close()
        self._metrics.close()
        leave()

    def _leave(self) -> None:
        self._tracer.close()
        self._balance.close()
        self._metrics.close()
        self._has_left = True
        raise SystemExit(_TERMINATED)

    def _end_at_once(self) -> None:
        """Exits without cleanup, since PyTorch's threads can abort a process whose peers are gone."""
        if self._has_left:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_TERMINATED)

    # --- what is kept -------------------------------------------------------------------------------------------

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Records values of this rank, for any step, in any order. It never waits, fails or loses anything."""
        at = self.progress.step if step is None else step
        record = {"kind": "log", "step": kept(at), "epoch": self.progress.epoch}
        self._metrics.put({**record, "values": {name: kept(value) for name, value in values.items()}})

    def keep(self, **objects: Any) -> None:
        """Adds objects with a state_dict to every checkpoint, and loads them if there is one to resume from."""
        self._kept.update(objects)
        if self._resumed is None:
            return
        checkpoint.load(objects, self._resumed["objects"])
        progress = self._resumed["progress"]
        self.progress.seed, self.progress.step = progress["seed"], progress["step"]
        self.progress.epoch, self.progress.cursor = progress["epoch"], progress["cursor"]
        if progress["is_epoch_over"]:
            self.progress.epoch, self.progress.cursor = progress["epoch"] + 1, 0

    def checkpoint(self, **objects: Any) -> Path | None:
        """Writes a checkpoint. All ranks call it, at the end of an epoch; the main rank writes it and gets its path."""
        self._kept.update(objects)
        path = self._save() if self._trial is None else None
        if self._stepping.stops and self._trial is None:
            self._leave()
        return path

    def _save(self) -> Path | None:
        states = [content.decode() for content in self._group.contents(checkpoint.random_state())]
        balancer = self._balance.balancer
        order = self._loader.order if self._loader is not None else None
        path = None
        if self.is_main:
            progress = {
                **asdict(self.progress),
                "global_batch": order.global_batch if order else None,
                "is_epoch_over": order is not None and self.progress.cursor >= order.end,
            }
            content = {
                "objects": checkpoint.states(self._kept),
                "progress": progress,
                "balancer": balancer.state() if balancer else None,
                "random": states,
                "ranks": self.ranks,
            }
            folder = self.surroundings.checkpoints
            path = checkpoint.write(folder, self.progress.step, content, self._checkpoints_kept)
            self._metrics.put({"kind": "checkpoint", "step": self.progress.step, "path": str(path)})
        self._group.barrier()  # no rank continues before it is on disk
        self._stepping.disturb()
        return path

    def close(self) -> None:
        """Writes everything and leaves the process group. A script that ends without it loses nothing."""
        self._end_early_trial()
        self._tracer.close()
        self._balance.close()
        self._metrics.close()
        self._group.close()

    # --- the end ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Handles SIGTERM, unless the script has its own handler."""
        is_free = threading.current_thread() is threading.main_thread()
        if is_free and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._asked_to_stop)

    def _asked_to_stop(self, number: int, frame: Any) -> None:
        # Before the first step there is nothing to save; a second signal means to exit at once.
        if self.progress.step == 0 or self._stepping.is_asked_to_stop or self._trial is not None:
            self._trial = None
            raise SystemExit(128 + number)
        self._stepping.is_asked_to_stop = True

    def _introduce(self, names: list[str]) -> None:
        self._metrics.put(
            {
                "kind": "run",
                "job": self.surroundings.job,
                "ranks": self.ranks,
                "nodes": names,
                "device": str(self.device),
                "mode": str(self.surroundings.mode),
                "resumed_from": None if self._resumed is None else self._resumed["progress"]["step"],
            }
        )

    def _part(self) -> None:
        """Releases the group: Gloo's threads end with its last reference, and abort a process if they outlive it.

        After an error the threads may be busy, and are not waited for.
        """
        self._group.close()
        model = self._stepping.model
        if self.ranks > 1 and model is not None and getattr(sys, "last_type", None) is None:
            model.reducer = model.logger = model.process_group = None

    def _stamp(self) -> dict[str, Any]:
        return {"attempt": self.surroundings.attempt, "rank": self.rank}


def _name_of_buffer_option(wrapper: Any) -> str:
    """PyTorch renamed this option, and warns about the old name."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(wrapper).parameters else "broadcast_buffers"


def _device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def _metrics_path(output: Path, rank: int) -> Path:
    """The file of this rank. One writer per file lets the agent follow it by its length."""
    return output / ("metrics.jsonl" if rank == 0 else f"metrics.rank_{rank}.jsonl")


def _clock(device: Any) -> CudaClock | CpuClock:
    return CudaClock() if device.type == "cuda" else CpuClock()


def _tracer(surroundings: Surroundings, rank: int, device: Any) -> Tracer:
    is_cuda = device.type == "cuda"
    return Tracer(surroundings.run_folder, _run_name(surroundings), surroundings.output, rank, is_cuda)


def _run_name(surroundings: Surroundings) -> str:
    return f"{surroundings.job}.{surroundings.attempt}"


def _distinct(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}:{rank}" for rank, name in enumerate(names)]
