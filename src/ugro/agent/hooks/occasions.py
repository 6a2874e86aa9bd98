"""What hooks are called for: the content of each call, from what the agent knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.core.hook import HookName
from ugro.core.job import Job
from ugro.core.node import NodeReport
from ugro.core.support import clock
from ugro.core.support.codec import dumps
from ugro.store.ends import End
from ugro.store.hooks import NewDelivery

_MOST_LISTED = 100


@dataclass(frozen=True, slots=True)
class Idle:
    """A node that has had nothing to do."""

    node: str
    idle_s: float
    labels: tuple[str, ...] = ()


def queue_is_long(waiting: Sequence[Job], running: int, limit: int, lasted_s: float) -> dict[str, Any]:
    return {
        "limit": limit,
        "waiting": len(waiting),
        "running": running,
        "lasted_s": round(lasted_s, 1),
        "jobs": [_wish(job) for job in waiting[:_MOST_LISTED]],
    }


def nodes_are_idle(idle: Sequence[Idle]) -> dict[str, Any]:
    listed = idle[:_MOST_LISTED]
    return {"nodes": [{"node": one.node, "idle_s": round(one.idle_s, 1), "labels": list(one.labels)} for one in listed]}


def node_is_lost(report: NodeReport) -> dict[str, Any]:
    return {"node": report.name, "labels": list(report.labels), "error": report.error or "", "since": report.since}


def job_has_ended(end: End) -> dict[str, Any]:
    return {
        "job": end.job,
        "name": end.name,
        "state": end.state,
        "reason": end.reason,
        "attempt": end.attempt,
        "ended_at": end.at,
        "lasted_s": end.lasted_s,
    }


def delivery(
    hook: HookName, cluster: str, content: dict[str, Any], new_id: str, *, is_test: bool = False
) -> NewDelivery:
    body = {"id": new_id, "hook": hook, "time": clock.now().at, "cluster": cluster, "test": is_test, **content}
    return NewDelivery(new_id, hook, json.dumps(json.loads(dumps(body))), is_test)


def _wish(job: Job) -> dict[str, Any]:
    wanted = job.spec.resources
    return {
        "job": job.id,
        "name": job.spec.name,
        "priority": job.spec.priority,
        "nodes": wanted.min_nodes,
        "gpus_per_node": wanted.gpus_per_node,
        "cpus": wanted.cpus,
        "memory_bytes": wanted.memory_bytes,
        "labels": list(wanted.labels),
    }
