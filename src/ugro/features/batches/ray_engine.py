"""The engine ``ray``: one actor for each CPU of a Ray cluster.

The function and what is shared are put into the object store once. Batches and answers above 100 kB travel through it,
too, and arrays inside are read there without a copy. Ray is imported when the engine is made.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ugro.features.batches import worker
from ugro.features.batches import worker as frames
from ugro.features.batches import worker as ray_worker
from ugro.features.batches import worker as script
from ugro.features.batches.model import Answered, Event, FunctionUnusable, Parts, SlotLost, SlotReady
from ugro.kernel.support.errors import Unreachable, Unsatisfiable

_NOTE_S = 10.0  # to read the note of an actor that ended
_KNOCK_S = 5.0
_GOODBYE_S = 1.0  # for idle actors to remove their files
_LONELY_S = 10.0  # without any slot, until the user is told why
_AT_IMPORT: dict[str, str] = {}  # settings that were there as we imported Ray, which reads its token then
log = logging.getLogger(__name__)


class RayEngine:
    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        *,
        shows_output: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """``shows_output``: what the function prints, on the driver's stdout.

        ``settings``: those that Ray reads from the environment alone, as the token of a cluster.
        """
        with ExitStack() as begun:
            if is_ours := not _is_connected():
                begun.enter_context(_in_environment(settings or {}))
            self._ray = _imported()
            if is_ours:
                _connect(self._ray, address, shows_output)
                begun.callback(self._ray.shutdown)
            self._workers = workers or int(self._ray.cluster_resources().get("CPU", 0))
            if not self._workers:
                raise Unsatisfiable("the Ray cluster has no CPUs", hint="give it some: ray start --num-cpus")
            self._ending = begun.pop_all()
        for module in (frames, worker, ray_worker, script):
            self._ray.cloudpickle.register_pickle_by_value(module)
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0)(ray_worker.RayWorker)
        self._slots: dict[int, _Slot] = {}
        self._published: dict[str, Any] = {}
        self._names = 0
        self._started = 0
        self._has_warned = False

    def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
        """By Ray's own copy of cloudpickle, which every node has."""
        return bytes(self._ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback))

    def start(self) -> int:
        for _ in range(self._workers):
            self.replace()
        return self._workers

    def replace(self) -> None:
        self._started += 1
        actor = self._actor_class.options(scheduling_strategy="SPREAD").remote()
        self._slots[self._started] = _Slot(self._started, actor, deque([actor.where.remote()]))

    def publish(self, parts: Parts) -> str:
        self._names += 1
        name = str(self._names)
        try:
            self._published[name] = self._ray.put(frames.wrapped(parts))
        except self._ray.exceptions.ObjectStoreFullError as error:
            hint = "share less, or give Ray more object store memory"
            raise FunctionUnusable("the object store has no room for what is shared", hint=hint) from error
        return name

    def withdraw(self, name: str) -> None:
        del self._published[name]

    def send(self, slot: int, parts: Parts) -> None:
        if slot not in self._slots:
            return
        one = self._slots[slot]
        # In a list: Ray would otherwise fetch them before the call, each time.
        news = {name: [reference] for name, reference in self._published.items() if name not in one.known}
        one.known |= news.keys()
        one.answers.append(one.actor.work.remote(frames.wrapped(parts), news))

    def end(self, slot: int) -> None:
        if slot in self._slots:
            self._ray.kill(self._slots[slot].actor, no_restart=True)

    def wait(self, timeout_s: float | None) -> list[Event]:
        oldest = {slot.answers[0]: slot for slot in self._slots.values() if slot.answers}
        if not oldest:
            return []
        is_lonely = not self._has_warned and not any(slot.is_ready for slot in self._slots.values())
        limit_s = timeout_s if not is_lonely else _LONELY_S if timeout_s is None else min(timeout_s, _LONELY_S)
        ready, _ = self._ray.wait(list(oldest), num_returns=1, timeout=limit_s, fetch_local=False)
        if is_lonely and not ready and limit_s == _LONELY_S:
            self._has_warned = True
            log.warning("waiting for a free CPU of the Ray cluster; another pool or job may hold them all")
        if ready and len(oldest) > 1:
            ready, _ = self._ray.wait(list(oldest), num_returns=len(oldest), timeout=0, fetch_local=False)
        return [self._outcome(oldest[reference], reference) for reference in ready]

    def _outcome(self, slot: _Slot, reference: Any) -> Event:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            del self._slots[slot.number]
            return self._lost(slot, error)
        slot.answers.popleft()
        if slot.is_ready:
            return Answered(slot.number, frames.unwrapped(answer))
        slot.node, slot.node_id, slot.note_path = answer
        slot.is_ready = True
        return SlotReady(slot.number, slot.node)

    def _lost(self, slot: _Slot, error: Exception) -> SlotLost:
        # Ray's own text lists all common causes, and does not know which it was.
        is_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
        reason = "out of memory" if is_memory else "its Ray actor died"
        if not slot.is_ready:
            return SlotLost(slot.number, reason, is_innocent=True)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_its_node = NodeAffinitySchedulingStrategy(slot.node_id, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0)(ray_worker.read_note)
        try:
            at = self._ray.get(task.options(scheduling_strategy=on_its_node).remote(slot.note_path), timeout=_NOTE_S)
        except self._ray.exceptions.RayError:  # the node is gone, and no item did that
            return SlotLost(slot.number, "its node was lost", is_innocent=True)
        return SlotLost(slot.number, reason, at)

    def close(self) -> None:
        idle = [slot.actor.remove_note.remote() for slot in self._slots.values() if slot.is_ready and not slot.answers]
        if idle:
            self._ray.wait(idle, num_returns=len(idle), timeout=_GOODBYE_S)
        for slot in self._slots.values():
            self._ray.kill(slot.actor, no_restart=True)
        self._slots.clear()
        self._published.clear()
        self._ending.close()


@dataclass(slots=True)
class _Slot:
    number: int
    actor: Any
    answers: deque[Any]  # references, the oldest first; the first of all says where it is
    known: set[str] = field(default_factory=set)  # names of what it was given
    is_ready: bool = False
    node: str = ""
    node_id: str = ""
    note_path: str = ""


def _imported() -> Any:
    try:
        import ray
        import ray.cloudpickle
        import ray.exceptions
    except ImportError as error:
        hint = "pip install 'ugro[ray]'; without Ray: the engine local, or jobs"
        raise FunctionUnusable("Ray is not installed", hint=hint) from error
    return ray


def _is_connected() -> bool:
    """By the program itself."""
    return "ray" in sys.modules and bool(_imported().is_initialized())


@contextmanager
def _in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """For as long as the connection is there: Ray reads some as it is imported, and some later."""
    if "ray" not in sys.modules:
        _AT_IMPORT.update(settings)
    now = {**os.environ, **_AT_IMPORT}
    if any(now.get(name) != value for name, value in settings.items() if name.startswith("RAY_AUTH_")):
        hint = 'open the pool before you import ray; or set it before the program begins: eval "$(ugro cluster env)"'
        raise FunctionUnusable("Ray was imported before, without the token of this cluster", hint=hint)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(ray: Any, address: str | None, shows_output: bool) -> None:
    where = address or os.environ.get("RAY_ADDRESS") or None
    try:
        _knock(where or "")  # Ray itself would try for minutes
        settings: dict[str, Any] = {"include_dashboard": False} if where is None else {}
        ray.init(address=where, logging_level="warning", log_to_driver=shows_output, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        hint = 'start one: ugro cluster start; then: eval "$(ugro cluster env)"; without Ray: the engine local, or jobs'
        raise Unreachable(f"no Ray cluster at {where or 'this machine'}: {error}", hint=hint) from error


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
