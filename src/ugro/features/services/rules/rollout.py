"""Which replicas a service needs more, and which it can do without: scaling, moving, rolling updates, rolling back.

Pure. It is asked again after each change, so a step that was not done comes again. New replicas are ready before old
ones go wherever there is room for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ugro.features.services.model import Replica, ReplicaPhase, Revision, Rollout, Service, ServiceState
from ugro.features.services.rules.steps import Seen, View, reason_of
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.errors import NotAllowed, UsageError
from ugro.kernel.support.quantities import count_of

ROOM_S = 3.0  # a new replica that waits longer for devices takes the place of an old one
_MOST_RESTARTS = 1  # of a new replica before it was ready, in an update

ENDED = "ended: "  # how the reason of one begins that nobody asked to end
_STOPPED = "the service stops"
_SCALED = "scaled down"
_REPLACED = "replaced by the update"
_MAKES_ROOM = "makes room for the update"
_BACK = "the update was rolled back"


@dataclass(frozen=True, slots=True)
class Add:
    revision: int


@dataclass(frozen=True, slots=True)
class Drop:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing of the old revision is left. ``missing``: why not all replicas are ready; None: all are."""

    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Back:
    """The update is given up: the old revision stays."""

    reason: str


Change = Add | Drop | Finish | Back


def changes(view: View) -> list[Change]:
    service = view.service
    if service.state is not ServiceState.ACTIVE:
        return [Drop(one.number, _STOPPED) for one in view.seen if one.replica.dropped is None]
    over = [one for one in view.seen if one.replica.dropped is None and one.is_over]
    if service.rollout is not None:
        return _rolling(view, service.rollout, over)
    ended: list[Change] = [Drop(one.number, f"{ENDED}{reason_of(one)}") for one in over]
    return [*ended, *_steady(view)]


# --- without an update ---------------------------------------------------------------------------------------------


def _steady(view: View) -> list[Change]:
    service, wanted = view.service, view.service.wanted
    own = [one for one in view.live if one.replica.revision == service.revision]
    others = [one for one in view.live if one.replica.revision != service.revision]
    moving = [one for one in own if one.is_on_drained or one.is_away]
    good = [one for one in own if one not in moving]
    made: list[Change] = []
    if len(good) < wanted and view.may_replace:
        made += [Add(service.revision)] * (wanted - len(good))
    made += [Drop(one.number, _SCALED) for one in _worst(good)[: max(0, len(good) - wanted)]]
    made += [Drop(one.number, _BACK) for one in others if not one.is_ready]
    leaving = [*moving, *(one for one in others if one.is_ready)]
    return [*made, *_let_go(leaving, sum(one.is_serving for one in good), wanted)]


def _let_go(leaving: Sequence[Seen], ready: int, wanted: int) -> list[Change]:
    """As many as others are ready in their place. One that does not answer goes when all others do."""
    serving = [one for one in leaving if one.is_ready]
    spare = max(0, ready + len(serving) - wanted)
    gone = [*serving[:spare], *(one for one in leaving if not one.is_ready and (one.is_on_drained or ready >= wanted))]
    return [Drop(one.number, _why_leaving(one)) for one in gone]


def _why_leaving(one: Seen) -> str:
    if one.is_on_drained:
        return "its node is drained"
    return "its node is unreachable" if one.is_away else _BACK


def _worst(some: Iterable[Seen]) -> list[Seen]:
    """Those to go first: the ones that are not ready, then the newest."""
    return sorted(some, key=lambda one: (one.is_ready, -one.number))


# --- an update -----------------------------------------------------------------------------------------------------


def _rolling(view: View, rollout: Rollout, over: Sequence[Seen]) -> list[Change]:
    service = view.service
    new = [one for one in view.live if one.replica.revision == rollout.revision]
    old = [one for one in view.live if one.replica.revision != rollout.revision]
    ended = [one for one in over if one.replica.revision == rollout.revision]
    if (reason := _failure(service, new, ended)) is not None:
        return [Back(reason)]
    made: list[Change] = [Drop(one.number, f"{ENDED}{reason_of(one)}") for one in over if one not in ended]
    lost = [one for one in new if one.is_away or (one.is_on_drained and not one.is_ready)]
    made += [Drop(one.number, _why_leaving(one)) for one in lost]
    new = [one for one in new if one not in lost]
    ready = sum(one.is_serving for one in new)
    if not rollout.is_held and not old:
        if ready >= service.wanted:
            return [*made, Finish()]
        if _is_as_before(view, rollout, ready) and _is_stuck(view, new, 0, 0):
            text = f"{ready} of {count_of(service.wanted, 'replica')} ready, the others wait for devices"
            return [*made, Finish(text)]
    target = _canaries(service.wanted, rollout) if rollout.is_held else service.wanted
    missing = max(0, target - len(new))
    room = max(0, service.wanted + service.spec.update.surge - len(new) - len(old))
    pending = sum(not one.is_ready for one in new)
    made += [Add(rollout.revision)] * max(0, min(missing, room, max(1, service.spec.update.surge) - pending))
    made += [Drop(one.number, _SCALED) for one in _worst(new)[: max(0, len(new) - max(target, service.wanted))]]
    if rollout.is_held:
        excess = len(old) - service.wanted if not _is_stuck(view, new, missing, room) else 0
    else:
        excess = ready + len(old) - service.wanted
    going = _worst_old(old)[: max(0, excess)]
    made += [Drop(one.number, _REPLACED) for one in going]
    if not going and _is_stuck(view, new, missing, room):
        made += [Drop(one.number, _MAKES_ROOM) for one in _worst_old(old)[:1] if _can_spare(view, one, [*new, *old])]
    return made


def _is_as_before(view: View, rollout: Rollout, ready: int) -> bool:
    """As many are ready as before, and the old ones have given their devices back."""
    return ready >= max(1, _least(view.service, rollout)) and _are_gone(view)


def _least(service: Service, rollout: Rollout) -> int:
    """So many can be ready at once, as far as is known."""
    return service.wanted if rollout.served is None else min(service.wanted, rollout.served)


def _failure(service: Service, new: Sequence[Seen], ended: Sequence[Seen]) -> str | None:
    """Why the update cannot go on."""
    for one in [*ended, *new]:
        name, why = f"replica {one.number}", reason_of(one)
        if one in ended or one.phase is ReplicaPhase.FAILED:
            return f"{name} {one.phase}: {why}"
        if one.probe is not None and not one.is_ready and one.probe.restarts > _MOST_RESTARTS:
            return f"{name} ended {one.probe.restarts} times: {why}"
        if one.unready_s > service.spec.update.timeout_s:
            return f"{name} was not ready within {service.spec.update.timeout_s:g} s: {why}"
    return None


def _canaries(wanted: int, rollout: Rollout) -> int:
    return max(1, math.ceil(wanted * (rollout.canary or 0.0) - 1e-9)) if wanted else 0


def _is_stuck(view: View, new: Sequence[Seen], missing: int, room: int) -> bool:
    """There is no room beside the old ones: a new one waits for devices, or may not even be added."""
    waiting = [one for one in new if one.phase is ReplicaPhase.WAITING]
    others = [one for one in new if not one.is_ready and one not in waiting]
    if others:
        return False
    has_waited = any(min(one.waits_s, view.freed_s) > ROOM_S for one in waiting)
    return has_waited or (not waiting and missing > 0 and room == 0)


def _can_spare(view: View, one: Seen, all_of_them: Sequence[Seen]) -> bool:
    """One at a time: what was let go before has ended, and as many are ready as can be, or this one is not."""
    if not _are_gone(view):
        return False
    rollout = view.service.rollout
    serving = sum(other.is_serving for other in all_of_them)
    return not one.is_serving or (rollout is not None and serving >= _least(view.service, rollout))


def _are_gone(view: View) -> bool:
    """Those that were let go have ended, as far as is known."""
    going = [one for one in view.seen if one.replica.dropped is not None]
    return all(one.is_over or (one.job is not None and one.job.state is JobState.UNREACHABLE) for one in going)


def _worst_old(some: Iterable[Seen]) -> list[Seen]:
    return sorted(some, key=lambda one: (one.is_serving, one.is_ready, not one.is_on_drained, one.number))


# --- applying ---------------------------------------------------------------------------------------------------------
# The row of a service after a change, and the sentence for the event log.


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


# --- requests ---------------------------------------------------------------------------------------------------------
# The row of a service after what a person asks for.


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
