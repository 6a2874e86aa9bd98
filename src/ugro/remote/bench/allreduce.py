"""PyTorch's all-reduce, as one rank of several; the first rank decides how often, and says what it took."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from datetime import timedelta
from typing import Any, Dict, List

from ugro.remote.bench.meter import end_of, say, skip, times

_MOST = 200


def allreduce(params: Dict[str, Any]) -> None:
    if params.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = str(params["interface"])
        os.environ["NCCL_SOCKET_IFNAME"] = "=%s" % params["interface"]  # without the sign, all that begin with it
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    say(phase="importing PyTorch")
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, world, limit = int(params["rank"]), int(params["world"]), timedelta(seconds=float(params["limit_s"]))
    place = "cpu"
    if params["backend"] == "nccl":
        place = "cuda:%d" % int(params["gpu"])
        torch.cuda.set_device(place)
    say(phase="all-reduce")
    store = dist.TCPStore(str(params["address"]), int(params["port"]), world, rank == 0, limit)
    dist.init_process_group(str(params["backend"]), store=store, rank=rank, world_size=world, timeout=limit)
    try:
        sizes = [int(size) for size in params["sizes"]]
        _Sizes(torch, dist, place, rank).measure(sizes, float(params["seconds"]), limit.total_seconds())
    finally:
        dist.destroy_process_group()


class _Sizes:
    def __init__(self, torch: Any, dist: Any, place: str, rank: int) -> None:
        self._torch = torch
        self._dist = dist
        self._place = place
        self._rank = rank

    def measure(self, sizes: List[int], seconds: float, limit_s: float) -> None:
        until = end_of(seconds, limit_s)
        expected_s, before = 0.0, 0
        for place, size in enumerate(sizes):
            left = until - time.monotonic()
            # From the size before; all ranks must do the same, so the first one decides.
            expected_s = expected_s * size / before if before else 0.0
            if not self._agreed(int(2 * expected_s <= left and left > 0)):
                if self._rank == 0:
                    skip("all-reduce of %d MB" % (size // 10**6), "there was no time left")
                continue
            expected_s, before = self._one_size(size, max(0.0, left / (len(sizes) - place))), size

    def _one_size(self, size: int, seconds: float) -> float:
        # Zeros: their sum stays as it is, however often it is made.
        values = self._torch.zeros(size // 4, device=self._place)
        self._reduce(values)  # opens connections
        first = times(lambda: self._reduce(values), 0.0)[0]
        count = self._agreed(max(1, min(_MOST, int(seconds / first) - 2)))
        found = times(lambda: self._reduce(values), float("inf"), count)
        if self._rank == 0:
            say(allreduce={"size_bytes": size, "seconds": statistics.median(found)})
        return statistics.median(found)

    def _reduce(self, values: Any) -> None:
        self._dist.all_reduce(values)
        if self._place != "cpu":
            self._torch.cuda.synchronize()

    def _agreed(self, number: int) -> int:
        value = self._torch.tensor([number], device=self._place)
        self._dist.broadcast(value, 0)
        return int(value.item())
