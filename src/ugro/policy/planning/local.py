"""What local SGD on all nodes would do: ranks that take their own steps and exchange once in a round. Pure."""

from __future__ import annotations

from ugro.core.planning import LocalPlan
from ugro.policy.local.sync import Sync
from ugro.policy.planning.curve import Curve
from ugro.policy.planning.prediction import Knowledge, in_company

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
