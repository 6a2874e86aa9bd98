"""What a set of nodes does with a training: the best shares, the time of a step, and how sure that is.

A step takes as long as its slowest rank and the exchange after it. Single steps differ, and all wait for the slowest of
each, so several noisy ranks are slower than one of them on average. A joint trial says how much longer a rank takes in
company than alone, and what is left to explain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ugro.core.errors import Unsatisfiable
from ugro.core.planning import JointTrial, Links, NodeTrial, Prediction, RankTrial
from ugro.policy.balance.mode import Mode
from ugro.policy.balance.split import Bounds, slowest_s, split, uniform
from ugro.policy.planning.curve import Curve, error_of, spread_of
from ugro.policy.planning.exchange import Exchange

# How far off predictions were in any case, so that two thirds of the recorded trainings lie within what is said.
_LEAST_ERROR = 0.06
_OF_A_TRIED_SET = 0.08  # several nodes that were measured together
_OF_AN_UNTRIED_SET = 0.13  # several that were not
# The largest of so many normal values lies this many deviations above their mean.
_ABOVE_MEAN = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42, 1.49, 1.54)
_MOST_SPREAD = 0.3  # more is a few disturbed steps, not noise of every step
# How wrong the time of an exchange may be, by how it is known.
_DOUBT = {Links.NONE: 0.0, Links.TRIAL: 0.15, Links.BENCH: 0.35, Links.ASSUMED: 0.8}
_IN_COMPANY = (0.75, 1.5)  # more than that is a disturbed trial
_UNEXPLAINED = (0.8, 1.25)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All that was measured of a training."""

    trials: Mapping[str, NodeTrial]  # by node
    exchange: Exchange
    balance: Mode = Mode.ADAPTIVE
    others: Mapping[str, NodeTrial] = field(default_factory=dict)  # of more nodes that were in the joint trial
    global_batch: int | None = None  # instead of the script's own
    can_join: bool = True  # False: a trial on all nodes together has failed

    @property
    def batch(self) -> int:
        return self.global_batch or next(iter(self.trials.values())).global_batch

    @property
    def everyone(self) -> dict[str, NodeTrial]:
        return {**self.trials, **self.others}

    @property
    def joint(self) -> JointTrial | None:
        return self.exchange.joint


def predict(nodes: Sequence[str], known: Knowledge) -> Prediction | None:
    """None if these nodes cannot hold the batch, or are more than it has samples."""
    outline = _outline(nodes, known)
    if outline is None:
        return None
    unexplained = _unexplained(known) if len(nodes) > 1 else 1.0
    step_s = outline.step_s * unexplained
    return Prediction(
        nodes=tuple(nodes),
        samples_per_s=known.batch / step_s,
        error=_error(outline, known),
        step_s=step_s,
        communication_s=outline.communication_s,
        shares=outline.shares,
        accumulate=max(curve.micro_batches(n) for curve, n in zip(outline.curves, outline.shares, strict=True)),
        links=outline.links,
    )


@dataclass(frozen=True, slots=True)
class _Outline:
    nodes: tuple[str, ...]
    ranks: tuple[RankTrial, ...]
    curves: tuple[Curve, ...]
    shares: tuple[int, ...]
    own_s: float  # of the slowest rank
    communication_s: float
    links: Links

    @property
    def step_s(self) -> float:
        return max(1e-9, self.own_s + self.communication_s)


def _outline(nodes: Sequence[str], known: Knowledge, given: Sequence[float] = ()) -> _Outline | None:
    """``given``: the time is that of shares that were measured, instead of the best ones."""
    trials = [known.everyone[node] for node in nodes]
    ranks = tuple(rank for trial in trials for rank in trial.ranks)
    curves = tuple(
        Curve.of(rank, in_company(known, trial.node, place) if len(nodes) > 1 else 1.0)
        for trial in trials
        for place, rank in enumerate(trial.ranks)
    )
    shares = _shares(curves, known, trials)
    if shares is None:
        return None
    between_s, links = known.exchange.seconds(nodes, len(ranks))
    communication_s = max([between_s, *(trial.communication_s for trial in trials)])
    spread = min(_MOST_SPREAD, max(spread_of(rank) for rank in ranks))
    above = 1 + spread * _ABOVE_MEAN[min(len(ranks), len(_ABOVE_MEAN) - 1)]
    own_s = slowest_s(curves, given if len(given) == len(curves) else shares) * above
    return _Outline(tuple(nodes), ranks, curves, shares, own_s, communication_s, links)


def _shares(curves: Sequence[Curve], known: Knowledge, trials: Sequence[NodeTrial]) -> tuple[int, ...] | None:
    if known.batch < len(curves):
        return None
    least = min(max(trial.least for trial in trials), known.batch // len(curves))  # as the training does
    if known.balance is Mode.OFF:
        shares = uniform(known.batch, len(curves))
        return shares if all(trial.can_accumulate for trial in trials) or _fits(curves, shares) else None
    bounds = [Bounds(least)] * len(curves)
    if not all(trial.can_accumulate for trial in trials):
        bounds = [bound.within(curve.cap) for bound, curve in zip(bounds, curves, strict=True)]
    try:
        return split(curves, known.batch, bounds)
    except Unsatisfiable:
        return None


def _fits(curves: Sequence[Curve], shares: Sequence[int]) -> bool:
    return all(curve.cap is None or share <= curve.cap for curve, share in zip(curves, shares, strict=True))


# --- what a joint trial adds ------------------------------------------------------------------------------------


def in_company(known: Knowledge, node: str, place: int) -> float:
    """How many times as long a rank takes together with others as alone. ``place``: among the ranks of its node."""
    joint, trial = known.joint, known.everyone[node]
    if joint is None:
        return 1.0
    ranks = [rank for rank, name in enumerate(joint.nodes) if name == node]
    if place >= len(ranks) or not joint.shares[ranks[place]]:
        return 1.0
    alone_s = Curve.of(trial.ranks[place]).seconds(joint.shares[ranks[place]])
    low, high = _IN_COMPANY
    return min(high, max(low, joint.own_s[ranks[place]] / max(1e-9, alone_s)))


def _unexplained(known: Knowledge) -> float:
    """What is left of a joint trial's step when all that is known of it is taken into account."""
    joint = known.joint
    if joint is None or not set(joint.distinct) <= set(known.everyone) or known.global_batch is not None:
        return 1.0
    outline = _outline(joint.distinct, known, joint.shares)
    low, high = _UNEXPLAINED
    return 1.0 if outline is None else min(high, max(low, joint.step_s / outline.step_s))


def _error(outline: _Outline, known: Knowledge) -> float:
    measured = max(error_of(rank) for rank in outline.ranks)
    doubt = _DOUBT[outline.links]
    is_tried = known.joint is not None and set(known.joint.distinct) == set(outline.nodes)
    if is_tried:
        doubt /= 3
    of_several = _OF_A_TRIED_SET if is_tried else _OF_AN_UNTRIED_SET
    together = of_several if len(outline.nodes) > 1 else 0.0
    waiting = outline.communication_s / outline.step_s
    return min(0.9, math.hypot(_LEAST_ERROR, measured, together, doubt * waiting))
