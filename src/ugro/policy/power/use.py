"""What keeps a node awake: anything that somebody would miss if it fell asleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ugro.core.node import Facts
from ugro.core.owner import OwnerReport
from ugro.core.power import PowerRule
from ugro.policy.hardware.busy import gpu_use

_WORDS = {
    "exec": "runs a command",
    "bench": "is being measured",
    "net": "has a tunnel",
    "env": "is making a Python environment",
    "contents": "is receiving code",
    "files": "is sending files",
    "runs": "is starting or ending a job",
    "check": "is being examined",
}


class Kind(StrEnum):
    AGENT = "agent"  # it runs there
    RULE = "rule"  # a person said so, and may say otherwise
    WORK = "work"  # of ours
    PEOPLE = "people"
    OTHERS = "others"  # work that is none of ours
    UNKNOWN = "unknown"  # it has not reported


@dataclass(frozen=True, slots=True)
class Busy:
    kind: Kind
    words: str  # after the node's name


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of a node that is awake."""

    facts: Facts | None = None  # None: it has not reported since its link was opened
    cores: int = 1
    owner: OwnerReport | None = None  # None: nobody is looked for, which must not be
    jobs: tuple[int, ...] = ()  # that hold devices there
    is_uncollected: bool = False  # files of ended jobs are still there
    held: str | None = None  # why it takes no jobs for a short while
    calls: tuple[str, ...] = ()  # methods of the calls under way
    drained: str | None = None
    is_needed: bool = False  # a job is to start there, or has something reserved
    is_this_machine: bool = False
    is_excluded: bool = False


def busy_with(use: Use, rule: PowerRule) -> Busy | None:
    """The first reason; None: nobody would miss it."""
    return next(_reasons(use, rule), None)


def _reasons(use: Use, rule: PowerRule) -> Iterator[Busy]:
    yield from _rules(use, rule)
    if use.jobs:
        yield Busy(Kind.WORK, "has jobs")
    if use.is_uncollected:
        yield Busy(Kind.WORK, "may have files of jobs that are not collected yet")
    if use.held is not None:
        yield Busy(Kind.WORK, use.held)
    if use.calls:
        yield Busy(Kind.WORK, _WORDS.get(use.calls[0].partition(".")[0], "is being asked for something"))
    if use.is_needed:
        yield Busy(Kind.WORK, "is needed by a waiting job")
    yield from _people(use.owner)
    yield from _others(use, rule)


def _rules(use: Use, rule: PowerRule) -> Iterator[Busy]:
    if use.is_excluded:
        yield Busy(Kind.RULE, "is excluded")
    if use.is_this_machine and rule.stops_its_machine:
        yield Busy(Kind.AGENT, "is the machine of the agent")
    if use.drained is not None:
        yield Busy(Kind.RULE, "is drained")


def _people(owner: OwnerReport | None) -> Iterator[Busy]:
    if owner is None or not owner.is_known:
        yield Busy(Kind.UNKNOWN, "has not said yet whether somebody uses it")
    elif owner.error is not None:
        yield Busy(Kind.UNKNOWN, f"cannot say whether somebody uses it: {owner.error}")
    elif owner.is_there:
        yield Busy(Kind.PEOPLE, f"is used by somebody ({owner.sign})")


def _others(use: Use, rule: PowerRule) -> Iterator[Busy]:
    """Work that is none of ours."""
    if use.facts is None:
        yield Busy(Kind.UNKNOWN, "has not reported yet")
        return
    for gpu in use.facts.gpus:
        if (words := gpu_use(gpu)) is not None:
            yield Busy(Kind.OTHERS, f"has a busy GPU {gpu.index}: {words}")
        elif any(not process.is_ours for process in gpu.processes) and gpu.memory_ratio is None:
            yield Busy(Kind.OTHERS, f"has a process on GPU {gpu.index}")
    load = max(use.facts.load[0], use.facts.load[1]) / max(1, use.cores)
    if load > rule.idle_load:
        yield Busy(Kind.OTHERS, f"works on something else (load {use.facts.load[0]:.2f})")
