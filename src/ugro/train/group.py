"""The process group of a run: rendezvous, exchange of small values, sum of gradients.

With one rank there is no process group.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import Clock

_SENT_PIECE = 4 << 20  # small enough to be there within a limit for silence, also over a slow network
_TELL_S = 1.0
_GRADIENT_PIECE = 25 << 20  # bytes per all-reduce, like DDP's buckets, to avoid a second copy of all gradients


Exchange = Callable[[], list[bytes]]
Content = bytes | bytearray | memoryview
Result = TypeVar("Result")


class Group:
    def __init__(self, surroundings: Surroundings, device: Any, *, is_elastic: bool = False) -> None:
        """``is_elastic``: its members change, and who they are is decided elsewhere (``meet``)."""
        self.rank = surroundings.rank
        self.ranks = surroundings.ranks
        self.device = device
        self.is_distributed = is_elastic or self.ranks > 1
        # Does an exchange between two steps again if a rank is lost meanwhile; None: the loss is an error.
        self.again: Callable[[Exchange], list[bytes]] | None = None
        # Around an exchange between two steps.
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        self._small: Any = None  # for small values on the CPU
        if self.ranks > 1 and not is_elastic:
            self.meet()
        self.nodes: tuple[str, ...] = () if is_elastic else tuple(self.texts(surroundings.node))  # of each rank

    @property
    def small(self) -> Any:
        """All ranks, for small values on the CPU; None with one rank."""
        return self._small

    def begin_alone(self) -> None:
        """Makes a process group of one rank, for what works with a group only."""
        from torch import distributed

        if self.ranks == 1 and not distributed.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)

    def meet(self, store: Any = None, timeout_s: float | None = None) -> None:
        """``store``: where; none: as the environment says."""
        # DDP imports this. Its functions keep the group that exists at import, and with it Gloo's threads.
        import_module("torch.distributed.nn.functional")
        from torch import distributed

        if not distributed.is_initialized():
            more = {} if store is None else {"store": store, "rank": self.rank, "world_size": self.ranks}
            limit = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo", **more, **limit)
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        # NCCL exchanges GPU memory only, and reading that back would stop the GPU.
        is_gloo = distributed.get_backend() == "gloo"
        self._small = distributed.group.WORLD if is_gloo else distributed.new_group(backend="gloo")

    def limit(self, timeout_s: float) -> None:
        """How long an exchange may take from now on."""
        from torch import distributed
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in {distributed.group.WORLD, self._small}:
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def leave(self) -> None:
        """Gives up a group that may be broken: what waits for this rank in it fails at once."""
        from torch import distributed

        self._small = None
        if not distributed.is_initialized():
            return
        if distributed.get_backend() == "nccl":
            # Ends kernels that wait for a rank that is gone; ordinary destruction would wait for them.
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()

    def gather(self, values: Sequence[float]) -> Gathering:
        return Gathering(values, self._small, self.ranks)

    def arrival(self, clock: Clock) -> Arrival | None:
        """Shows when the devices of all ranks have done what was exchanged before. None: they have, since a wait with
        this backend lasts until the data is there. All ranks call it, after all that they exchanged."""
        from torch import distributed

        return None if self._small is distributed.group.WORLD else Arrival(clock, self)

    def numbers(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each rank."""
        own = list(values)
        found = self.contents(struct.pack(f"<{len(own)}d", *own))
        return [list(struct.unpack(f"<{len(one) // 8}d", one)) for one in found]

    def texts(self, text: str) -> list[str]:
        """The value of each rank."""
        return [content.decode("utf-8", "replace") for content in self.contents(text.encode())]

    def contents(self, content: bytes) -> list[bytes]:
        with self.together():
            if self.again is None:
                return self.plain_contents(content)
            return self.again(lambda: self.plain_contents(content))

    def plain_contents(self, content: bytes) -> list[bytes]:
        if self.ranks == 1:
            return [content]
        import torch
        from torch import distributed

        sizes = [int(size) for (size,) in self.gather([float(len(content))]).wait()]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        own[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
        all_of_them = [torch.empty_like(own) for _ in sizes]
        distributed.all_gather(all_of_them, own, group=self._small)
        return [bytes(part[:size].tolist()) for part, size in zip(all_of_them, sizes, strict=True)]

    def second(self) -> Any:
        """Another group of the same ranks, for an exchange that goes on beside others. All ranks call it."""
        from torch import distributed

        return distributed.new_group()

    def barrier(self) -> None:
        self.contents(b"")

    def send(self, content: Content, source: int, told: Callable[[int, int], None] | None = None) -> Content:
        """The content of one rank, on every rank. ``told``: how many bytes of how many are sent."""
        if self.ranks == 1:
            return content
        import torch
        from torch import distributed

        sizes = self.gather([float(memoryview(content).nbytes)]).wait()
        size = int(sizes[source][0])
        is_source = self.rank == source
        if is_source:
            whole = bytearray(content) if memoryview(content).readonly else content
        else:
            whole, buffer = bytearray(), bytearray(min(_SENT_PIECE, size))
        for begin in range(0, size, _SENT_PIECE):
            count = min(_SENT_PIECE, size - begin)
            piece = torch.frombuffer(
                whole if is_source else buffer, dtype=torch.uint8, offset=begin if is_source else 0, count=count
            )
            distributed.broadcast(piece, source, group=self._small)
            if not is_source:
                whole += memoryview(buffer)[:count]  # type: ignore[operator]  # a bytearray
            if told is not None:
                told(begin + count, size)
        return whole

    def while_others_wait(
        self, work: Callable[[], Result], reached: Callable[[], float], told: Callable[[list[list[float]]], None]
    ) -> Result:
        """Works, and tells the others every second that it does, and how far it is: a limit counts silence, not work.

        All ranks call it, also those that have nothing to do, and return when all are done. From another thread,
        ``reached`` is asked how far it is, and ``told`` gets what each rank says: whether it is done, and how far.
        """
        ended = threading.Event()
        failures: list[RuntimeError] = []
        telling = threading.Thread(
            target=self._tell_until, args=(ended, reached, told, failures), name="ugro telling", daemon=True
        )
        telling.start()
        try:
            result = work()
        finally:
            ended.set()
            telling.join()
        if failures:
            raise failures[0]
        return result

    def _tell_until(
        self,
        ended: threading.Event,
        reached: Callable[[], float],
        told: Callable[[list[list[float]]], None],
        failures: list[RuntimeError],
    ) -> None:
        try:
            while True:
                is_done = ended.wait(_TELL_S)
                said = self.gather([float(is_done), reached()]).wait()
                told(said)
                if all(one[0] for one in said):
                    return
        except RuntimeError as error:
            failures.append(error)
            while not ended.wait(_TELL_S):
                reached()

    def average(self, parameters: Sequence[Any]) -> None:
        """Averages the gradients over all ranks, as DDP would; a missing gradient counts as zero."""
        import torch

        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.ranks > 1:
            for piece in _pieces([parameter.grad for parameter in parameters]):
                self._average(piece)

    def _average(self, gradients: list[Any]) -> None:
        import torch
        from torch import distributed

        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.ranks)
        distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def close(self) -> None:
        from torch import distributed

        self._small, self.together = None, nullcontext
        if distributed.is_initialized():
            distributed.destroy_process_group()


class Arrival:
    """One from each rank, added up behind everything that was exchanged before.

    With NCCL a wait only orders the GPU's work, and the host knows nothing. Exchanges of a group are done in order: the
    sum is the number of ranks only when every device has come to it, and not after an exchange that was aborted.
    """

    def __init__(self, clock: Clock, group: Group) -> None:
        import torch
        from torch import distributed

        self._clock, self._ranks = clock, group.ranks
        ones = torch.ones(1, device=group.device)
        distributed.all_reduce(ones)
        self._sum, self._read = clock.kept(ones), clock.now()

    def is_there(self) -> bool:
        return self._clock.has_come(self._read) and float(self._sum) == self._ranks


class Gathering:
    """Numbers of each rank that are being exchanged."""

    def __init__(self, values: Sequence[float], group: Any, ranks: int) -> None:
        self._own = list(values)
        self._work: Any = None
        if ranks > 1:
            import torch
            from torch import distributed

            own = torch.tensor(self._own, dtype=torch.float64)
            self._parts = [torch.empty_like(own) for _ in range(ranks)]
            self._work = distributed.all_gather(self._parts, own, group=group, async_op=True)

    def wait(self) -> list[list[float]]:
        if self._work is None:
            return [self._own]
        self._work.wait()
        return [part.tolist() for part in self._parts]


def _pieces(gradients: Sequence[Any]) -> list[list[Any]]:
    """Buckets of one type each, in order, limited in size."""
    pieces: list[list[Any]] = []
    size = 0
    for gradient in gradients:
        nbytes = gradient.numel() * gradient.element_size()
        is_other = not pieces or pieces[-1][0].dtype != gradient.dtype or pieces[-1][0].device != gradient.device
        if is_other or size + nbytes > _GRADIENT_PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(gradient)
        size += nbytes
    return pieces


# --- frozen -----------------------------------------------------------------------------------------------------------
# Frozen parameters are not sent when a training starts: with LoRA they are nearly all, and every node has read them.
#
# DDP sends all parameters of the first rank to the others, gigabytes over a LAN. Ranks compare a digest instead, and
# only if theirs differ are the frozen ones sent too.


_FROZEN = "frozen"  # DDP asks only if there is something
_WHOLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def leave_out(model: Any, group: Group) -> None:
    """Tells DDP which parameters not to send. All ranks call it."""
    is_same = len(set(group.texts(digest(model, frozen := names(model))))) == 1
    ignore(model, frozen if is_same else [])


def names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def ignore(model: Any, frozen: list[str]) -> None:
    """DDP ignores these instead of those that were frozen before; what the script itself has told it stays."""
    from torch.nn.parallel import DistributedDataParallel

    before = {name for name, one in model.named_parameters() if getattr(one, "_ddp_ignored", None) == _FROZEN}
    others = [name for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ()) if name not in before]
    parameters = dict(model.named_parameters())
    for name in before:
        del parameters[name]._ddp_ignored
    frozen = [name for name in frozen if name not in others]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*others, *frozen])
    for name in frozen:
        parameters[name]._ddp_ignored = _FROZEN


def digest(model: Any, names: list[str]) -> str:
    """Of names, kinds and contents; a sum over the bits is the same on every device, in any order of summation."""
    found = hashlib.sha256()
    parameters = dict(model.named_parameters())
    for name in names:
        one = parameters[name].detach()
        found.update(f"{name} {one.dtype} {tuple(one.shape)} {_bits(one)}\n".encode())
    return found.hexdigest()


def _bits(values: Any) -> int:
    import torch

    kind = getattr(torch, _WHOLE[values.element_size()])
    return int(values.contiguous().view(kind).sum(dtype=torch.int64))
