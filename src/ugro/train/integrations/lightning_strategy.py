"""Lightning on unequal ranks: a strategy that shares batches by speed, and a callback that saves when asked to end.

    trainer = Trainer(strategy=UgroStrategy(), callbacks=[UgroCallback()])
    trainer.fit(module, loader, ckpt_path=checkpoint_to_resume())
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint as places
from ugro.train.integrations.balanced import Balanced, Turns
from ugro.train.integrations.journal import Supported
from ugro.train.surroundings import Surroundings

Supported("lightning", (2, 6), (3,)).check()

import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

_CHECKPOINTS_KEPT = 3


def checkpoint_to_resume() -> str | None:
    """For ``trainer.fit(…, ckpt_path=…)``: the checkpoint that UGRO resumes from, or None."""
    found = places.resumable("*.ckpt")
    return None if found is None else str(found)


class _Ranks(LightningEnvironment):  # type: ignore[misc]
    """The ranks that UGRO or torchrun has started; nodes may have different numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self._around = Surroundings.of(os.environ)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._around.ranks

    def set_world_size(self, size: int) -> None:
        """Lightning computes it from the Trainer's options; the launcher knows it."""

    def global_rank(self) -> int:
        return self._around.rank

    def set_global_rank(self, rank: int) -> None:
        """The same."""

    def local_rank(self) -> int:
        return self._around.local_rank

    def teardown(self) -> None:
        """WORLD_SIZE stays: a script may fit more than once."""


class UgroStrategy(DDPStrategy):  # type: ignore[misc]
    def __init__(self, *, seed: int = 0, most_per_device: int | None = None, **options: Any) -> None:
        """``options`` are those of DDPStrategy. ``seed`` is that of the order of the samples, and ``most_per_device``
        limits how many a device gets at once.
        """
        super().__init__(cluster_environment=_Ranks(), **options)
        self._seed, self._most = seed, most_per_device
        self._balanced: Balanced | None = None
        self._turns: Turns | None = None

    @property
    def ugro(self) -> Balanced:
        """Available while the Trainer fits."""
        if self._balanced is None:
            raise UsageError("UgroStrategy was not set up yet", hint="use it with trainer.fit(…)")
        return self._balanced

    @property
    def root_device(self) -> torch.device:
        local = self.cluster_environment.local_rank()
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        return torch.device("cuda", local % torch.cuda.device_count())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For evaluation."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- set up -------------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        if self.world_size > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()
        if self._balanced is None:
            self._balanced = Balanced(self._seed)

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            super().configure_ddp()
        self.ugro.attach(self.model, self._compression() if self.world_size > 1 else None)

    def _register_ddp_hooks(self) -> None:
        """Ours calls the script's: torch allows one."""

    def _compression(self) -> Callable[[Any, Any], Any] | None:
        hook, state = self._ddp_comm_hook, self._ddp_comm_state
        if hook is None:
            return None
        wrapped = hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
        return lambda _, bucket: wrapped(state, bucket)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if not trainer.training or trainer.sanity_checking:
            return super().process_dataloader(dataloader)
        if not isinstance(dataloader, torch.utils.data.DataLoader) or dataloader.batch_size is None:
            raise UsageError(
                f"a training loader of type {type(dataloader).__name__} cannot be shared by speed",
                hint="return one torch DataLoader with a batch_size",
            )
        if self._turns is not None and not trainer.reload_dataloaders_every_n_epochs:
            raise UsageError("only one training loader can be shared by speed", hint="combine their datasets")
        _expect_constant_accumulation(trainer)
        self._turns = Turns(
            self.ugro, dataloader, size=dataloader.batch_size * self.world_size,
            accumulated=trainer.accumulate_grad_batches, most=self._most,
        )  # fmt: skip
        return self._turns

    # --- a step -------------------------------------------------------------------------------------------------

    def backward(self, closure_loss: Any, optimizer: Any, *others: Any, **more: Any) -> Any:
        turns = self._turns
        if turns is None or turns.portion is None:
            return super().backward(closure_loss, optimizer, *others, **more)
        weighted = closure_loss * turns.weight()
        self.ugro.before_backward(weighted.detach() / self.ugro.ranks)
        found = super().backward(weighted, optimizer, *others, **more)
        self.ugro.after_backward(is_synced=self._is_synced())
        return found

    def _is_synced(self) -> bool:
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return bool(self.model.require_backward_grad_sync)
        module = self.lightning_module
        return not module.automatic_optimization or not module.trainer.fit_loop._should_accumulate()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *others: Any, **more: Any) -> None:
        """Called by all ranks; one writes."""
        if self._balanced is not None:
            self._balanced.expect_finite()
        super().save_checkpoint(checkpoint, filepath, *others, **more)
        if self.is_global_zero and self._balanced is not None:
            name = f"step_{int(checkpoint['global_step']):09}.ckpt"
            places.publish(Path(filepath), name, _CHECKPOINTS_KEPT)
            self.ugro.note_checkpoint(filepath)

    def teardown(self) -> None:
        self._turns = None
        super().teardown()


class UgroCallback(Callback):  # type: ignore[misc]
    """Saves a checkpoint when the job is asked to end (SIGTERM), and leaves; times the steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning's own handler talks to the other ranks, which may be busy with their gradients.
        balanced = _balanced_of(trainer)
        balanced.listen(takes_over=True)
        steps = trainer.estimated_stepping_batches
        balanced.announce(int(steps) if steps != float("inf") else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Until the next batch is fetched, ranks log, evaluate, and ask the first one whether to go on."""
        balanced = _balanced_of(trainer)
        if balanced.stops:
            folder = balanced.run.surroundings.checkpoints
            unfinished = folder / f".step_{trainer.global_step:09}.ckpt.partial"
            trainer.save_checkpoint(unfinished)
            if balanced.is_main:
                unfinished.rename(folder / f"step_{trainer.global_step:09}.ckpt")
            balanced.run._group.barrier()
            balanced.leave()
        balanced.pause_until_fetching()


def _balanced_of(trainer: Any) -> Balanced:
    if not isinstance(trainer.strategy, UgroStrategy):
        raise UsageError("UgroCallback needs UgroStrategy", hint="Trainer(strategy=UgroStrategy(), …)")
    return trainer.strategy.ugro


def _expect_constant_accumulation(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and len(set(callback.scheduling.values())) > 1:
            raise UsageError("updates of changing size cannot be balanced", hint="use accumulate_grad_batches=N")
