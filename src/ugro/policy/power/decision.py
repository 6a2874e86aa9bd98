"""Whether a node goes to sleep, is woken, or has changed by itself: one node's situation in, the next step out.

No loop is possible: after each step a node stays awake for its cool-down; each suspend and each wake counts against a
budget per hour; a suspend needs room for the wake that follows; and what failed is tried again after growing pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.power import Act, PowerRule, PowerState
from ugro.core.support.quantity import format_duration
from ugro.policy.wording import jobs as named_jobs

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
