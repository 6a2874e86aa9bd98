"""The row of a service after what a person asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ugro.core.errors import NotAllowed, UsageError
from ugro.core.service import ReplicaPhase, Revision, Rollout, Service
from ugro.policy.serving.applying import applied, recent
from ugro.policy.serving.replicas import Seen
from ugro.policy.serving.rollout import Back, Drop

MOST_REPLICAS = 1000


def updated(service: Service, made: Revision, canary: float | None, served: int | None, now: str) -> Service:
    """With an update to this revision, which gets its number here: others may have come while it was made."""
    if service.rollout is not None:
        raise under_way(service)
    new = replace(made, number=max(one.number for one in service.revisions) + 1)
    share = service.spec.update.canary if canary is None else canary
    rollout = Rollout(new.number, share, begun_at=now, served=served)
    return replace(service, revisions=(*recent(service), new), rollout=rollout, note="")


def under_way(service: Service) -> NotAllowed:
    return NotAllowed(
        f"an update of {service.name} is under way",
        hint=f"see: ugro serve status {service.name}; undo it: ugro serve update {service.name} --rollback",
    )


def decided(service: Service, *, promotes: bool) -> Service:
    """Of an update: go on to its end, or back."""
    rollout = service.rollout
    if rollout is None:
        hint = f"see: ugro serve status {service.name}"
        raise NotAllowed(f"there is no update of {service.name} to decide about", hint=hint)
    if promotes:
        return replace(service, rollout=replace(rollout, is_promoted=True))
    return applied(service, [Back("a person asked for it")])


def scaled(service: Service, wanted: int, seen: Sequence[Seen]) -> Service:
    """Replicas that failed go, and are replaced if they are still wanted."""
    if not 0 <= wanted <= MOST_REPLICAS:
        raise UsageError(f"a service has 0 to {MOST_REPLICAS} replicas", hint=f"ugro serve scale {service.name} 3")
    bounds = service.spec.scale
    if bounds is not None and not bounds.least <= wanted <= bounds.most:
        hint = f"it scales by itself between {bounds.least} and {bounds.most}"
        raise UsageError(f"{wanted} replicas are not within its bounds", hint=hint)
    failed = [Drop(one.number, "replaced") for one in seen if one.phase is ReplicaPhase.FAILED]
    return applied(replace(service, wanted=wanted), failed)
