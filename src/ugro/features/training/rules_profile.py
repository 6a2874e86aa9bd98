"""What slows a training down, and what to do about it. Pure: a profile in, findings out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, multimode

from ugro.features.training.model import Finding, FindingKind, JobProfile, RankProfile
from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.quantities import format_duration, format_size, in_words, names
from ugro.kernel.telemetry.records import AdviceRecord, ModelRecord, PlanRecord, StepRecord, Training
from ugro.train.rules.shares import Advice, Cost, RankFit, Window, advise
from ugro.train.rules.sync import Sync

# The share of the devices' time from which a finding is reported.
_WAITING = 0.05
_NETWORK = 0.2
_INPUT = 0.1
_SCRIPT = 0.15
_FIXED = 0.5
_FEWER = 0.03
_IDLE = 0.3  # of a pipeline's stages
_UNEXPECTED = 1.25  # times as long as predicted
_MOST = 0.5  # more than this share of a step is most of it
_WORTH_LOCAL = 1.3  # times as fast: for less, nobody should change a training
_ROUND_S = Sync().round_s
_SMALL_GRADIENTS = 1 << 20  # bytes; below, the number of exchanges matters, not their size


@dataclass(frozen=True, slots=True)
class Facts:
    profile: JobProfile  # without findings yet
    plan: PlanRecord | None = None
    model: ModelRecord | None = None
    advice: AdviceRecord | None = None
    fixed: tuple[float, ...] = ()  # by rank: the part of its own time that does not depend on its share
    is_local: bool = False  # models are averaged once in a round, and gradients are not exchanged

    def of_all(self, part: Callable[[RankProfile], float]) -> float:
        """The mean over the ranks, as a share of a step."""
        return fmean(part(rank) for rank in self.profile.ranks) / max(1e-12, self.profile.step_s)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """The most expensive first; at least one."""
    judges = [_fewer_ranks, _slow_rank, _network, _input, _script, _fixed_cost]
    if facts.profile.pipeline is not None:  # its ranks share layers, not samples
        judges = [_pipeline, _input, _script]
    found = [one for judge in judges if (one := judge(facts)) is not None]
    # Leaving a rank out makes all the others moot.
    found.sort(key=lambda one: (one.kind is not FindingKind.FEWER_RANKS, -one.share))
    return tuple(found) or (_balanced(facts),)


def smaller_set(ranks: Sequence[str], best: Sequence[int]) -> tuple[str, ...]:
    """The nodes of those ranks; several ranks of a node are named NODE:RANK."""
    return tuple(dict.fromkeys(node_of(ranks[rank]) for rank in best if rank < len(ranks)))


def node_of(rank_name: str) -> str:
    node, _, number = rank_name.rpartition(":")
    return node if node and number.isdigit() else rank_name


def before_launch(profile: JobProfile, job: int) -> str | None:
    """A note for launching the same again; None if all nodes are worth having."""
    fewer = next((one for one in profile.findings if one.kind is FindingKind.FEWER_RANKS), None)
    if fewer is None:
        return None
    return f"when it last ran, as job {job}: {fewer.words}; {fewer.remedy}"


# --- each of them -----------------------------------------------------------------------------------------------


def _fewer_ranks(facts: Facts) -> Finding | None:
    advice, ranks = facts.advice, facts.profile.ranks
    if advice is None or not advice.best_ranks or len(advice.best_ranks) >= len(ranks):
        return None
    gain = 1 - advice.best_s / advice.predicted_s if advice.predicted_s > 0 else 0.0
    if gain < _FEWER or max(advice.best_ranks) >= len(ranks):
        return None
    best = smaller_set([rank.node for rank in ranks], advice.best_ranks)
    left_out = tuple(rank.rank for rank in ranks if rank.rank not in advice.best_ranks)
    remedy = f"launch it on {names(best)} alone: --nodes {len(best)}"
    if len(best) == len({node_of(rank.node) for rank in ranks}):
        remedy = f"launch it with fewer ranks: {in_words([ranks[rank].node for rank in advice.best_ranks])}"
    return Finding(FindingKind.FEWER_RANKS, advice.words, remedy, gain, left_out)


def _slow_rank(facts: Facts) -> Finding | None:
    profile = facts.profile
    ranks = profile.ranks
    if len(ranks) < 2 or profile.lost_share < _WAITING:
        return None
    slowest = max(ranks, key=lambda rank: rank.own_s)
    others = [rank for rank in ranks if rank is not slowest]
    steady_s = slowest.own_s - fmean(rank.own_s for rank in ranks)
    if steady_s * len(ranks) * 2 < math.fsum(rank.waiting_s for rank in ranks):
        return _unsteady(profile)
    excess_s = slowest.own_s - median(rank.own_s for rank in others)
    more_data_s = slowest.data_s - median(rank.data_s for rank in others)
    who, wait = (others[0].node, "waits") if len(others) == 1 else ("the others", "wait")
    cost = f"{who} {wait} {_percent(_waiting_of(others, profile))} of each step for it"
    if more_data_s * 2 >= excess_s > 0:
        words = f"{slowest.node} is slowest because it waits for data: {_part(slowest.data_s, slowest.own_s)}; {cost}"
        remedy = f"give its loader more workers (num_workers), or put the data on {node_of(slowest.node)}'s own disk"
    else:
        times = slowest.own_s / max(1e-12, median(rank.own_s for rank in others))
        words = f"{slowest.node} is slowest: it computes {times:.2f} times as long as {who}; {cost}"
        remedy = _remedy_of_slow(facts, slowest)
    return Finding(FindingKind.SLOW_RANK, words, remedy, profile.lost_share, (slowest.rank,))


def _remedy_of_slow(facts: Facts, slowest: RankProfile) -> str:
    plan = facts.plan
    look = f"ugro health {node_of(slowest.node)}"
    if facts.is_local:
        return f"shares follow the speeds from round to round; if it stays slow, check what else runs there: {look}"
    if plan is None:
        return "take the batches from run.loader, so that shares can adapt to the speeds"
    if facts.profile.mode in ("off", "static"):
        return "let the shares adapt to the speeds: UGRO_BALANCE=adaptive"
    if slowest.samples <= 1:
        return f"it has the least share already: launch it without {node_of(slowest.node)}"
    caps = [cap for rank, cap in enumerate(plan.caps) if rank != slowest.rank and cap is not None]
    if caps and len(caps) == len(facts.profile.ranks) - 1:
        return "the others' memory is full: run.step(loss_fn, batch) lets them take more, in parts"
    return f"shares adapt within some steps; if it stays slow, check what else runs there: {look}"


def _unsteady(profile: JobProfile) -> Finding:
    words = f"a different rank is slowest in each step: together they wait {_percent(profile.lost_share)} of the time"
    remedy = "check what else runs on the nodes (ugro health); a larger global batch evens it out"
    return Finding(FindingKind.UNSTEADY, words, remedy, profile.lost_share)


def _network(facts: Facts) -> Finding | None:
    profile = facts.profile
    share = facts.of_all(lambda rank: rank.communication_s)
    if len(profile.ranks) < 2 or share < _NETWORK or profile.step_s <= 0:
        return None
    seconds = min(profile.step_s, fmean(rank.communication_s for rank in profile.ranks))
    what = "models" if facts.is_local else "gradients"
    words = f"the network slows it down: exchanging {what} takes {_part(seconds, profile.step_s)}"
    remedies = []
    model = facts.model
    if facts.is_local:
        remedy = "longer rounds (round_s), or max_staleness=1, which exchanges while the next round is computed"
        return Finding(FindingKind.NETWORK, words, remedy, share)
    if model is not None and model.gradient_bytes:
        sent = 2 * (len(profile.ranks) - 1) / len(profile.ranks) * model.gradient_bytes
        words += f", {format_size(model.gradient_bytes)} at an apparent {format_size(sent / seconds)}/s"
    if model is None or (model.gradient_bytes >= _SMALL_GRADIENTS and not model.is_compressed):
        faster = profile.step_s / (profile.step_s - seconds / 2)
        remedies.append(f'run.wrap(model, compress="fp16") would make it {faster:.2f} times as fast')
    rarer = 2 * profile.step_s / (2 * profile.step_s - seconds)
    remedies.append(f"exchanging half as often (twice the global batch) {rarer:.2f} times")
    if (local := _gain_of_local(profile, seconds)) > _WORTH_LOCAL:
        remedies.append(f"local SGD (--train-sync local) about {local:.1f} times, but it changes the training")
    return Finding(FindingKind.NETWORK, words, "; ".join(remedies), share)


def _gain_of_local(profile: JobProfile, exchange_s: float) -> float:
    """Ranks at their own speeds, which exchange once in a round and in half precision."""
    speeds = [rank.samples / rank.own_s for rank in profile.ranks if rank.own_s > 0]
    part = _ROUND_S / (_ROUND_S + exchange_s / 2)
    return part * math.fsum(speeds) / max(1e-12, profile.samples_per_s)


def _input(facts: Facts) -> Finding | None:
    profile = facts.profile
    share = facts.of_all(lambda rank: rank.data_s)
    typical = median(rank.data_s for rank in profile.ranks) / max(1e-12, profile.step_s)
    if min(share, typical) < _INPUT:
        return None
    seconds = fmean(rank.data_s for rank in profile.ranks)
    who = "it waits" if len(profile.ranks) == 1 else "all ranks wait"
    faster = profile.step_s / max(1e-12, profile.step_s - min(rank.data_s for rank in profile.ranks))
    words = f"{who} for data: {_part(seconds, profile.step_s)}; without that it would be {faster:.2f} times as fast"
    remedy = "more workers (run.loader(…, num_workers=4)), less work for each sample, or data on a faster disk"
    return Finding(FindingKind.INPUT, words, remedy, share)


def _script(facts: Facts) -> Finding | None:
    share = facts.of_all(lambda rank: rank.other_s)
    if share < _SCRIPT:
        return None
    seconds = fmean(rank.other_s for rank in facts.profile.ranks)
    words = (
        f"{_part(seconds, facts.profile.step_s)} is neither data, forward, backward nor optimizer: "
        "the script spends it between them"
    )
    remedy = "avoid copies to the device, .item() and printing; ugro profile JOB --trace 5 shows what it is"
    return Finding(FindingKind.SCRIPT, words, remedy, share)


def _fixed_cost(facts: Facts) -> Finding | None:
    profile = facts.profile
    if not facts.fixed or min(facts.fixed) < _FIXED:
        return None
    fixed_s = fmean(part * rank.own_s for part, rank in zip(facts.fixed, profile.ranks, strict=True))
    share = fixed_s / max(1e-12, profile.step_s)
    if share < _FIXED / 2:
        return None
    larger_s = profile.step_s + fmean(rank.own_s for rank in profile.ranks) - fixed_s
    how_much = "most" if share > _MOST else "a large part"
    words = f"{how_much} of a step does not depend on the number of samples: {_part(fixed_s, profile.step_s)}"
    faster = 2 * profile.step_s / larger_s
    remedy = f"a global batch twice as large would do {faster:.2f} times as many samples a second"
    return Finding(FindingKind.FIXED_COST, words, remedy, share)


def _balanced(facts: Facts) -> Finding:
    profile = facts.profile
    if len(profile.ranks) == 1:
        return Finding(FindingKind.BALANCED, f"no bottleneck: it computes {_percent(profile.use)} of the time")
    waits = max(rank.waiting_s for rank in profile.ranks) / max(1e-12, profile.step_s)
    words = f"balanced: none of the {len(profile.ranks)} ranks waits more than {_percent(waits)} of a step"
    return Finding(FindingKind.BALANCED, words)


def _pipeline(facts: Facts) -> Finding | None:
    profile, pipeline = facts.profile, facts.profile.pipeline
    if pipeline is None or max(pipeline.ranks) >= len(profile.ranks):
        return None
    layers = [
        f"{profile.ranks[rank].node} {count}" for rank, count in zip(pipeline.ranks, pipeline.layers, strict=True)
    ]
    idle = facts.of_all(lambda rank: rank.waiting_s + rank.communication_s)
    predicted = format_duration(pipeline.predicted_s)
    words = f"layers of the pipeline: {', '.join(layers)}; a step was predicted to take {predicted}"
    if pipeline.measured_s is not None:
        words += f" and takes {format_duration(pipeline.measured_s)}"
    words += f"; stages wait {_percent(idle)} of the time"
    remedy = ""
    if pipeline.measured_s is not None and pipeline.measured_s > _UNEXPECTED * pipeline.predicted_s:
        remedy = "a device is slower than it was when it was measured: layers move at the next epoch if that pays"
    elif idle > _IDLE:
        more = 2 * pipeline.micro_batches
        remedy = f"more micro-batches fill the stages better: run.wrap(…, micro_batches={more}), if the batch allows it"
    return Finding(FindingKind.PIPELINE, words, remedy, idle)


# --- texts ------------------------------------------------------------------------------------------------------


def _waiting_of(ranks: Sequence[RankProfile], profile: JobProfile) -> float:
    return fmean(rank.waiting_s for rank in ranks) / max(1e-12, profile.step_s)


def _part(seconds: float, whole_s: float) -> str:
    return f"{format_duration(seconds)} of {format_duration(whole_s)} ({_percent(seconds / max(1e-12, whole_s))})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# --- profile ----------------------------------------------------------------------------------------------------------
# Where a training spends its time, from the records of its steps. Pure: records in, numbers and a verdict out.


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
