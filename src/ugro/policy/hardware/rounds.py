"""Who is measured when: no node takes part in two measurements at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Pair = tuple[str, str]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, each node at most once in a round: the rounds of a tournament."""
    places: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        # The first one stays, the others move on by one place.
        places = [places[0], places[-1], *places[1:-1]]
    return [one for one in found if one]


def waves(machines: Mapping[str, str]) -> list[list[str]]:
    """``machines``: by node, the machine that it is on. Of nodes on one machine, one is measured at a time."""
    found: list[list[str]] = []
    taken: dict[str, int] = {}
    for node, machine in machines.items():
        turn = taken.get(machine, 0)
        taken[machine] = turn + 1
        if turn == len(found):
            found.append([])
        found[turn].append(node)
    return found
