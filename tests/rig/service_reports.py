"""A service as its report says, for what shows it."""

from __future__ import annotations

from typing import Any

from ugro.features.services.model import DoorReport, Figures, Phase, ReplicaPhase, ReplicaReport, ServiceReport, Traffic


def service(name: str, **changes: Any) -> ServiceReport:
    """With two replicas, of which one is ready."""
    traffic = Traffic(100, 2, 3, 4, 12.34, 0.05, 0.2, 0.5)
    replicas = (
        ReplicaReport(
            1, ReplicaPhase.READY, job=7, node="gpu1", weight=80, traffic=traffic, figures=Figures(12, 34, 2.5)
        ),
        ReplicaReport(2, ReplicaPhase.STARTING, "loading", node="gpu2"),
    )
    given: dict[str, Any] = {
        "id": 1,
        "name": name,
        "user": "ann",
        "state": Phase.DEGRADED,
        "reason": "replica 2 is starting: loading",
        "url": "http://127.0.0.1:8000",
        "wanted": 2,
        "ready": 1,
        "revision": 1,
        "source": "job 3",
        "engine": "ugro",
        "door": DoorReport("gpu1"),
        "replicas": replicas,
        "traffic": traffic,
    }
    return ServiceReport(**(given | changes))
