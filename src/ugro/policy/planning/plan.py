"""Compares all sets of nodes for a training, and says in a few words why the others are not the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ugro.core.errors import Unsatisfiable
from ugro.core.planning import LaunchPlan, LeftOut, Links, LocalPlan, NodeFigures, NodeTrial, Prediction
from ugro.core.support.quantity import format_size
from ugro.policy.planning.curve import Curve
from ugro.policy.planning.local import predict_local
from ugro.policy.planning.prediction import Knowledge, predict
from ugro.policy.wording import in_words

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
