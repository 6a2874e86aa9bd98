"""One rank of a training run: ``run = ugro.train.init()``."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint, loader, saving
from ugro.train import reporting as ended
from ugro.train import surroundings as start
from ugro.train.balance import Balance, PartOfShare
from ugro.train.elastic import Elastic
from ugro.train.failures import Finite
from ugro.train.loader import Loader
from ugro.train.local_course import LocalStepping
from ugro.train.modes import ElasticRun, LocalLoader, LocalMode, refuse_holes
from ugro.train.parallel import spread
from ugro.train.parallel import way as batchnorm
from ugro.train.parallel.way import Way, described, distinct, gradient_bytes, of_units, optimizer_bytes
from ugro.train.reporting import Metrics, Notices, Patience, kept
from ugro.train.rules.balance import Balancer, Batch
from ugro.train.rules.failures import OnNan, on_nan
from ugro.train.rules.shares import Advice, Mode
from ugro.train.rules.sync import Sync, SyncOptions, chosen
from ugro.train.samples import Order, Progress, Schedule
from ugro.train.saving import Target
from ugro.train.step import Gradients, LossFunction, Step, guard_of
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings, mode
from ugro.train.telemetry import History
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
    **sync: Unpack[SyncOptions],
) -> Run:
    """Joins the other ranks. Defaults come from the environment, as set by UGRO or torchrun.

    ``balance`` is off, static or adaptive; ``speeds`` are the initial speeds of the ranks; ``resume`` is a checkpoint
    or a folder of checkpoints. ``sync="local"`` averages models in rounds of ``round_s`` seconds instead of exchanging
    gradients in every step; ``max_staleness`` and ``outer`` belong to it. ``nan`` is what to do
    about a loss or gradients that are not finite: stop, skip or ignore.
    """
    surroundings = Surroundings.of(os.environ)
    surroundings = replace(surroundings, sync=chosen(surroundings.sync, sync))
    if (choice := sync.get("nan")) is not None:
        surroundings = replace(surroundings, nan=on_nan(choice))
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
        is_local = surroundings.sync.is_local
        surroundings = replace(surroundings, resume=None, mode=how, sync=Sync(), is_trial_of_local=is_local)
        surroundings = replace(surroundings, nan=OnNan.IGNORE)
    return Run(surroundings, seed, checkpoints_kept)


class Run:
    def __init__(self, surroundings: Surroundings, seed: int, checkpoints_kept: int | None) -> None:
        self.device = start.device(surroundings.local_rank)
        self.progress = Progress(seed)
        self._checkpoints_kept = checkpoints_kept
        all_speeds = surroundings.speeds
        self._elastic, self._group, surroundings = Elastic.of(surroundings, self.device)
        self.surroundings = surroundings
        number = surroundings.rank  # of this process, whatever group it belongs to
        self._metrics = Metrics(start.metrics_path(surroundings.output, number), self._stamp())
        names = distinct(self._group.nodes)
        main = self._metrics if self.is_main else None
        self._balance = Balance(names, main)
        self._resumed = None if surroundings.resume is None else checkpoint.read(surroundings.resume)
        self._local = LocalMode.of(surroundings.sync, self.ranks, self._resumed, self._elastic is not None)
        kind = Stepping if self._local is None else LocalStepping
        self._stepping = kind(self._group, History(start.clock(self.device)), self._balance, self.progress)
        self._notices = Notices(surroundings.run_folder, start.run_name(surroundings), number)
        self._stepping.finite = Finite(surroundings.nan, self._stepping._history.clock, self._notices)
        if self._elastic is None and self.ranks > 1:  # there, a rank that does not come is left behind
            waiting = Patience(self._group, self.progress, surroundings.rank_timeout_s, self._notices)
            self._group.together = waiting.together
        self._stepping.tracer = self._tracer = start.tracer(surroundings, number, self.device)
        self._stepping.part = PartOfShare(surroundings.run_folder, start.run_name(surroundings))
        self._stepping.trial = self._trial = Trial.of(surroundings, self._group, main)
        self._kept = self._stepping.kept
        stepping = self._stepping
        self.fetching, self.fetched, self.exhausted = stepping.fetching, stepping.fetched, stepping.exhausted
        self._elastic_run = ElasticRun(
            self.progress, self._kept, self._stepping, self._balance, self._metrics, surroundings.mode, all_speeds,
            self._introduce,
        )  # fmt: skip
        if self._elastic is not None:
            self._elastic.begin(self._elastic_run, self._stepping, names)
        self._has_left = False
        self._loader: Loader | LocalLoader | None = None
        self._epochs: int | None = None
        self._guard: Any = None  # runs complete steps
        self._gradients = Gradients()
        self._least = self._least_in_company = 1
        start.seed_generators(seed)
        self._listen()
        self._prepare_end(names)

    def _prepare_end(self, names: list[str]) -> None:
        # Exit handlers run in reverse order: the writer's, registered with its first record, runs before these.
        if self.device.type == "cpu":  # NCCL's threads might wait for dead peers
            atexit.register(self._part)
        else:
            atexit.register(self._stepping.look_at_last)
        atexit.register(self._end_at_once)
        ended.note_at_exit()
        if self.is_main:
            self._introduce(names)
            atexit.register(self._balance.close)
        atexit.register(self._end_early_trial)  # runs before the writer's

    @property
    def rank(self) -> int:
        """The number of this rank. In an elastic job it changes with the members."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        return self._group.ranks

    @property
    def is_main(self) -> bool:
        """True on one rank: the one that writes for all. In an elastic job another takes over if it is lost."""
        return self.rank == 0 and not (self._elastic is not None and self._elastic.is_joining)

    @property
    def plan(self) -> tuple[int, ...]:
        """The current shares; empty before there is a loader."""
        if self._local is not None:
            return self._local.shares
        balancer = self._balance.balancer
        return balancer.plan.shares if balancer else ()

    @property
    def lr_scale(self) -> float:
        """By what Adam and those like it should multiply their learning rate: 1, or with local SGD √ranks."""
        # A rank's own step has fewer samples. Adam divides it by their noise, which the average takes out again.
        return 1.0 if self._local is None else math.sqrt(self.ranks)

    def advice(self) -> Advice | None:
        """Whether all ranks are worth having; None until every rank was measured."""
        return self._balance.advice()

    def gather(self, *numbers: float) -> list[list[float]]:
        """The numbers of each rank, on every rank. All ranks call it, between two steps."""
        self._stepping.expect_together()
        return self._group.numbers(numbers)

    def texts(self, text: str) -> list[str]:
        """The text of each rank, on every rank. All ranks call it, between two steps."""
        self._stepping.expect_together()
        return self._group.texts(text)

    # --- the model ----------------------------------------------------------------------------------------------

    def wrap(
        self, model: Any, *, parallel: str = "ddp", sync_batchnorm: bool = False, compress: str | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Moves the model to this rank's device and, with several ranks, spreads it over them.

        ``parallel`` says how; ``options`` are of that way. With ddp they are DDP's, ``comm_hook``, and ``compress``:
        fp16, powersgd or auto.
        """
        options |= {} if compress is None else {"compress": compress}
        if self._stepping.model is not None:
            raise UsageError("a run has one model", hint="put several into one torch.nn.Module")
        if batchnorm.has_batch_norm(model) and not sync_batchnorm:
            self._least_in_company = _LEAST_WITH_BATCH_NORM
        if self._group.is_distributed and batchnorm.has_batch_norm(model):
            if sync_batchnorm:
                model = batchnorm.synchronised(
                    model, self._stepping.company, is_on_gpu=self.device.type == "cuda"
                )
            else:
                batchnorm.warn_of_local(self.ranks)
                self._least = self._elastic_run.least = _LEAST_WITH_BATCH_NORM
        if self._local is not None:
            self._local.check(parallel, sync_batchnorm=sync_batchnorm)
            options, compress = {}, None  # of exchanges of gradients, and there are none
        self._stepping.way = way = self._spread(parallel, model, options)
        self._stepping.model = model = way.model
        if way.unit_count < self.ranks:
            self._share_in_units(way)
        if self.is_main:
            sent_by = options.get("comm_hook") or (None if compress == "none" else compress)
            self._metrics.put(described(model, parallel, sent_by))
        start.seed_generators(self.progress.seed + self._unit)  # each has its own noise, such as dropout
        return model

    def _spread(self, parallel: str, model: Any, options: dict[str, Any]) -> Way:
        if self._elastic is not None:
            self._elastic.check(parallel)
        if self._local is not None:
            return self._local.spread(model, self._stepping, self._save)
        return spread(parallel, model, self._stepping, options)

    def _share_in_units(self, way: Way) -> None:
        """Samples are shared among groups of ranks, not among ranks."""
        if self._loader is not None:
            raise UsageError("the loader was made before the model was wrapped", hint="call run.wrap first")
        self._balance.names = names = tuple(way.names(self._group.nodes))
        if self._trial is not None:
            self._trial.units = names
        if self.is_main and not way.profiles_ranks:
            self._introduce(list(names))

    @property
    def _unit(self) -> int:
        return self._stepping.units[self.rank]

    # --- data ---------------------------------------------------------------------------------------------------

    def loader(
        self, dataset: Any, *, global_batch: int | None = None, granule: int | None = None, seed: int | None = None,
        **options: Any,
    ) -> Loader | LocalLoader:  # fmt: skip
        """This rank's share of each global batch of a dataset, or of what a DataLoader of torch's would load.

        ``options`` are torch's: shuffle (the default), drop_last, sampler, num_workers, collate_fn, pin_memory… Shares
        are multiples of ``granule``, as far as the batch allows: 8 on GPUs, less for small batches, 1 on CPUs. With
        ``weights``, one number per sample such as its number of tokens, losses are means over these.
        """
        if self._loader is not None:
            raise UsageError("a run has one training loader", hint="use torch's own DataLoader for evaluation")
        dataset, order, options = loader.source(dataset, global_batch, options)
        if seed is not None and self._resumed is None:
            self.progress.seed = seed
        loader.expect_one_order(order, self.progress.seed, self._group.texts)
        global_batch = order.global_batch
        if self._local is not None:
            return self._local_loader(self._local, dataset, order, options)
        names = self._balance.names
        granule = start.granule(self.device, global_batch, len(names)) if granule is None else granule
        if granule < 1:
            raise UsageError(f"granule is not a positive number: {granule}", hint="leave it out, or granule=8")
        batch = Batch(global_batch, names, min(self._least, global_batch // len(names)), granule)
        balancer = Balancer(batch, self.surroundings.mode, of_units(self.surroundings.speeds, self._stepping.units))
        if self._resumed is not None:
            self._restore_balance(balancer, global_batch)
        schedule = Schedule(balancer.plan, loader.common_lead(options, self._group))
        self._balance.begin(balancer, schedule)
        made = Loader(self, dataset, order, schedule, self._unit, options)
        self._loader = self._elastic_run.loader = made
        if self._trial is not None:
            self._trial.begin(min(global_batch, order.end), self._least_in_company)
            schedule.total_at, made.is_endless = self._trial.total_at, True
        self._announce()
        return made

    def _local_loader(self, local: LocalMode, dataset: Any, order: Order, options: dict[str, Any]) -> LocalLoader:
        wish = local.wish(order, self._least, self.surroundings.mode, self.surroundings.speeds)
        self._loader = made = local.loader(self, dataset, order, wish, options)
        if self._resumed is not None:
            saving.expect_same_batch(self._resumed, order.global_batch)
            local.restore(self._resumed.get("local"))
        self._announce()
        return made

    def _restore_balance(self, balancer: Balancer, global_batch: int) -> None:
        assert self._resumed is not None
        saving.expect_same_batch(self._resumed, global_batch)
        refuse_holes(self._resumed)
        if self._resumed["balancer"] is not None and balancer.restore(self._resumed["balancer"]):
            self._stepping.cap = balancer.caps[self._unit]

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs, including one that was interrupted."""
        if self._resumed is not None and not self._kept:
            raise UsageError(
                "there is a checkpoint to resume from", hint="call run.keep(model=…, optimizer=…) before the epochs"
            )
        self._go_on()
        if self._elastic is not None:
            self._elastic.arm(may_join=True)
        self._epochs = count
        self._announce()
        progress = self.progress
        for epoch in range(progress.epoch, count):
            if progress.epoch != epoch:
                progress.epoch, progress.cursor = epoch, 0
            yield epoch
            if self._local is not None:
                self._local.settle()
            if epoch + 1 < count:
                progress.epoch, progress.cursor = epoch + 1, 0
                self.boundary()

    def _announce(self) -> None:
        """Records how many steps there will be, as far as it is known."""
        if self.is_main and self._loader is not None:
            self._metrics.put(start.steps_ahead(self.progress, self._loader.order, self._epochs))

    def _go_on(self) -> None:
        """Restores the random generators of as many ranks as there were."""
        if self._resumed is None:
            return
        states = self._resumed["random"]
        if self.rank < len(states):
            checkpoint.set_random_state(states[self.rank].encode())
        self._resumed["objects"].clear()  # they are in use; free the second copy

    # --- a step -------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, *, scaler: Any = None) -> None:
        """A step without a block: backward of the mean loss over this rank's share of the loader's latest batch."""
        with self._block(begins_with_batch=True) as step:
            step.backward(step.loss(loss), scaler=scaler)

    def mean(self, loss: Any) -> float:
        """The mean loss of the latest step over the samples of all ranks. All ranks call it, after the step."""
        return self._stepping.mean(float(loss))

    @overload
    def step(self) -> Step: ...
    @overload
    def step(self, loss_fn: LossFunction, batch: Any, *, scaler: Any = None) -> Any: ...
    def step(self, loss_fn: LossFunction | None = None, batch: Any = None, *, scaler: Any = None) -> Any:
        """``with run.step() as step:``, or with arguments the complete step, which survives running out of memory."""
        if loss_fn is None:
            return self._block(begins_with_batch=False)
        if self._guard is None:
            self._guard = guard_of(self._stepping, batch)
            if self._balance.balancer is not None:
                self._balance.balancer.can_accumulate = True
        self._stepping.begins_with_batch = False
        with self._gradients.added(self._stepping):
            if self._elastic is not None:
                return self._elastic.step(self._guard, loss_fn, batch, scaler)
            return self._guard.step(loss_fn, batch, scaler)

    def _block(self, *, begins_with_batch: bool) -> Step:
        if self._stepping.way is not None:
            self._stepping.way.check_block()
        self._stepping.begins_with_batch = begins_with_batch
        return Step(self._stepping)

    def boundary(self) -> None:
        """Runs between two steps, the same two on all ranks, and ends the run if it was asked to stop."""
        if self._elastic is not None and not self._stepping.stops:
            self._elastic.boundary()
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
        model = self._stepping.model
        size_bytes = 0 if model is None else gradient_bytes(model)
        trial.end(size_bytes, optimizer_bytes(self._kept), can_accumulate=self._guard is not None)
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
        saving.load(objects, self._resumed, self._stepping)
        progress = self._resumed["progress"]
        self.progress.seed, self.progress.step = progress["seed"], progress["step"]
        self.progress.epoch, self.progress.cursor = progress["epoch"], progress["cursor"]
        if progress["is_epoch_over"]:
            self.progress.epoch, self.progress.cursor = progress["epoch"] + 1, 0

    def checkpoint(self, **objects: Any) -> Path | None:
        """Writes a checkpoint. All ranks call it, at the end of an epoch; the main rank writes it and gets its path."""
        self._kept.update(objects)
        if self._local is not None and self._local.puts_off_checkpoint():
            return None
        path = self._save() if self._trial is None else None
        if self._stepping.stops and self._trial is None:
            self._leave()
        return path

    def _save(self) -> Path | None:
        self._stepping.expect_finite()
        states = [content.decode() for content in self._group.contents(checkpoint.random_state())]
        balancer = self._balance.balancer
        about = {
            "progress": saving.position(self.progress, None if self._loader is None else self._loader.order),
            "balancer": balancer.state() if balancer else None,
            "random": states,
            "ranks": self.ranks,
            **({} if self._local is None else {"local": self._local.state()}),
        }
        target = Target(self.surroundings.checkpoints, self.progress.step, self._checkpoints_kept)
        path = saving.save(self._kept, about, target, self._stepping)
        if path is not None:
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
        self._stepping.close()

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
        resumed_from = None if self._resumed is None else self._resumed["progress"]["step"]
        about = start.about(self.surroundings, names, self.device)
        self._metrics.put({**about, "ranks": self.ranks, "resumed_from": resumed_from})

    def _part(self) -> None:
        """Releases the group: Gloo's threads end with its last reference, and abort a process if they outlive it.

        After an error the threads may be busy, and are not waited for.
        """
        self._stepping.close()
        way = self._stepping.way
        if way is not None and getattr(sys, "last_type", None) is None:
            way.release()

    def _stamp(self) -> dict[str, Any]:
        return {"attempt": self.surroundings.attempt, "rank": self.surroundings.rank}
