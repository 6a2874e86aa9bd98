"""What the nodes last said of our runs, asked again as long as something of ours is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.nodes.inventory import Inventory
from ugro.nodes.runs import Identity, Runs, RunStatus
from ugro.policy.attempt import NodeRun, RunState

_STATES = {"starting": RunState.STARTING, "running": RunState.RUNNING, "dead": RunState.DEAD}
_ANSWER_S = 10.0
_CONNECT_S = 3.0


class RunWatch:
    def __init__(self, inventory: Inventory, identity: Identity) -> None:
        self._inventory = inventory
        self._identity = identity
        self._seen: dict[str, dict[tuple[int, int], RunStatus]] = {}
        self._silent_since: dict[str, float] = {}
        self._problems: dict[tuple[str, int, int], str] = {}
        self._closed: set[tuple[str, int, int]] = set()  # never came to be there, and never will

    def runs(self, node: str) -> Runs:
        """Raises NotFound for a node that is no longer part of the cluster."""
        return Runs(self._inventory.get(node), self._identity, _CONNECT_S, _ANSWER_S)

    async def refresh(self, nodes: Iterable[str]) -> None:
        """A node that does not answer keeps nobody waiting for longer than one attempt to reach it."""
        await asyncio.gather(*(self._ask(node) for node in nodes))

    def silent_s(self, node: str) -> float:
        since = self._silent_since.get(node)
        return time.monotonic() - since if since is not None else 0.0

    def status(self, node: str, job: int, attempt: int) -> RunStatus | None:
        return self._seen.get(node, {}).get((job, attempt))

    def state(self, node: str, job: int, attempt: int) -> NodeRun:
        is_reachable = node not in self._silent_since
        problem = self._problems.get((node, job, attempt))
        if (node, job, attempt) in self._closed:
            return NodeRun(node, RunState.FAILED, is_reachable, problem)
        if node not in self._seen:
            return NodeRun(node, RunState.UNKNOWN, is_reachable, problem)
        status = self.status(node, job, attempt)
        if status is None:
            return NodeRun(node, RunState.ABSENT, is_reachable, problem)
        if status.status == "dead" and not status.is_claimed:
            # Made, and nothing of it was ever started: to be asked for (again), which does no harm.
            return NodeRun(node, RunState.ABSENT, is_reachable, problem)
        if status.has_ended:
            state = RunState.DONE if status.outcome == "succeeded" else RunState.FAILED
            return NodeRun(node, state, is_reachable, problem)
        return NodeRun(node, _STATES[status.status], is_reachable, problem)

    def learn(self, node: str, status: RunStatus) -> None:
        key = (int(status.job), status.attempt)
        if status.status == "absent":
            self._closed.add((node, *key))
        else:
            self._seen.setdefault(node, {})[key] = status

    def note_problem(self, node: str, job: int, attempt: int, text: str) -> None:
        self._problems[node, job, attempt] = text

    def forget(self, job: int, attempt: int, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._seen.get(node, {}).pop((job, attempt), None)
            self._problems.pop((node, job, attempt), None)
            self._closed.discard((node, job, attempt))

    async def _ask(self, node: str) -> None:
        try:
            statuses = await self.runs(node).list()
        except (Unreachable, TimedOut, RemoteFailure, NotFound):
            self._silent_since.setdefault(node, time.monotonic())
            return
        self._silent_since.pop(node, None)
        self._seen[node] = {(int(status.job), status.attempt): status for status in statuses if status.job.isdigit()}
