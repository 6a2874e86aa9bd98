"""The process group of a run: rendezvous, exchange of small values, sum of gradients.

With one rank there is no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ugro.train.surroundings import Surroundings

_GRADIENT_PIECE = 25 << 20  # bytes per all-reduce, like DDP's buckets, to avoid a second copy of all gradients


class Group:
    def __init__(self, surroundings: Surroundings, device: Any) -> None:
        self.rank = surroundings.rank
        self.ranks = surroundings.ranks
        self.device = device
        self._small: Any = None  # for small values on the CPU
        if self.ranks > 1:
            self._meet()

    def _meet(self) -> None:
        # DDP imports this. Its functions keep the group that exists at import, and with it Gloo's threads.
        import_module("torch.distributed.nn.functional")
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        # NCCL exchanges GPU memory only, and reading that back would stop the GPU.
        is_gloo = distributed.get_backend() == "gloo"
        self._small = distributed.group.WORLD if is_gloo else distributed.new_group(backend="gloo")

    def gather(self, values: Sequence[float]) -> Gathering:
        return Gathering(values, self._small, self.ranks)

    def texts(self, text: str) -> list[str]:
        """The value of each rank."""
        return [content.decode("utf-8", "replace") for content in self.contents(text.encode())]

    def contents(self, content: bytes) -> list[bytes]:
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

    def barrier(self) -> None:
        self.gather([0.0]).wait()

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

        self._small = None
        if self.ranks > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


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
