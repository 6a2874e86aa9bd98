"""``client.services``: models and commands behind an HTTP API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ugro.client.http import path_of, text_of
from ugro.client.jobs import Asking, body_of
from ugro.features.services.model import Phase, ReplicaPhase, ReplicaReport, ServiceReport
from ugro.features.services.operations import (
    DecideUpdateOfService,
    GetService,
    ListServices,
    OneService,
    ScaleService,
    StopService,
    WatchService,
)
from ugro.kernel.operations.request import Request
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import TimedOut

_LOOK_S = 0.2
_PREPARE_S = 6 * 3600.0  # a model may have to be read
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServiceWish:
    """What to serve. ``fields``: of the replicas' jobs, named like the command line's options, with ``command`` and
    ``name``; ``options``: keys of a service file, such as ``replicas``, ``port`` and ``probes.ready.path``."""

    model: str | None = None  # a job, or a folder
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    force: bool = False  # even if its code is very large


def _nobody(text: str) -> None:
    pass


class ServiceCalls(Asking):
    """Created by ``Client``."""

    def start(
        self,
        wish: ServiceWish | None = None,
        file: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> ServiceReport:
        """Returns when it is recorded; ``wait`` waits until it is ready. The same key is the same service."""
        return self._prepared("/v1/services", _request(wish or ServiceWish(), file, key), env)

    def update(
        self,
        name: str,
        wish: ServiceWish,
        *,
        canary: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ServiceReport:
        """Replaces what it serves, one replica after the other. ``canary``: a share of requests, until ``decide``."""
        body = {"request": _request(wish, None, None), "canary": canary}
        return self._prepared(f"{path_of('services', name)}/update", body, env)

    def decide(self, name: str, *, promotes: bool) -> ServiceReport:
        """About an update: on to its end, or back."""
        return self._one(DecideUpdateOfService(name, promotes))

    def scale(self, name: str, replicas: int) -> ServiceReport:
        return self._one(ScaleService(name, replicas))

    def stop(self, name: str) -> ServiceReport:
        """Returns at once; ``wait_stopped`` waits until nothing of it runs."""
        return self._one(StopService(name))

    def listed(self, *, everything: bool = False) -> list[ServiceReport]:
        asked = ListServices(everything)
        return list(asked.read(self._ask(*asked.to_wire())).services)

    def get(self, name: str) -> ServiceReport:
        return self._one(GetService(name))

    def watch(self, name: str) -> Iterator[ServiceReport]:
        """Yields the service now and after changes, until it is over; survives the end of the agent."""
        path = WatchService(name).to_wire()[1]
        return self._watched(ServiceReport, path, lambda found: path)

    def wait(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        on_progress: Say = _nobody,
        is_done: Callable[[ServiceReport], bool] | None = None,
    ) -> ServiceReport:
        """Returns when all replicas are ready and no update runs, or it has failed. Raises TimedOut."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.get(name)
            if found.is_over or found.state is Phase.FAILED or (is_done or is_settled)(found):
                return found
            if deadline is not None and time.monotonic() > deadline:
                raise TimedOut(f"the service {name} is {found.state}: {found.reason}")
            on_progress(found.update or found.reason or str(found.state))
            time.sleep(_LOOK_S)

    def wait_stopped(self, name: str, *, on_progress: Say = _nobody) -> ServiceReport:
        return self.wait(name, on_progress=on_progress, is_done=lambda found: found.ended_at is not None)

    # --- asking --------------------------------------------------------------------------------------------------

    def _prepared(self, path: str, body: dict[str, Any], env: Mapping[str, str] | None) -> ServiceReport:
        return decode(ServiceReport, self._submitted(path, body, env, timeout_s=_PREPARE_S)["service"])

    def _one(self, asked: Request[OneService]) -> ServiceReport:
        return asked.read(self._ask(*asked.to_wire())).service


def is_settled(found: ServiceReport) -> bool:
    """All that was asked for is done: the door knows every replica, or they have failed for good."""
    if found.is_canary:
        new = [one for one in found.replicas if one.is_new]
        return bool(new) and all(_is_served(one) for one in new)
    if found.update or not found.door.is_open or len(found.replicas) != found.wanted:
        return False
    return all(_is_served(one) or one.state is ReplicaPhase.FAILED for one in found.replicas)


def _is_served(one: ReplicaReport) -> bool:
    return one.state is ReplicaPhase.READY and one.weight is not None


def _request(wish: ServiceWish, file: Path | None, key: str | None) -> dict[str, Any]:
    submit = {**body_of(None, wish.fields, key), "force": wish.force}
    body: dict[str, Any] = {"submit": submit, "model": wish.model, "options": dict(wish.options)}
    if file is not None:
        submit["here"] = str(file.absolute().parent)
        body |= {"text": text_of(file, "a service file"), "file": str(file)}
    return body
