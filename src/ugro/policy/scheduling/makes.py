"""A job's demand in view of what the nodes are: with GPUs or without, and which nodes it must not or should not use.

What is free at the moment does not matter here: a job rather waits for a node on which it can run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ugro.core.job import ALL_GPUS, ANY_GPUS, Resources
from ugro.policy.scheduling.cluster_view import NodeView
from ugro.policy.scheduling.demand import Demand, Need, alternatives
from ugro.policy.scheduling.room import Free, Shape, Shapes, empty
from ugro.policy.scheduling.waiting_jobs import Kind
from ugro.policy.wording import in_words, names


class Demands:
    """One object per distinct demand: what failed for one job is not tried again for others with the same demand."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = nodes
        self._makes = Makes(nodes)
        self._makes_of: dict[str, Makes] = {}  # by user, where nodes let in some users and not others
        self._known: dict[tuple[Resources, bool, tuple[str, ...], bool, str], Demand] = {}
        self._by_kind: dict[Kind, Demand] = {}  # comparing kinds is far cheaper than comparing all that they say

    def of(self, kind: Kind) -> Demand:
        known = self._by_kind.get(kind)
        if known is not None:
            return known
        key = (kind.resources, kind.is_command, kind.imports, kind.is_firm, kind.user)
        demand = self._known.get(key)
        if demand is None:
            wanted = Wanted(kind.imports, kind.is_firm)
            needs = needs_of(kind.resources, kind.is_command, self._makes_for(kind.user), wanted)
            demand = self._known[key] = Demand(tuple(_of_user(need, kind.user) for need in needs))
        self._by_kind[kind] = demand
        return demand


    def _makes_for(self, user: str) -> Makes:
        """Without the nodes that refuse the user. One that is still being tried counts."""
        if user not in self._makes_of:
            objections = ((node, node.objection_to(user)) for node in self._nodes)
            left = [node for node, found in objections if found is None or not found.is_lasting]
            self._makes_of[user] = Makes(left) if len(left) < len(self._nodes) else self._makes
        return self._makes_of[user]


def _of_user(need: Need, user: str) -> Need:
    return replace(need, user=user, _fitting={}) if user else need


@dataclass(frozen=True, slots=True)
class Wanted:
    """The modules that a job's script imports."""

    imports: tuple[str, ...] = ()
    is_firm: bool = False  # without them it fails


NOTHING = Wanted()


class Makes:
    """What the nodes have in total, whether or not they are in use or take jobs now."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = nodes
        self._counts: Counter[tuple[Shape, Free]] | None = None
        self._awaited: list[NodeView] = []
        self._with_room: Makes | None = None  # those that take jobs and have room; None: all have
        if any(node.no_room is not None for node in nodes):
            self._with_room = Makes([node for node in nodes if node.unusable is None and node.no_room is None])

    def count(self, need: Need) -> int:
        """How many nodes can give a share. Nodes that have not reported yet count."""
        if self._counts is None:
            shapes = Shapes()
            self._awaited = [node for node in self._nodes if node.is_awaited]
            there = (node for node in self._nodes if not node.is_awaited)
            self._counts = Counter((shapes.of(node), empty(node, with_foreign=True)) for node in there)
        awaited = sum(need.may_use(node) for node in self._awaited)
        return awaited + sum(count for make, count in self._counts.items() if need.fits(*make))

    def has_enough(self, need: Need) -> bool:
        return self.count(need) >= need.min_nodes

    def with_room(self, need: Need) -> Need:
        """A node whose disk is full is not used as long as enough others take jobs, also if those are busy."""
        if self._with_room is None or not self._with_room.has_enough(need):
            return need
        return replace(need, wants_room=True, _fitting={})

    def must_leave(self, better: Need, other: Need, wanted: Wanted) -> bool:
        """Whether the script surely fails on what is better, and need not on the other."""
        if not wanted.is_firm or not self._lacks_any(wanted):
            return False
        imports = frozenset(wanted.imports)
        better, other = (replace(need, imports=imports, _fitting={}) for need in (better, other))
        return not self.has_enough(better) and self.has_enough(other)

    def with_imports(self, need: Need, wanted: Wanted) -> Need:
        """The same for nodes that lack what the script imports. If that is in doubt, they are only used last."""
        holders, lackers = self.holders(need, wanted)
        if not lackers:
            return need
        missing = frozenset(name for node in lackers for name in wanted.imports if name in node.lacks)
        strict = replace(need, imports=missing, _fitting={})
        if wanted.is_firm and self.has_enough(strict):
            return replace(strict, import_note=has_and_lacks(holders, lackers, missing), _fitting={})
        tail = " and is used last" if len(lackers) == 1 else " and are used last"
        words = has_and_lacks(holders, lackers, missing) + (tail if holders else "")
        if all(node.lacks.issuperset(missing) for node in self._nodes):
            words = f"no node has {in_words(sorted(missing))}, which the script imports"
        return replace(need, wishes=missing, import_note=words, _fitting={})

    def holders(self, need: Need, wanted: Wanted) -> tuple[list[NodeView], list[NodeView]]:
        """Of the nodes that can give a share, those that have what the script imports, and those that do not."""
        if not self._lacks_any(wanted):
            return [], []
        names, shapes = frozenset(wanted.imports), Shapes()
        able = [node for node in self._nodes if need.fits(shapes.of(node), empty(node, with_foreign=True))]
        return (
            [node for node in able if names.isdisjoint(node.lacks)],
            [node for node in able if not names.isdisjoint(node.lacks)],
        )

    def _lacks_any(self, wanted: Wanted) -> bool:
        return bool(wanted.imports) and any(not node.lacks.isdisjoint(wanted.imports) for node in self._nodes)


def needs_of(resources: Resources, on_one_node: bool, makes: Makes, wanted: Wanted = NOTHING) -> Iterator[Need]:
    """A need for each alternative. If the job left GPUs open, the cluster decides: with them if enough nodes have some.

    Ranks on GPUs and on cores cannot train together, so all nodes get the same. A job waits for GPUs that are in use or
    broken, because training without them would be far too slow.
    """
    for way in alternatives(resources):
        is_open = way.gpus_per_node == ANY_GPUS
        need = _decided(way, on_one_node, makes, wanted) if is_open else Need.of(way, on_one_node=on_one_node)
        yield makes.with_imports(makes.with_room(need), wanted)


def _decided(way: Resources, on_one_node: bool, makes: Makes, wanted: Wanted) -> Need:
    """With GPUs, or without."""
    on_gpus = Need.of(replace(way, gpus_per_node=ALL_GPUS), on_one_node=on_one_node)
    on_cores = Need.of(replace(way, gpus_per_node=0), on_one_node=on_one_node)
    found = makes.count(on_gpus)
    if found >= on_gpus.min_nodes:
        if not makes.must_leave(on_gpus, on_cores, wanted):
            return on_gpus
        note = f"without GPUs: too few nodes with GPUs have {in_words(wanted.imports)}"
    else:
        having = "such node has" if found == 1 else "such nodes have"
        note = f"without GPUs: only {found} {having} any" if found else ""
    return replace(on_cores, note=note, _fitting={})


def has_and_lacks(holders: Sequence[NodeView], lackers: Sequence[NodeView], missing: Collection[str]) -> str:
    """'gpu1 and gpu2 have torch; gpu3 lacks it'."""
    modules = in_words(sorted(missing))
    if not holders:
        return f"{_who_lacks(lackers, missing, modules)}, which the script imports"
    have = f"{names([node.name for node in holders])} {'has' if len(holders) == 1 else 'have'} {modules}"
    return f"{have}; {_who_lacks(lackers, missing, 'it' if len(missing) == 1 else 'them')}"


def _who_lacks(lackers: Sequence[NodeView], missing: Collection[str], all_of_them: str) -> str:
    whole = [node.name for node in lackers if node.lacks.issuperset(missing)]
    parts = [f"{names(whole)} {'lacks' if len(whole) == 1 else 'lack'} {all_of_them}"] if whole else []
    parts += [
        f"{node.name} lacks {in_words(sorted(node.lacks & frozenset(missing)))}"
        for node in lackers
        if not node.lacks.issuperset(missing)
    ]
    return ", ".join(parts)
