"""Decides what jobs do while an owner is there, and whether a node goes to sleep or is woken: its next step.

No loop is possible: after each step a node stays awake for its cool-down; each suspend and each wake counts against a
budget per hour; a suspend needs room for the wake that follows; and what failed is tried again after growing pauses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ugro.features.hardware.rules import gpu_use
from ugro.features.power.model import Act, OwnerReport, OwnerRule, PowerRule, PowerState, Then
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import HOLDING_STATES, Job, JobState, Launcher
from ugro.kernel.links.model import Facts
from ugro.kernel.support.quantities import format_duration
from ugro.kernel.support.quantities import jobs as named_jobs

# --- owner ------------------------------------------------------------------------------------------------------------
# The owner of a machine comes first: whether one is there, and what becomes of the jobs there then.
#
# A node takes no job from the first sign of its owner until it was quiet for as long as its rule says, so that a job
# that made way is not started there and ended again and again. Nothing is moved back: a job that has started elsewhere
# stays there.


# Of an equal share of each batch, or of its cores, what a job keeps of a machine whose owner is there.
SMALL_PART = 0.1
_STOPPED = HOLDING_STATES - {JobState.STOPPING}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node has said of its owner."""

    last_s: float | None = None  # when the newest sign was, by the clock of the agent's boot
    sign: str = ""
    is_known: bool = False  # it has said something, or that it cannot
    is_open: bool = False  # it would say if that changed
    sources: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    error: str | None = None


def judge(rule: OwnerRule, seen: Seen, now_s: float) -> OwnerReport:
    idle_s = None if seen.last_s is None else max(0.0, now_s - seen.last_s)
    return OwnerReport(
        when=rule.when,
        then=rule.then,
        quiet_s=rule.quiet_s,
        is_there=idle_s is not None and idle_s < rule.quiet_s,
        sign=seen.sign or None,
        idle_s=idle_s,
        is_known=seen.is_known,
        sources=seen.sources,
        blind=seen.blind,
        error=seen.error,
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """End the attempt with its checkpoint, and queue the job again."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """A job takes that part of this node: of an equal share of each batch, or of its cores; 1: no limit."""

    job: Job
    node: str
    part: float
    is_of_cores: bool


def stops(jobs: Iterable[Job], owners: Mapping[str, OwnerReport]) -> Iterator[Stop]:
    """``owners``: of the nodes that can be heard now. A job's priority makes no difference."""
    there = {name: one for name, one in owners.items() if one.is_there and one.then is Then.PAUSE}
    for job in jobs:
        if not there or job.ending is not None or job.state not in _STOPPED or job.placement is None:
            continue
        node = next((name for name in job.placement.node_names if name in there), None)
        if node is not None:
            yield Stop(job, makes_way(node, there[node]))


def parts(jobs: Iterable[Job], owners: Mapping[str, OwnerReport]) -> Iterator[Part]:
    """For running jobs, on each node where jobs shrink: trainings on several nodes, and those without GPUs."""
    shrinking = {name: one for name, one in owners.items() if one.then is Then.SHRINK}
    for job in jobs:
        if not shrinking or job.state is not JobState.RUNNING or job.placement is None:
            continue
        # A training on one node has nobody to leave its share to.
        has_shares = job.spec.launcher is not Launcher.COMMAND and len(job.placement.nodes) > 1
        for share in job.placement.shares:
            owner = shrinking.get(node_of(share.node))
            if owner is not None and (has_shares or not share.gpus):
                part = SMALL_PART if owner.is_there else 1.0
                yield Part(job, share.node, part, is_of_cores=not has_shares)


def makes_way(node: str, owner: OwnerReport) -> str:
    return f"it made way for the owner of {node} ({owner.sign})"


def takes(one: Part) -> str:
    """In words."""
    what = "the cores" if one.is_of_cores else "an equal share of each batch"
    if one.part < 1:
        return f"the owner of {node_of(one.node)} is there: it takes {one.part:.0%} of {what} there"
    return f"it may take all of {what} on {node_of(one.node)} again"


# --- decision ---------------------------------------------------------------------------------------------------------


HOUR_S = 3600.0
# A machine that has just fallen asleep may miss a packet.
REST_S = 5.0
# A node without jobs that is silent for so long is taken to be asleep: somebody has suspended it, or it has done so.
SILENT_S = 10.0
USUAL_WAKE_S = 60.0  # until it was measured
_LONGEST_PAUSE_S = HOUR_S
_FAILED_WAKES = 3  # in a row; from then on a node may have failed, or be gone


@dataclass(frozen=True, slots=True)
class Situation:
    """Times are seconds by one clock that nobody can set."""

    rule: PowerRule
    state: PowerState
    since_s: float
    failures: int = 0
    acts_s: tuple[float, ...] = ()  # when it was suspended or woken
    linked_s: float | None = None  # since when its link is open; None: it is not
    silent_s: float | None = None  # since when it does not answer, as a machine that sleeps; None: it does, or refuses
    is_lost: bool = False  # its link is not open, and an attempt to open it has failed
    busy: str | None = None  # why it must stay awake, after its name: "runs a job"
    idle_s: float = 0.0  # since it was last busy
    wanted_by: tuple[int, ...] = ()  # waiting jobs that would start there
    holders: tuple[int, ...] = ()  # jobs that have devices there
    complaint: str | None = None  # how the last act failed
    problem: str = ""  # what went wrong the last time
    took_s: float | None = None  # the last wake


@dataclass(frozen=True, slots=True)
class Step:
    """A change to be recorded, and then to be acted on."""

    state: PowerState
    reason: str
    act: Act | None = None
    problem: str | None = None
    jobs: tuple[int, ...] = ()
    took_s: float | None = None


def decide(now: Situation, now_s: float) -> Step | None:
    match now.state:
        case PowerState.AWAKE:
            return _suspend(now, now_s) if now.linked_s is not None else _fell_silent(now, now_s)
        case PowerState.GOING_TO_SLEEP:
            return _falling_asleep(now, now_s)
        case PowerState.ASLEEP:
            return _asleep(now, now_s)
        case PowerState.WAKING:
            return _waking(now, now_s)


def refusal(now: Situation, now_s: float) -> str | None:
    """Why a node that is asleep is not woken now, after its name; None: it would be."""
    if now.state is not PowerState.ASLEEP or (wait_s := again_in_s(now, now_s)) <= 0:
        return None
    tried = f"in the last hour it was suspended or woken {len(_recent(now, now_s))} times"
    return f"is asleep: {now.problem if now.failures else tried}, and is tried again in {format_duration(wait_s)}"


def again_in_s(now: Situation, now_s: float) -> float:
    """Until it may be woken again; 0: now."""
    pause_s = now.since_s + _pause_s(now.rule.resume_timeout_s, now.failures) - now_s if now.failures else 0.0
    recent = sorted(_recent(now, now_s))
    over = len(recent) + 1 - now.rule.most_per_hour
    return max(0.0, pause_s, recent[over - 1] + HOUR_S - now_s if over > 0 else 0.0)


def wakes_in_s(now: Situation) -> float:
    """How long it takes, by what was measured."""
    return min(now.rule.resume_timeout_s, now.took_s or USUAL_WAKE_S)


def is_sleeping(state: PowerState, failures: int) -> bool:
    """Whether a node is away because it sleeps, is about to, or wakes: it is expected back."""
    if state is PowerState.ASLEEP:
        return failures < _FAILED_WAKES
    return state is not PowerState.AWAKE


def _suspend(now: Situation, now_s: float) -> Step | None:
    after_s = now.rule.suspend_after_s
    if after_s is None or now.busy is not None or now.wanted_by or now.holders or now.idle_s < after_s:
        return None
    if now_s - now.since_s < _pause_s(now.rule.cool_down_s, now.failures + 1):
        return None
    # One for this, and one for the wake that follows.
    if len(_recent(now, now_s)) + 2 > now.rule.most_per_hour:
        return None
    return Step(PowerState.GOING_TO_SLEEP, f"nothing was done on it for {format_duration(after_s)}", Act.SUSPEND)


def _fell_silent(now: Situation, now_s: float) -> Step | None:
    """Suspended by hand, or by itself; or it has failed, which shows when it does not wake."""
    if now.silent_s is None:
        return None
    if now.holders:
        if again_in_s(now, now_s) > 0:
            return None
        reason = f"it fell silent with {named_jobs(list(now.holders))} on it"
        return Step(PowerState.WAKING, reason, Act.RESUME, jobs=now.holders)
    if now_s - now.silent_s < SILENT_S:
        return None
    return Step(PowerState.ASLEEP, "it fell silent while it had no jobs, and is taken to be asleep")


def _falling_asleep(now: Situation, now_s: float) -> Step | None:
    if now.linked_s is not None and now.linked_s > now.since_s:
        return Step(PowerState.AWAKE, "its link was opened again")
    if now.linked_s is None and now.is_lost:
        return Step(PowerState.ASLEEP, "suspended")
    if now.complaint is not None and now.linked_s is not None:
        return Step(PowerState.AWAKE, "it stays awake", problem=f"it could not be suspended: {now.complaint}")
    if now_s - now.since_s >= now.rule.suspend_timeout_s and now.linked_s is not None:
        limit = format_duration(now.rule.suspend_timeout_s)
        return Step(PowerState.AWAKE, "it stays awake", problem=f"it did not fall asleep within {limit}")
    return None


def _asleep(now: Situation, now_s: float) -> Step | None:
    if now.linked_s is not None:
        return Step(PowerState.AWAKE, "it was woken by somebody else, or by itself")
    wanted = now.wanted_by or now.holders
    if not wanted or now_s - now.since_s < REST_S or again_in_s(now, now_s) > 0:
        return None
    return Step(PowerState.WAKING, f"woken for {named_jobs(list(wanted))}", Act.RESUME, jobs=wanted)


def _waking(now: Situation, now_s: float) -> Step | None:
    elapsed_s = now_s - now.since_s
    if now.linked_s is not None:
        return Step(PowerState.AWAKE, f"it was awake after {format_duration(elapsed_s)}", took_s=elapsed_s)
    if now.complaint is not None:
        problem = f"it could not be woken: {now.complaint}"
    elif elapsed_s >= now.rule.resume_timeout_s:
        problem = f"it did not wake within {format_duration(now.rule.resume_timeout_s)}"
    else:
        return None
    return Step(PowerState.ASLEEP, problem, problem=problem)


def _recent(now: Situation, now_s: float) -> list[float]:
    return [at_s for at_s in now.acts_s if now_s - at_s < HOUR_S]


def _pause_s(base_s: float, failures: int) -> float:
    return min(max(base_s, _LONGEST_PAUSE_S), base_s * 2.0 ** min(max(failures - 1, 0), 20))


# --- use --------------------------------------------------------------------------------------------------------------
# What keeps a node awake: anything that somebody would miss if it fell asleep.


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
