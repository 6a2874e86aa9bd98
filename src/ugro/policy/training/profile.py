"""Where a training spends its time, from the records of its steps. Pure: records in, numbers and a verdict out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, multimode

from ugro.core.errors import Unsatisfiable
from ugro.core.profile import Finding, FindingKind, JobProfile, RankProfile
from ugro.core.training import AdviceRecord, StepRecord, Training
from ugro.policy.balance.advice import Advice, advise
from ugro.policy.balance.fit import RankFit, Window
from ugro.policy.balance.split import Cost
from ugro.policy.training.verdict import Facts, findings

WINDOW = 50
MIN_STEPS = 3  # too few to judge below this
_SETTLED = 8  # with so many steps of the newest plan, older ones do not count
_DISTURBED = 3.0  # times the usual duration, without waiting for data: a checkpoint, an evaluation
_MIN_OF_A_SHARE = 3  # so many steps with the same share are needed to learn its cost
_MOST_RANKS = 256  # what a step takes without one of them costs their square to tell


def profile(training: Training, attempt: int, steps: int | None = None) -> JobProfile | None:
    """The profile of the newest ``steps``; by default, of those of the newest plan. None if there are no steps."""
    window = _window(training, steps)
    if not window:
        return None
    counted = _undisturbed(window)
    names = training.names(len(counted[0].shares))
    ranks = tuple(_rank(counted, rank, name) for rank, name in enumerate(names))
    step_s = fmean(step.step_s for step in counted)
    lost_s = math.fsum(wait for step in counted for wait in step.waiting_s)
    devices_s = max(1e-12, step_s * len(counted) * len(ranks))
    own = [rank.own_s for rank in ranks]
    found = JobProfile(
        attempt=attempt,
        first_step=window[0].step,
        last_step=window[-1].step,
        epoch=window[-1].epoch,
        steps=len(counted),
        passed_over=len(window) - len(counted),
        step_s=step_s,
        samples_per_s=fmean(step.samples for step in counted) / max(1e-12, step_s),
        imbalance=max(own) / max(1e-12, fmean(own)) if max(own) else 1.0,
        lost_s=lost_s,
        lost_share=min(1.0, lost_s / devices_s),
        use=min(1.0, math.fsum(rank.own_s - rank.data_s for rank in ranks) * len(counted) / devices_s),
        loss=_loss(window),
        mode=training.run.mode if training.run else "",
        device=training.run.device if training.run else "",
        ranks=ranks,
        findings=(),
        pipeline=training.pipeline,
    )
    return _judged(found, training)


def window_s(training: Training, steps: int | None = None) -> tuple[float, float] | None:
    """When the steps of the profile began and ended, by the clock of the first rank; None if that is not recorded."""
    window = _window(training, steps)
    if len(window) < MIN_STEPS or not window[0].time_s or not window[-1].time_s:
        return None
    return window[0].time_s, window[-1].time_s


@dataclass(frozen=True, slots=True)
class Alternatives:
    """How long a step takes, by the model of its ranks: with all, and without each of them (None: not possible)."""

    whole_s: float = 0.0
    without_s: tuple[float | None, ...] = ()


def alternatives(found: JobProfile, training: Training) -> Alternatives:
    """Empty if not known yet, and where ranks do not share the samples of each step."""
    if found.pipeline is not None or (training.run is not None and training.run.is_local):
        return Alternatives()
    advice = _advised(found, _costs(training.steps, len(found.ranks)))
    if advice is None:
        return Alternatives()
    return Alternatives(advice.all_ranks.seconds, tuple(None if one is None else one.seconds for one in advice.without))


def _judged(found: JobProfile, training: Training) -> JobProfile:
    if found.steps < MIN_STEPS:
        words = f"too early to judge: {found.steps} of at least {MIN_STEPS} steps"
        return replace(found, findings=(Finding(FindingKind.TOO_EARLY, words),))
    costs = _costs(training.steps, len(found.ranks))
    advice = training.advice
    if advice is None or (training.plan is not None and training.plan.holds_from > advice.step):
        advice = _advice(found, costs) or advice  # the training's own advice is about shares it no longer has
    is_local = training.run is not None and training.run.is_local
    if is_local:  # what a rank costs the others in a step says nothing about rounds
        advice = None
    facts = Facts(found, training.plan, training.model, advice, _fixed_shares(costs, found.ranks), is_local)
    return replace(found, findings=findings(facts))


# --- which steps ------------------------------------------------------------------------------------------------


def _window(training: Training, steps: int | None) -> list[StepRecord]:
    window = training.steps[-(steps or WINDOW) :]
    if window:  # after a restart with other ranks, only the newest steps can be compared
        window = [step for step in window if len(step.shares) == len(window[-1].shares)]
    plan = training.plan
    if steps is None and plan is not None:
        settled = [step for step in window if step.step >= plan.holds_from]
        if len(settled) >= _SETTLED:
            return settled
    return window


def _undisturbed(window: Sequence[StepRecord]) -> list[StepRecord]:
    """Full batches, without those that a checkpoint or the like made longer. Waiting for data is not left out."""
    whole = max(multimode(step.samples for step in window))
    full = [step for step in window if step.samples == whole]
    usual_s = median(_busy_s(step) for step in full)
    return [step for step in full if _busy_s(step) <= _DISTURBED * usual_s] or full


def _busy_s(step: StepRecord) -> float:
    return max(own - data for own, data in zip(step.own_s, step.data_s, strict=True))


# --- numbers ----------------------------------------------------------------------------------------------------


def _rank(steps: Sequence[StepRecord], rank: int, name: str) -> RankProfile:
    """Means, not medians: with four loader workers one step in four waits, and the parts must add up."""
    own, data, forward, backward, optimizer, waiting, communication = (
        fmean(getattr(step, part)[rank] for step in steps)
        for part in ("own_s", "data_s", "forward_s", "backward_s", "optimizer_s", "waiting_s", "communication_s")
    )
    forward, backward, optimizer = _within(own, forward, backward, optimizer)
    left = max(0.0, own - forward - backward - optimizer)
    # A GPU may compute while data is fetched: only the time in which it stood still counts.
    data = min(data, left)
    samples = fmean(step.shares[rank] for step in steps)
    parts = (own, data, forward, backward, optimizer, max(0.0, left - data), waiting, communication)
    return RankProfile(rank, name, samples, *parts)


def _within(own: float, *parts: float) -> tuple[float, ...]:
    """Parts are measured with other clocks and can add up to more than the whole; scales them down."""
    whole = math.fsum(parts)
    return parts if whole <= own else tuple(part * own / whole for part in parts)


def _loss(window: Sequence[StepRecord]) -> float | None:
    loss = window[-1].loss
    return loss if loss is not None and math.isfinite(loss) else None


# --- what would be ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Learned:
    cost: Cost
    has_seen_other_shares: bool


def _costs(steps: Sequence[StepRecord], ranks: int) -> list[_Learned] | None:
    """What a step costs each rank, from all shares it has had; None if not known yet."""
    usable = [step for step in steps if len(step.shares) == ranks]
    learned = []
    for rank in range(ranks):
        by_share: dict[int, list[StepRecord]] = {}
        for step in usable:
            # Shares seen last come last: they count most.
            same = by_share.pop(step.shares[rank], [])
            same.append(step)
            by_share[step.shares[rank]] = same
        fit, seen = RankFit(), 0
        for share, same in by_share.items():
            if share and len(same) >= _MIN_OF_A_SHARE:
                times = Window.of(share, [step.own_s[rank] for step in same])
                fit.add(times, median(step.optimizer_s[rank] for step in same))
                seen += 1
        if not fit.is_known:
            return None
        learned.append(_Learned(fit.cost(), seen > 1))
    return learned


def _advice(found: JobProfile, learned: Sequence[_Learned] | None) -> AdviceRecord | None:
    """The same advice that the training itself gives from time to time."""
    advice = _advised(found, learned)
    if advice is None:
        return None
    best = advice.best
    return AdviceRecord(found.last_step, advice.words, advice.all_ranks.seconds, best.seconds, best.ranks)


def _advised(found: JobProfile, learned: Sequence[_Learned] | None) -> Advice | None:
    total = round(math.fsum(rank.samples for rank in found.ranks))
    if learned is None or not 2 <= len(learned) <= min(total, _MOST_RANKS):
        return None
    communication_s = min(rank.communication_s for rank in found.ranks)
    try:
        return advise([one.cost for one in learned], total, communication_s, [rank.node for rank in found.ranks])
    except Unsatisfiable:
        return None


def _fixed_shares(learned: Sequence[_Learned] | None, ranks: Sequence[RankProfile]) -> tuple[float, ...]:
    """The part of each rank's own time that does not depend on its share; empty if not known."""
    if learned is None or not all(one.has_seen_other_shares for one in learned):
        return ()
    return tuple(
        min(1.0, (one.cost.per_step_s + one.cost.per_micro_s) / max(1e-12, one.cost.seconds(round(rank.samples))))
        for one, rank in zip(learned, ranks, strict=True)
    )
