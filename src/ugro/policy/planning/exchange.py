"""How long an exchange of gradients between a set of nodes takes: a ring is as slow as its slowest hop.

In a ring of P ranks each sends 2 (P - 1) / P of the gradients to the next one. With two ranks that is the whole of them
once, so what was measured between two nodes is the time of a hop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ugro.core.planning import JointTrial, Links

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
