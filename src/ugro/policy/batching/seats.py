"""On which nodes the hosts of a pool go, and how many slots each has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ugro.core.errors import NotFound, Unsatisfiable, UsageError


@dataclass(frozen=True, slots=True)
class Candidate:
    node: str
    cores: int
    held_cores: int = 0  # by jobs
    problem: str | None = None  # why it cannot be used
    labels: tuple[str, ...] = ()

    @property
    def free_cores(self) -> int:
        return max(0, self.cores - self.held_cores)


@dataclass(frozen=True, slots=True)
class Wish:
    """``nodes``: how many, which (names and ``@label``), or None for all.

    Without ``slots`` and ``on_each`` there is a slot for each free core.
    """

    nodes: int | tuple[str, ...] | None = None
    slots: int | None = None  # in all
    on_each: int | None = None


def choose(candidates: Sequence[Candidate], wish: Wish) -> list[tuple[str, int]]:
    """The nodes with most free cores first. A node whose cores are all taken has one slot, which waits in the queue."""
    if isinstance(wish.nodes, tuple):
        chosen = list(dict.fromkeys(one for word in wish.nodes for one in _named(word, candidates)))
    else:
        chosen = _best(candidates, wish.nodes)
    if wish.slots is not None:
        return _shared_out(chosen, wish.slots)
    return [(one.node, wish.on_each or max(1, one.free_cores)) for one in chosen]


def _shared_out(nodes: Sequence[Candidate], slots: int) -> list[tuple[str, int]]:
    """Each slot goes where most cores are left for it; a node that gets none is left out."""
    if slots < 1:
        raise UsageError(f"a pool needs at least one worker, not {slots}")
    counts = dict.fromkeys((one.node for one in nodes), 0)
    for _ in range(slots):
        best = min(nodes, key=lambda one: (counts[one.node] + 1) / max(1, one.free_cores))
        counts[best.node] += 1
    return [(node, count) for node, count in counts.items() if count]


def _named(word: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    if word.startswith("@"):
        found = [one for one in candidates if word[1:] in one.labels]
        if not found:
            raise NotFound(f"no node has the label {word}", hint="see: ugro node ls")
        return _best(found, None)
    named = next((one for one in candidates if one.node == word), None)
    if named is None:
        raise NotFound(f"no node {word!r} in this cluster", hint="see: ugro node ls")
    if named.problem is not None:
        raise Unsatisfiable(named.problem, subject=word, hint=f"see: ugro health {word}")
    return [named]


def _best(candidates: Sequence[Candidate], count: int | None) -> list[Candidate]:
    usable = sorted((one for one in candidates if one.problem is None), key=lambda one: -one.free_cores)
    wanted = len(usable) if count is None else count
    if wanted < 1 and count is not None:
        raise UsageError(f"a pool needs at least one node, not {count}")
    if len(usable) < max(1, wanted):
        problems = "; ".join(f"{one.node}: {one.problem}" for one in candidates if one.problem is not None)
        text = f"{len(usable)} of {len(candidates)} nodes can be used, and {max(1, wanted)} are needed"
        raise Unsatisfiable(f"{text} ({problems})" if problems else text, hint="see: ugro health")
    return usable[:wanted]
