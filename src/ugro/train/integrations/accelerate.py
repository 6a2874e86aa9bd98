"""Accelerate on unequal ranks: ``prepare`` shares batches by speed, ``backward`` weighs the losses.

    from ugro.train.integrations.accelerate import UgroAccelerator as Accelerator

The first loader that is prepared, of several at once the first that is shuffled, is the one for training. Others are
Accelerate's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint
from ugro.train import checkpoint as places
from ugro.train.integrations.balanced import Balanced, Turns
from ugro.train.integrations.journal import Supported
from ugro.train.surroundings import Surroundings

Supported("accelerate", (1, 1), (2,)).check()

import torch  # noqa: E402
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import DDPCommunicationHookType, send_to_device  # noqa: E402

_SHARED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_CHECKPOINTS_KEPT = 3


class SharedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """What ``prepare`` returns for the training loader."""

    _drop_last = True  # to Accelerate: the last batch has no samples twice

    def __init__(self, turns: Turns, accelerator: UgroAccelerator) -> None:
        self.turns, self.dataset = turns, turns.dataset
        self.gradient_state = GradientState()
        self._accelerator = accelerator

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in self.turns:
                self.end_of_dataloader = self.turns.is_at_last
                if self._accelerator.ugro.progress.step == 0:
                    self._accelerator.expect_training()
                yield send_to_device(batch, self._accelerator.device) if self._accelerator.device_placement else batch
        finally:
            self.end()

    def set_epoch(self, epoch: int) -> None:
        progress = self._accelerator.ugro.progress
        if progress.epoch != epoch:
            progress.epoch = epoch
            self.turns.go_to(0)


class UgroAccelerator(Accelerator):  # type: ignore[misc]
    def __init__(self, *others: Any, seed: int = 0, most_per_device: int | None = None, **more: Any) -> None:
        """``seed`` is that of the order of the samples; ``most_per_device`` limits how many a device gets at once."""
        if not torch.cuda.is_available() and Surroundings.of(os.environ).ranks > 1:
            more.setdefault("cpu", True)  # without it, Accelerate knows of no other ranks on CPUs
        super().__init__(*others, **more)
        if self.distributed_type not in _SHARED or self.dispatch_batches:
            raise UsageError(
                f"UgroAccelerator shares batches in DDP only, not with {self.distributed_type}",
                hint="use Accelerator itself; dispatch_batches must be off",
            )
        self.ugro = Balanced(seed)
        self._ugro_most = most_per_device
        self._ugro_loader: SharedLoader | None = None
        self._ugro_training: Any = None  # the script's loader that becomes it
        self._ugro_model: Any = None

    # --- prepare ------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        if self._ugro_training is None:
            loaders = [one for one in objects if isinstance(one, torch.utils.data.DataLoader)]
            shuffled = [one for one in loaders if not isinstance(one.sampler, torch.utils.data.SequentialSampler)]
            self._ugro_training = next(iter(shuffled or loaders), None)
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: Any, *others: Any, **more: Any) -> Any:
        if self._ugro_training is None:
            self._ugro_training = data_loader
        if data_loader is not self._ugro_training or self._ugro_loader is not None:
            return super().prepare_data_loader(data_loader, *others, **more)
        if data_loader.batch_size is None:
            raise UsageError("the training loader has no batch_size", hint="give it one, instead of a batch_sampler")
        size = data_loader.batch_size * (1 if self.split_batches else self.num_processes)
        accumulated = self.gradient_accumulation_steps
        turns = Turns(self.ugro, data_loader, size=size, accumulated=accumulated, most=self._ugro_most)
        turns.before_batch = self._ugro_between_batches
        self._ugro_loader = SharedLoader(turns, self)
        self.ugro.announce()
        return self._ugro_loader

    def prepare_model(self, model: Any, *others: Any, **more: Any) -> Any:
        """Wrapped in DDP by Accelerate; a hook for compression is called inside ours, as torch allows one."""
        handler, chosen = self.ddp_handler, DDPCommunicationHookType.NO
        if handler is not None:
            chosen, handler.comm_hook = handler.comm_hook, DDPCommunicationHookType.NO
        try:
            prepared = super().prepare_model(model, *others, **more)
        finally:
            if handler is not None:
                handler.comm_hook = chosen
        is_wrapped = isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
        if is_wrapped or (self.num_processes == 1 and self._ugro_model is None):
            if self._ugro_model is not None:
                raise UsageError("a second model cannot be balanced", hint="put both into one torch.nn.Module")
            self._ugro_model = prepared
            self.ugro.attach(prepared, _hook_of(handler) if is_wrapped else None)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Another training may follow, with another model and loader."""
        self._ugro_loader = self._ugro_training = self._ugro_model = None
        return super().free_memory(*objects)

    # --- a step -------------------------------------------------------------------------------------------------

    def expect_training(self) -> None:
        if self._ugro_model is not None and not self._ugro_model.training:
            raise UsageError(
                "the loader for training is used while the model evaluates",
                hint="prepare the training loader before the one for evaluation, and call model.train()",
            )

    def backward(self, loss: Any, **options: Any) -> None:
        turns = self._ugro_loader.turns if self._ugro_loader is not None else None
        if turns is None or turns.portion is None:
            super().backward(loss, **options)
            return
        weighted = loss * turns.weight()
        part = weighted.detach() / (self.ugro.ranks * self.gradient_accumulation_steps)
        self.ugro.before_backward(part)
        super().backward(weighted, **options)
        is_synced = getattr(self._ugro_model, "require_backward_grad_sync", self.sync_gradients)
        self.ugro.after_backward(is_synced=bool(is_synced))

    # --- epochs and checkpoints ---------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs, including one that was interrupted."""
        progress, order = self.ugro.progress, self.ugro.order
        if order is None:
            raise UsageError("there is no training loader yet", hint="call accelerator.prepare(…) before the epochs")
        self.ugro.announce(count * order.steps)
        begin = progress.epoch + (progress.cursor >= order.end)
        for epoch in range(begin, count):
            yield epoch
            if epoch + 1 < count:
                self._ugro_between_batches()

    def resume(self) -> bool:
        """Loads the checkpoint that UGRO resumes from, if there is one. Call it after ``prepare``."""
        found = places.resumable(places.STATE)
        if found is not None:
            self.load_state(str(found.parent))
        return found is not None

    def save_state(self, output_dir: str | None = None, *others: Any, **more: Any) -> Any:
        """Without a folder, in a new one where UGRO looks for checkpoints."""
        is_named = output_dir is not None or self.project_configuration.automatic_checkpoint_naming
        if not is_named:
            return self._ugro_save()
        with self.ugro.pause():
            self.ugro.expect_finite()
            place = super().save_state(output_dir, *others, **more)
            self._ugro_complete(Path(str(place)))
            if self.ugro.is_main:
                places.publish(Path(str(place)), self._ugro_name(), _CHECKPOINTS_KEPT)
            self.ugro.run._group.barrier()
        return place

    def load_state(self, input_dir: str | None = None, *others: Any, **more: Any) -> None:
        super().load_state(input_dir, *others, **more)
        if input_dir is None:
            input_dir = str(places.numbered(Path(self.project_dir, "checkpoints"), "checkpoint_0")[-1])
        state = places.read_state(Path(input_dir))
        if state is None or self._ugro_loader is None:
            return
        self._ugro_loader.turns.load_state_dict(state)
        if self.ugro.rank < len(state["random"]):
            checkpoint.set_random_state(state["random"][self.ugro.rank].encode())

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that was restored is there already."""
        if dataloader is not self._ugro_loader or self._ugro_loader is None:
            return super().skip_first_batches(dataloader, num_batches)
        self._ugro_loader.turns.go_to(num_batches)
        return self._ugro_loader

    def _ugro_between_batches(self) -> None:
        if self.ugro.stops:
            self._ugro_save()
            self.ugro.leave()

    def _ugro_name(self) -> str:
        return f"step_{self.ugro.progress.step:09}"

    def _ugro_save(self) -> Path:
        """Written under another name until it is complete. Each rank writes to a folder on its own node."""
        folder = self.ugro.run.surroundings.checkpoints
        unfinished, finished = folder / f".{self._ugro_name()}.partial", folder / self._ugro_name()
        with self.ugro.pause():
            self.ugro.expect_finite()
            super().save_state(str(unfinished))
            self._ugro_complete(unfinished)
            if self.ugro.is_main:
                shutil.rmtree(finished, ignore_errors=True)  # of an earlier attempt, which got as far
                os.rename(unfinished, finished)
                for old in places.numbered(folder, finished.name)[:-_CHECKPOINTS_KEPT]:
                    shutil.rmtree(old)
            self.ugro.run._group.barrier()
            shutil.rmtree(unfinished, ignore_errors=True)  # on nodes other than the first one
        self.ugro.note_checkpoint(finished)
        return finished

    def _ugro_complete(self, folder: Path) -> None:
        states = self.ugro.random_states()  # and with it all ranks have written theirs
        if self.ugro.is_main:
            places.write_state(folder, {**self.ugro.state(), "random": states})


def _hook_of(handler: Any) -> Any:
    """The script's choice of compression, as a function of a bucket."""
    if handler is None or handler.comm_hook == DDPCommunicationHookType.NO:
        return None
    noted = _Noted()
    handler.register_comm_hook(noted)
    return lambda _, bucket: noted.hook(noted.state, bucket)


class _Noted:
    """Stands for the model, to which Accelerate would give the hook."""

    state: Any = None
    hook: Any = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook
