"""The row of a service after a change, and the sentence for the event log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ugro.core.service import Replica, Revision, Service
from ugro.policy.serving.rollout import Add, Back, Change, Drop, Finish

_MOST_REVISIONS = 10


def applied(service: Service, changes: Iterable[Change]) -> Service:
    for change in changes:
        match change:
            case Add(revision):
                service = _added(service, revision)
            case Drop(number, reason):
                service = _dropped(service, number, reason)
            case Finish(missing) if service.rollout is not None:
                done = service.rollout.revision
                note = f"revision {done} serves now" + (f": {missing}" if missing else "")
                service = replace(service, revision=done, revisions=recent(service), rollout=None, note=note)
            case Back(reason) if service.rollout is not None:
                note = f"revision {service.rollout.revision} was rolled back: {reason}"
                service = replace(service, rollout=None, note=note)
    return service


def recent(service: Service) -> tuple[Revision, ...]:
    """The revisions that are kept: the newest, and those in use."""
    used = {service.revision, *(one.revision for one in service.replicas)}
    newest = service.revisions[-_MOST_REVISIONS:]
    return tuple(one for one in service.revisions if one.number in used or one in newest)


def _added(service: Service, revision: int) -> Service:
    made = Replica(service.next_number, revision)
    return replace(service, replicas=(*service.replicas, made), next_number=service.next_number + 1)


def _dropped(service: Service, number: int, reason: str) -> Service:
    """The first reason counts."""
    replicas = tuple(
        replace(one, dropped=reason) if one.number == number and one.dropped is None else one
        for one in service.replicas
    )
    return replace(service, replicas=replicas)


def forgotten(service: Service, number: int) -> Service:
    return replace(service, replicas=tuple(one for one in service.replicas if one.number != number))


def event_of(change: Change) -> tuple[str, str] | None:
    """Its kind and its text."""
    match change:
        case Drop(number, reason):
            return "replica", f"replica {number} goes: {reason}"
        case Finish(missing):
            return "updated", f"the update is over: {missing}" if missing else "the update is complete"
        case Back(reason):
            return "rolled_back", f"the update was rolled back: {reason}"
    return None
