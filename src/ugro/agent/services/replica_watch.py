"""What the programs of replicas say on their nodes: one connection through the link for each, as long as it runs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping

from ugro.agent.support.change_signal import ChangeSignal
from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import UgroError
from ugro.core.service import ProbeReport
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes import tunnels
from ugro.nodes.runs import Identity
from ugro.nodes.tunnels import SocketTarget
from ugro.policy.lifecycle.backoff import delay_s
from ugro.remote import foreign
from ugro.workloads.service_jobs import STATUS_SOCKET

log = logging.getLogger(__name__)

Run = tuple[int, int]  # a job and its attempt
_READY_S = 10.0
_LONGEST_LINE = 64 * 1024
_SILENT_S = 30.0  # its program says something every 10 s


class ReplicaWatch:
    def __init__(self, cluster: Cluster, identity: Callable[[], Identity]) -> None:
        self._cluster = cluster
        self._identity = identity
        self._tasks: dict[Run, asyncio.Task[None]] = {}
        self._kept: dict[int, frozenset[Run]] = {}  # by service
        self._reports: dict[Run, ProbeReport] = {}
        self.changed = ChangeSignal()

    def keep(self, service: int, runs: Mapping[Run, str]) -> None:
        """Listens to these runs of a service, each on its node, and to no others of it."""
        for run in self._kept.get(service, frozenset()) - runs.keys():
            self._tasks.pop(run).cancel()
            self._reports.pop(run, None)
        self._kept[service] = frozenset(runs)
        for run, node in runs.items():
            if run not in self._tasks:
                self._tasks[run] = asyncio.create_task(self._listen(run, node), name=f"listen to job {run[0]}")

    def report(self, run: Run) -> ProbeReport | None:
        return self._reports.get(run)

    def close(self) -> None:
        for service in list(self._kept):
            self.keep(service, {})

    async def _listen(self, run: Run, node: str) -> None:
        """What was said last stays while the connection is away: the node may be busy, and the door asks by itself."""
        failures = 0
        while True:
            try:
                async for report in self._said(run, node):
                    failures = 0
                    if self._reports.get(run) != report:
                        self._reports[run] = report
                        self.changed.notify()
            except (UgroError, TimeoutError, DecodeError, ValueError) as error:
                log.debug("job %d on %s cannot be listened to: %s", run[0], node, error)
            failures += 1
            await asyncio.sleep(delay_s(failures, 0.5, base_s=0.1, cap_s=2.0))

    async def _said(self, run: Run, node: str) -> AsyncIterator[ProbeReport]:
        target = SocketTarget(*run, STATUS_SOCKET)
        place = self._cluster.inventory.get(node)
        duplex = await tunnels.connect(place, self._identity(), target, ready_s=_READY_S)
        left = b""
        try:
            pieces = aiter(duplex)
            while True:
                async with asyncio.timeout(_SILENT_S):
                    _, piece = await anext(pieces)
                if not piece:
                    return
                *lines, left = (left + piece).split(b"\n")
                if len(left) > _LONGEST_LINE:
                    raise ValueError("a line that does not end")
                for line in lines:
                    if line:
                        yield _parsed(line)
        except StopAsyncIteration:
            return
        finally:
            duplex.cancel()


def _parsed(line: bytes) -> ProbeReport:
    report = decode(ProbeReport, foreign.parsed(line))
    figures = report.figures
    for number in (figures.prompt_tokens, figures.generated_tokens, figures.batch_size):
        if number is not None and not math.isfinite(number):
            raise ValueError("a figure that is no number")
    return report
