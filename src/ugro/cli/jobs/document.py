"""The ``--json`` form of a job, one for all commands: names are stable, times RFC 3339, durations seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ugro.cli.jobs.describe import duration_s, ranks
from ugro.core.job import Attempt, Job, JobSpec, Placement, Share
from ugro.core.login import account_of, node_of
from ugro.core.plan import Plan, RankPlan
from ugro.core.support.secret import masked

_WithEnv = TypeVar("_WithEnv", JobSpec, RankPlan)


def job_document(job: Job, attempts: Sequence[Attempt] | None = None) -> dict[str, Any]:
    """``attempts`` only where they were asked for."""
    document = {
        "id": job.id,
        "name": job.spec.name,
        "state": job.state,
        "reason": job.reason,
        "exit_code": job.exit_code,
        "user": job.user,
        "priority": job.spec.priority,
        "attempt": job.attempt,
        "ranks": ranks(job) if job.placement else None,
        "nodes": _nodes(job.placement),
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "duration_s": round(duration_s(job), 3),
        "cached_from": job.cached_from,
        "origin": job.origin,
        "spec": without_secrets(job.spec),
    }
    if attempts is not None:
        document["attempts"] = [_attempt(attempt) for attempt in attempts]
    return document


def plan_document(plan: Plan | None) -> Plan | None:
    if plan is None:
        return None
    nodes = (replace(node, ranks=tuple(map(without_secrets, node.ranks))) for node in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


def without_secrets(of: _WithEnv) -> _WithEnv:
    """Programs write what they read into logs: they get no value that looks secret either."""
    shown = replace(of, env=tuple(masked(of.env).items()))
    if isinstance(shown, JobSpec) and shown.environment is not None:
        return replace(shown, environment=shown.environment.masked)
    return shown


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "nodes": _nodes(attempt.placement),
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "outcome": attempt.outcome,
        "failure": attempt.failure,
    }


def _nodes(placement: Placement | None) -> list[dict[str, Any]]:
    return [_node(share) for share in placement.shares] if placement else []


def _node(share: Share) -> dict[str, Any]:
    shown = {"name": node_of(share.node), "gpus": share.gpus}
    return {**shown, "account": account} if (account := account_of(share.node)) else shown
