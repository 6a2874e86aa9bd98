"""What becomes of machines that are found: who may join, who has left, who is removed. Pure.

A source that cannot be read says nothing: its nodes stay as they are. So does one that sleeps: a machine that is off
cannot announce itself. A node that has left takes no new jobs, and goes when no job holds anything there and what jobs
left there is fetched. Names of the cluster file always mean its own nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ugro.features.discovery.model import Candidate, Found, Member, SourceState, Standing
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.links.model import NodeSpec


class Act(StrEnum):
    HAND_OVER = "hand over"  # the cluster file has it now
    PUT = "put"  # it is back, or has other fields
    LEAVE = "leave"  # it takes no new jobs
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Step:
    act: Act
    name: str
    candidate: Candidate | None = None  # for PUT
    reason: str = ""  # for LEAVE


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when the next steps are decided."""

    candidates: Mapping[str, Candidate]  # what the sources list, by name
    sources: Collection[str]  # those that are configured, and whose nodes join by themselves
    unsure: Collection[str]  # those of them that cannot be read now, or have not answered yet
    configured: Collection[str]  # the names in the cluster file
    busy: Collection[str]  # nodes on which jobs hold something, or have left what is not fetched yet
    answering: Collection[str]  # nodes with an open link
    doubles: Mapping[str, str]  # nodes that are another name for a machine, and the name that is used
    absent_s: Mapping[str, float]  # since when a member is in no list
    sleeping: Collection[str] = ()  # nodes that need not be listed, because they can be woken
    leave_after_s: float = 60.0
    may_leave: bool = True  # False while it is not certain which jobs run


def steps(members: Sequence[Member], now: Situation) -> list[Step]:
    found = (_step(member, now) for member in members)
    return [step for step in found if step is not None]


def absences(
    members: Sequence[Member],
    listed: Collection[str],
    unsure: Collection[str],
    before: Mapping[str, float],
    now_s: float,
    sleeping: Collection[str] = (),
) -> dict[str, float]:
    """Since when members are in no list; counts only while their sources can be read and they could be listed."""
    could_be = [one for one in members if one.name not in sleeping and not set(unsure) & set(one.candidate.sources)]
    gone = [one for one in could_be if one.name not in listed]
    return {one.name: before.get(one.name, now_s) for one in gone}


def _step(member: Member, now: Situation) -> Step | None:
    name = member.name
    if name in now.configured:
        return Step(Act.HAND_OVER, name)
    reason = why_gone(member, now)
    if reason is None:
        return _stays(member, now)
    if not now.may_leave:
        return None
    if not member.has_left:
        return Step(Act.LEAVE, name, reason=reason)
    return Step(Act.REMOVE, name) if name not in now.busy else None


def why_gone(member: Member, now: Situation) -> str | None:
    """None if it belongs to the cluster, as far as is known."""
    sources = member.candidate.sources
    places = " and ".join(sources)
    if not set(sources) & set(now.sources):
        return f"nodes of {places} no longer join by themselves"
    if member.name in now.doubles:
        return f"is the same machine as {now.doubles[member.name]}"
    if member.name in now.candidates or set(sources) & set(now.unsure):
        return None
    is_missed = member.name not in now.sleeping and now.absent_s.get(member.name, 0.0) >= now.leave_after_s
    if not member.has_left and not is_missed:
        return None
    return f"no longer listed by {places}"


def _stays(member: Member, now: Situation) -> Step | None:
    listed = now.candidates.get(member.name)
    if listed is None:
        return None
    # A job must not lose a node that answers because somebody registers another machine under its name.
    is_held = member.name in now.busy and member.name in now.answering
    if listed.reach != member.candidate.reach and is_held:
        host, user, port = member.candidate.reach
        listed = replace(listed, host=host, user=user, port=port)
    return Step(Act.PUT, member.name, listed) if member.has_left or listed != member.candidate else None


def joinable(
    candidates: Mapping[str, Candidate], members: Collection[str], configured: Sequence[NodeSpec], most: int
) -> list[Candidate]:
    """Those that may be tried, if there is room for any."""
    if len(members) >= most:
        return []
    return [one for name, one in candidates.items() if name not in members and configured_as(one, configured) is None]


def configured_as(candidate: Candidate, configured: Sequence[NodeSpec]) -> NodeSpec | None:
    """The node of the cluster file that has its name, or its address."""
    named = next((spec for spec in configured if spec.name == candidate.name), None)
    return named or next((spec for spec in configured if _is_at(spec, candidate)), None)


def _is_at(spec: NodeSpec, candidate: Candidate) -> bool:
    is_same_host = spec.transport == "ssh" and (spec.host or spec.name) == candidate.host
    return is_same_host and (spec.port or 22) == (candidate.port or 22)


def found_nodes(
    candidates: Mapping[str, Candidate],
    members: Mapping[str, Member],
    configured: Sequence[NodeSpec],
    refusals: Mapping[str, str],
) -> Iterator[Found]:
    """Everything that is found, and the nodes that joined and are no longer listed. ``refusals``: why not joined."""
    for name, candidate in candidates.items():
        if (spec := configured_as(candidate, configured)) is not None:
            yield Found(candidate, Standing.NODE, _target(candidate), spec.name, _other_words(candidate, spec))
        elif (member := members.get(name)) is not None:
            moved = member.candidate.reach != candidate.reach
            note = f"listed at {_target(candidate)} now; a job runs here" if moved else None
            yield Found(member.candidate, _standing(member), _target(member.candidate), name, _left(member) or note)
        else:
            yield Found(candidate, Standing.NEW, _target(candidate), None, refusals.get(name))
    for name, member in members.items():
        if name not in candidates:
            note = _left(member) or "not listed now"
            yield Found(member.candidate, _standing(member), _target(member.candidate), name, note)


def _standing(member: Member) -> Standing:
    return Standing.LEFT if member.has_left else Standing.JOINED


def _left(member: Member) -> str | None:
    return "takes no new jobs, and is removed when it is idle" if member.has_left else None


def _target(candidate: Candidate) -> str:
    user = f"{candidate.user}@" if candidate.user else ""
    if not candidate.port or candidate.port == 22:
        return f"{user}{candidate.host}"
    host = f"[{candidate.host}]" if ":" in candidate.host else candidate.host
    return f"{user}{host}:{candidate.port}"


def _other_words(candidate: Candidate, spec: NodeSpec) -> str | None:
    if spec.name != candidate.name:
        return f"is the node {spec.name}"
    if _is_at(spec, candidate) or spec.transport != "ssh":
        return None
    return f"the cluster file has this name, at {spec.target}"


def judge_sources(states: Sequence[SourceState]) -> Iterator[Finding]:
    for state in states:
        if state.error is not None:
            text = f"{state.place}: {state.error}; nodes that it listed stay"
            yield Finding("cluster", f"discovery {state.name}", Grade.WARNING, text, state.hint)
        elif state.refused:
            text = f"{state.place}: not usable: {'; '.join(state.refused)}"
            yield Finding("cluster", f"discovery {state.name}", Grade.WARNING, text, "correct these entries")
        else:
            text = f"{state.place}: {state.found} found"
            yield Finding("cluster", f"discovery {state.name}", Grade.OK, text)
