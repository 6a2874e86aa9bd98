"""A process group whose ``wait`` returns before the data is there, as NCCL's does: it only orders what a device does.

The device is a thread that does one thing after the other, as the stream of a GPU does. What a rank that is lost still
owed stays out: the exchange stands until the group is given up, and then leaves what had arrived, as an aborted kernel
does. What was queued behind it runs then.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

_STUCK_S = 1.0


class Device:
    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self.is_given_up = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, kernel: Callable[[], None]) -> None:
        self._is_idle.clear()
        self._queue.put(kernel)

    def settle(self) -> None:
        """What a host reads is there, unless the device is stuck."""
        self._is_idle.wait(_STUCK_S)

    def _run(self) -> None:
        while True:
            kernel = self._queue.get()
            kernel()
            if self._queue.empty():
                self._is_idle.set()


class Done(distributed._Work):  # type: ignore[misc]
    """It waits for nothing, and says that all is well."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Late(distributed.ProcessGroup):  # type: ignore[misc]
    """Sums are late; all else is Gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, device: Device, before: Callable[[], None]):
        super().__init__(rank, size)
        self._gloo: Any = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self._device, self._before = device, before

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "late"

    def allreduce(self, tensors: list[Any], options: Any = None) -> Done:
        self._device.put(lambda: self._sum(tensors[0]))
        return Done(tensors)

    def allgather(self, *arguments: Any) -> Any:
        return self._gloo.allgather(*arguments)

    def broadcast(self, *arguments: Any) -> Any:
        return self._gloo.broadcast(*arguments)

    def _sum(self, tensor: Any) -> None:
        """In two parts, so that one of them can be missing."""
        first, *second = tensor.view(-1).chunk(2)
        try:
            self._add_up(first)
            for part in second:
                self._before()
                self._add_up(part)
        except RuntimeError:
            self._device.is_given_up.wait()

    def _add_up(self, part: Any) -> None:
        summed = part.clone()
        if self._gloo is None:
            raise RuntimeError("the group was given up")
        self._gloo.allreduce([summed]).wait()
        part.copy_(summed)

    def shutdown(self) -> None:
        self._gloo = None  # its threads end before the process does
        self._device.is_given_up.set()

    abort = shutdown


class LateSgd(torch.optim.Optimizer):  # type: ignore[misc]
    """With momentum. A step is queued on the device, behind what is exchanged."""

    def __init__(self, parameters: Any, device: Device, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._device = device
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        given = [(one, one.grad, group["lr"]) for one in group["params"] if one.grad is not None]
        self._device.put(lambda: self._apply(given))

    def _apply(self, given: list[tuple[Any, Any, float]]) -> None:
        for parameter, gradient, lr in given:
            momentum = self.state[parameter]["momentum"].mul_(0.9).add_(gradient)
            parameter.data.add_(momentum, alpha=-lr)


def begin(lost_at: int | None, step_of: Callable[[], int]) -> Device:
    """Makes it the group that all ranks begin in. ``lost_at``: this rank is killed in an exchange of that step."""
    device, main = Device(), threading.Event()

    def before() -> None:
        if lost_at is None or step_of() < lost_at:
            return
        # Its host goes on, if it does not wait for the device.
        limit = time.monotonic() + 1.0
        while step_of() == lost_at and time.monotonic() < limit:
            main.wait(0.01)
        main.wait(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def made(store: Any, rank: int, size: int, timeout: Any) -> Late:
        return Late(store, rank, size, timeout, device, before)

    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return device
    distributed.Backend.register_backend("late", made, devices=["cpu"])
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group_store = distributed.PrefixStore("late", store)
    distributed.init_process_group("late", store=group_store, rank=rank, world_size=ranks)
    return device
