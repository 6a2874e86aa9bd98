"""What a set of nodes does with a training: the best shares, the time of a step, and how sure that is.

A step takes as long as its slowest rank and the exchange after it. Single steps differ, and all wait for the slowest of
each, so several noisy ranks are slower than one of them on average. A joint trial says how much longer a rank takes in
company than alone, and what is left to explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from ugro.features.planning.model import (
    JointTrial,
    LaunchPlan,
    LeftOut,
    Links,
    LocalPlan,
    NodeFigures,
    NodeTrial,
    Prediction,
    RankTrial,
)
from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.quantities import format_size, in_words
from ugro.train.rules.shares import Bounds, Cost, Mode, slowest_s, split, uniform
from ugro.train.rules.sync import Sync

# --- curve ------------------------------------------------------------------------------------------------------------
# What a step costs a rank at any share, from what a trial measured at a few.
#
# Between two measured shares it is a line, so a measured share keeps its measured time. Below the smallest one the line
# goes on as far as a fixed part of zero.


_LEAST_SLOPE = 0.05  # of the mean time per sample: a step with more samples never takes less
_ONE_POINT_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Curve(Cost):
    points: tuple[tuple[int, float], ...] = ()  # samples and seconds, the smallest first
    scale: float = 1.0  # how many times as long it takes in company

    @classmethod
    def of(cls, rank: RankTrial, scale: float = 1.0) -> Curve:
        points: list[tuple[int, float]] = []
        for point in rank.points:
            seconds = point.seconds
            if points:  # noise must not make more samples cheaper
                before, least = points[-1]
                seconds = max(seconds, least + _LEAST_SLOPE * least / before * (point.samples - before))
            points.append((point.samples, seconds))
        samples, seconds = points[-1]
        fixed_s = min(rank.optimizer_s, 0.8 * points[0][1])
        return cls(fixed_s, 0.0, seconds / samples, rank.cap, tuple(points), scale)

    def seconds(self, samples: float) -> float:
        micro_batches = self.micro_batches(samples)
        if micro_batches == 1:
            return self.scale * self._at(samples)
        part_s = self._at(samples / micro_batches) - self.per_step_s
        return self.scale * (self.per_step_s + micro_batches * part_s)

    def _at(self, samples: float) -> float:
        first, second = self._around(samples)
        if first == second:
            fixed_s, (at, seconds) = self.per_step_s, first
            return fixed_s + (seconds - fixed_s) * samples / at
        slope = (second[1] - first[1]) / (second[0] - first[0])
        if samples >= self.points[0][0]:
            return first[1] + slope * (samples - first[0])
        fixed_s = max(self.per_step_s, first[1] - slope * first[0])
        return fixed_s + (first[1] - fixed_s) * samples / first[0]

    def _around(self, samples: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """The two points of the line on which it is."""
        if len(self.points) == 1:
            return self.points[0], self.points[0]
        upper = next((place for place, point in enumerate(self.points) if point[0] >= samples), len(self.points) - 1)
        upper = max(1, upper)
        return self.points[upper - 1], self.points[upper]

    @property
    def fixed_s(self) -> float:
        """The part of a step that does not depend on the share."""
        return self._at(0)


def error_of(rank: RankTrial) -> float:
    """The relative standard error of what the curve says."""
    found = max(point.spread / math.sqrt(point.steps) for point in rank.points)
    return math.hypot(found, _ONE_POINT_ERROR) if len(rank.points) == 1 else found


def spread_of(rank: RankTrial) -> float:
    """How much single steps differ, relative to their mean."""
    return max(point.spread for point in rank.points)


# --- exchange ---------------------------------------------------------------------------------------------------------
# How long an exchange of gradients between a set of nodes takes: a ring is as slow as its slowest hop.
#
# In a ring of P ranks each sends 2 (P - 1) / P of the gradients to the next one. With two ranks that is the whole of
# them once, so what was measured between two nodes is the time of a hop.


# What is assumed of a link that nobody has measured: an ordinary local network.
_ASSUMED_BYTES_PER_S = 110e6
_ASSUMED_LATENCY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link between two nodes; the slower direction counts."""

    bytes_per_s: float
    latency_s: float = 0.0  # one way


@dataclass(frozen=True, slots=True)
class Exchange:
    gradient_bytes: int
    joint: JointTrial | None = None
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def seconds(self, nodes: Sequence[str], ranks: int) -> tuple[float, Links]:
        """Between these nodes, with so many ranks together; and how that is known."""
        if len(nodes) < 2:
            return 0.0, Links.NONE
        hops = [self._hop(*pair) for pair in _ring(nodes)]
        slowest_s = max(seconds for seconds, _ in hops)
        how = max((source for _, source in hops), key=_DOUBT.index)
        bare_s = slowest_s * ring_share(ranks)
        return bare_s * self._exposed(nodes) if how is Links.TRIAL else bare_s, how

    def whole_s(self, nodes: Sequence[str], ranks: int) -> float:
        """The same without a training beside it: nothing of it is hidden."""
        if len(nodes) < 2:
            return 0.0
        return max(self._hop(*pair)[0] for pair in _ring(nodes)) * ring_share(ranks)

    def _hop(self, first: str, second: str) -> tuple[float, Links]:
        joint = self.joint
        if joint is not None:
            if (found := _measured(joint, first, second)) is not None:
                return found, Links.TRIAL
            if {first, second} <= set(joint.nodes):
                return (joint.whole_s or joint.communication_s) / ring_share(len(joint.nodes)), Links.TRIAL
        link = self.links.get(frozenset((first, second)))
        known = link or Link(_ASSUMED_BYTES_PER_S, _ASSUMED_LATENCY_S)
        seconds = 2 * known.latency_s + self.gradient_bytes / max(1.0, known.bytes_per_s)
        return seconds, Links.BENCH if link is not None else Links.ASSUMED

    def _exposed(self, nodes: Sequence[str]) -> float:
        """The part of an exchange that a step waits for: the rest happens while gradients are still computed."""
        joint = self.joint
        if joint is None or joint.whole_s <= 0:
            return 1.0
        if set(nodes) == set(joint.nodes):  # measured as a whole: hops say nothing new
            hops = max(self._hop(*pair)[0] for pair in _ring(nodes)) * ring_share(len(joint.nodes))
            return joint.communication_s / hops if hops > 0 else 1.0
        return min(1.5, max(0.05, joint.communication_s / joint.whole_s))


_DOUBT = (Links.NONE, Links.TRIAL, Links.BENCH, Links.ASSUMED)  # the most certain first


def ring_share(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _ring(nodes: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(nodes, (*nodes[1:], nodes[0]), strict=True)) if len(nodes) > 2 else [(nodes[0], nodes[1])]


def _measured(joint: JointTrial, first: str, second: str) -> float | None:
    """Between these two; or else the slower of what each did with a third."""
    found = {frozenset((pair.first, pair.second)): pair.seconds for pair in joint.pairs}
    if (direct := found.get(frozenset((first, second)))) is not None:
        return direct
    ways = [
        max(one, other)
        for third in joint.distinct
        if (one := found.get(frozenset((first, third)))) is not None
        and (other := found.get(frozenset((second, third)))) is not None
    ]
    return min(ways) if ways else None


# --- prediction -------------------------------------------------------------------------------------------------------


# How far off predictions were in any case, so that two thirds of the recorded trainings lie within what is said.
_LEAST_ERROR = 0.06
_OF_A_TRIED_SET = 0.08  # several nodes that were measured together
_OF_AN_UNTRIED_SET = 0.13  # several that were not
# The largest of so many normal values lies this many deviations above their mean.
_ABOVE_MEAN = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42, 1.49, 1.54)
_MOST_SPREAD = 0.3  # more is a few disturbed steps, not noise of every step
# How wrong the time of an exchange may be, by how it is known.
_PREDICTION_DOUBT = {Links.NONE: 0.0, Links.TRIAL: 0.15, Links.BENCH: 0.35, Links.ASSUMED: 0.8}
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
    doubt = _PREDICTION_DOUBT[outline.links]
    is_tried = known.joint is not None and set(known.joint.distinct) == set(outline.nodes)
    if is_tried:
        doubt /= 3
    of_several = _OF_A_TRIED_SET if is_tried else _OF_AN_UNTRIED_SET
    together = of_several if len(outline.nodes) > 1 else 0.0
    waiting = outline.communication_s / outline.step_s
    return min(0.9, math.hypot(_LEAST_ERROR, measured, together, doubt * waiting))


# --- local ------------------------------------------------------------------------------------------------------------
# What local SGD on all nodes would do: ranks that take their own steps and exchange once in a round. Pure.


_HALF = 0.5  # changes of models travel in half precision


def predict_local(known: Knowledge) -> LocalPlan | None:
    """None if there is nothing to exchange between nodes."""
    nodes = tuple(known.trials)
    ranks = [(node, place) for node, trial in known.trials.items() for place in range(len(trial.ranks))]
    if len(nodes) < 2 or not known.can_join or known.batch < len(ranks):
        return None
    own = -(-known.batch // len(ranks))  # samples of a rank's own step
    seconds = [
        max(1e-9, Curve.of(known.trials[node].ranks[place], in_company(known, node, place)).seconds(own))
        for node, place in ranks
    ]
    round_s = Sync().round_s
    exchange_s = _HALF * known.exchange.whole_s(nodes, len(ranks))
    part = round_s / (round_s + exchange_s)
    steps = max(1, round(sum(round_s / one for one in seconds) / len(seconds)))
    return LocalPlan(nodes, part * sum(own / one for one in seconds), steps, round_s, exchange_s)


# --- plan -------------------------------------------------------------------------------------------------------------
# Compares all sets of nodes for a training, and says in a few words why the others are not the best.


# As large as predictions are usually off: with fewer nodes nearly as fast is better, and the others stay free.
_ALIKE = 0.05
_MOST_TIMES_THE_BATCH = 64
_WORTH_MORE_NODES = 1.1


def make_plan(name: str, known: Knowledge, cached: Mapping[str, bool], left_out: Sequence[LeftOut] = ()) -> LaunchPlan:
    """``cached``: whether a node's trial was known from before."""
    sets = [nodes for nodes in _subsets(tuple(known.trials)) if known.can_join or len(nodes) == 1]
    found = [one for nodes in sets if (one := predict(nodes, known)) is not None]
    if not found:
        raise Unsatisfiable(
            f"no set of nodes can hold a global batch of {known.batch}",
            hint="lower global_batch, or let ranks accumulate: run.step(loss_fn, batch)",
        )
    best = _best(found)
    others = sorted((one for one in found if one is not best), key=lambda one: (-one.samples_per_s, one.nodes))
    first = next(iter(known.trials.values()))
    return LaunchPlan(
        name=name,
        global_batch=known.batch,
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        predictions=(best, *(replace(one, why=_why(one, best)) for one in others)),
        nodes=tuple(_figures(trial, cached.get(node, False)) for node, trial in known.trials.items()),
        left_out=tuple(left_out),
        notes=tuple(_notes(best, found, known)),
        local=_local(best, known),
        is_of_local=_is_of_local(known),
    )


def _local(best: Prediction, known: Knowledge) -> LocalPlan | None:
    local = predict_local(known)
    if local is None or _is_of_local(known):
        return local
    return local if local.samples_per_s > _WORTH_MORE_NODES * best.samples_per_s else None


def _is_of_local(known: Knowledge) -> bool:
    return any(trial.is_of_local for trial in known.trials.values())


def _subsets(nodes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(nodes) + 1):
        yield from combinations(nodes, count)


def _best(found: Sequence[Prediction]) -> Prediction:
    fastest = max(one.samples_per_s for one in found)
    near = [one for one in found if one.samples_per_s >= fastest * (1 - _ALIKE)]
    return min(near, key=lambda one: (len(one.nodes), -one.samples_per_s, one.nodes))


def _why(one: Prediction, best: Prediction) -> str:
    more = [node for node in one.nodes if node not in best.nodes]
    if not more or len(one.nodes) <= len(best.nodes):
        return ""
    if one.samples_per_s >= best.samples_per_s * (1 - _ALIKE):
        return f"not clearly faster for {in_words(more)}"
    if set(best.nodes) < set(one.nodes):
        return f"{in_words(more)} {'costs' if len(more) == 1 else 'cost'} more waiting than {_they(more)}"
    return ""


def _they(nodes: Sequence[str]) -> str:
    return "it gives" if len(nodes) == 1 else "they give"


def _figures(trial: NodeTrial, is_cached: bool) -> NodeFigures:
    curves = [Curve.of(rank) for rank in trial.ranks]
    slowest = max(range(len(curves)), key=lambda place: curves[place].seconds(trial.global_batch))
    samples, seconds = curves[slowest].points[-1]
    fixed_s = curves[slowest].fixed_s
    memory = [point.memory_bytes for rank in trial.ranks for point in rank.points if point.memory_bytes]
    return NodeFigures(
        node=trial.node,
        device=trial.device,
        fixed_s=fixed_s,
        per_sample_s=(seconds - fixed_s) / samples,
        data_share=min(1.0, trial.ranks[slowest].data_s / max(1e-9, seconds)),
        memory_bytes=max(memory, default=None),
        at=trial.at,
        job=trial.job,
        is_cached=is_cached,
    )


def _notes(best: Prediction, found: Sequence[Prediction], known: Knowledge) -> Iterator[str]:
    if _is_of_local(known):
        yield "this training is local SGD: sets of nodes are predicted as if gradients were exchanged in every step"
    if any(one.links is Links.ASSUMED for one in found):
        yield "the network between the nodes was not measured: an ordinary one of 1 Gbit/s is assumed"
    if not known.can_join:
        yield "the trial on all nodes together failed, so sets of several are not predicted"
    elif len(best.nodes) == 1 and len(known.trials) > 1:
        yield _does_not_pay(best, found, known)
    shares = zip(best.nodes, (known.trials[node] for node in best.nodes), strict=True)
    slow = [node for node, trial in shares if _waits_for_data(trial)]
    if slow:
        yield f"{in_words(slow)} {'waits' if len(slow) == 1 else 'wait'} for data: more loader workers may help"


def _waits_for_data(trial: NodeTrial) -> bool:
    return any(rank.data_s > 0.2 * rank.points[-1].seconds for rank in trial.ranks)


def _does_not_pay(best: Prediction, found: Sequence[Prediction], known: Knowledge) -> str:
    several = max((one for one in found if len(one.nodes) > 1), key=lambda one: one.samples_per_s, default=None)
    if several is None:
        return "the batch is too small for more than one node"
    share = 100 * several.communication_s / several.step_s
    size = format_size(known.exchange.gradient_bytes)
    words = f"synchronising every step does not pay: the exchange of {size} would take {share:.0f} % of it"
    if _WORTH_MORE_NODES * (several.step_s - several.communication_s) > best.step_s:
        words = f"more nodes do not pay: steps would hardly be shorter, even if the exchange of {size} took no time"
    larger = _batch_that_pays(known)
    return f"{words}; it would pay with a global batch of {larger}, which changes the training" if larger else words


def _batch_that_pays(known: Knowledge) -> int | None:
    """The least doubling of the batch with which several nodes are clearly faster than one."""
    batch, nodes = known.batch, tuple(known.trials)
    times = 2
    while times <= _MOST_TIMES_THE_BATCH:
        larger = replace(known, global_batch=batch * times)
        one, more = (
            max((found.samples_per_s for some in sets if (found := predict(some, larger)) is not None), default=0.0)
            for sets in ([(node,) for node in nodes], [some for some in _subsets(nodes) if len(some) == 2])
        )
        if more > _WORTH_MORE_NODES * one > 0:
            return batch * times
        times *= 2
    return None
