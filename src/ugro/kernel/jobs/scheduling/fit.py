"""Whether a job could run on these nodes if they were idle; if not, why, and the nearest request that could.

Drained and unreachable nodes count, and a node that has never reported counts as fitting: a job is refused only for
what is known. Broken GPUs do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, Placement, Resources
from ugro.kernel.jobs.scheduling.demand import (
    Demand,
    Free,
    Need,
    Shape,
    Shapes,
    alternatives,
    empty,
    gpu_fits,
    names_in,
)
from ugro.kernel.jobs.scheduling.model import GpuView, NodeView, NoLogin, with_named
from ugro.kernel.jobs.scheduling.queue import DOOMED, PARKED, Kind, Line
from ugro.kernel.links.model import Limits
from ugro.kernel.support.quantities import count_of, format_size, in_words, names

# --- nodes without limits of memory -----------------------------------------------------------------------------------
# They do not hold a job to the memory that it asks for.


def unlimited_memory(placement: Placement, limits: Mapping[str, Limits]) -> str | None:
    """For a job that asks for memory: which of its nodes do not hold it to that."""
    shares = [share for share in placement.shares if share.memory_bytes]
    names = [node_of(share.node) for share in shares]
    nodes = [name for name in names if name in limits and not limits[name].holds_memory]
    if not nodes:
        return None
    size = format_size(max(share.memory_bytes for share in shares))
    return f"{size} of memory is reserved on {in_words(nodes)}, and not enforced there: the job could take more"


# --- a job's demand on these nodes ------------------------------------------------------------------------------------
# It says whether the job uses GPUs, and which nodes it must not or should not use. What is free at the moment does not
# matter here: a job rather waits for a node on which it can run.


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


# --- whether a job could ever start -----------------------------------------------------------------------------------


_MIB = 2**20
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Misfit:
    reason: str
    hint: str | None = None  # what to request instead
    nearest: Resources | None = None  # the same as a value; it is known to fit

    def __str__(self) -> str:
        return f"{self.reason}; {self.hint}" if self.hint else self.reason


def check_fits(resources: Resources, nodes: Sequence[NodeView], *, on_one_node: bool = False) -> Misfit | None:
    """``on_one_node``: the launcher uses one node, whatever number is requested."""
    if (unknown := sorted(names_in(resources) - {node.name for node in nodes})) and nodes:
        return Misfit(f"there is no node {unknown[0]}; there are {names([node.name for node in nodes])}")
    nodes = with_named(nodes, names_in(resources))
    needs = list(needs_of(resources, on_one_node, Makes(nodes)))
    misfits = []
    for need in needs:
        misfit = _check(need, nodes, on_one_node)
        if misfit is None:
            return None
        misfits.append(misfit)
    if len(misfits) == 1:
        return misfits[0]
    return Misfit(f"none of the {len(needs)} alternatives fits: {names([misfit.reason for misfit in misfits])}")


def _check(need: Need, nodes: Sequence[NodeView], on_one_node: bool) -> Misfit | None:
    capable = _capable(need, nodes)
    if len(capable) >= need.min_nodes:
        return None
    wanted = replace(need.resources, min_nodes=need.min_nodes, max_nodes=need.max_nodes)
    known = [node for node in nodes if node.is_known]
    reason = (_shortage(wanted, known) if known or not nodes else None) or _too_few(need, capable)
    for nearest in _nearer(wanted, nodes, len(capable)):
        asked = Need.of(nearest)
        can_span = not on_one_node or nearest.min_nodes == 1
        if can_span and len(_capable(asked, nodes)) >= asked.min_nodes:
            return Misfit(reason, f"with {_flags(wanted, nearest)} it would fit", nearest)
    return Misfit(reason)


def _capable(need: Need, nodes: Sequence[NodeView]) -> list[NodeView]:
    shapes = Shapes()
    return [
        node
        for node in nodes
        if (need.may_use(node) and not node.is_known)
        or need.fits(shapes.of(node), empty(node, with_foreign=True))
    ]


def _shortage(wanted: Resources, nodes: Sequence[NodeView]) -> str | None:
    """The one thing that no node has; None if each is available on some node."""
    if not nodes:
        return "there are no nodes"
    nodes = [node for node in nodes if not wanted.only or node.name in wanted.only]
    for label in wanted.labels:
        if not any(label in node.labels for node in nodes):
            known = sorted({label for node in nodes for label in node.labels})
            return f"no node has the label {label}; " + (f"there are {names(known)}" if known else "none has any")
    labelled = [node for node in nodes if set(wanted.labels) <= set(node.labels)]
    if not labelled:
        return f"no node has the labels {in_words(wanted.labels)} together"
    return _gpu_shortage(wanted, labelled) or _host_shortage(wanted, labelled)


def _gpu_shortage(wanted: Resources, nodes: Sequence[NodeView]) -> str | None:
    least = 1 if wanted.gpus_per_node == ALL_GPUS else wanted.gpus_per_node
    largest = max(nodes, key=lambda node: len(_fitting(wanted, node)))
    most = len(_fitting(wanted, largest))
    if most >= least:
        return None
    if not any(_working(node) for node in nodes):
        return "no node has a GPU" + _broken(nodes)
    if not most:
        return _gpu_kind_shortage(wanted, nodes) + _broken(nodes)
    such = " like that" if wanted.gpu_models or wanted.gpu_memory_bytes else ""
    return f"no node has {count_of(least, 'GPU')}{such}; the largest has {most} ({largest.name})" + _broken(nodes)


def _gpu_kind_shortage(wanted: Resources, nodes: Sequence[NodeView]) -> str:
    named = replace(wanted, gpu_memory_bytes=None)
    matching = [(gpu, node) for node in nodes for gpu in _fitting(named, node)]
    if not matching:
        models = sorted({gpu.model for node in nodes for gpu in _working(node)})
        return f"no GPU is {in_words(wanted.gpu_models, 'or')}; there are {names(models)}"
    gpu, node = max(matching, key=lambda found: found[0].memory_bytes or 0)
    such = " like that" if wanted.gpu_models else ""
    has = "is not known" if gpu.memory_bytes is None else f"has {format_size(gpu.memory_bytes)}"
    return (
        f"no GPU{such} has {format_size(wanted.gpu_memory_bytes or 0)}; "
        f"the largest {has} ({gpu.model} on {node.name})"
    )


def _host_shortage(wanted: Resources, nodes: Sequence[NodeView]) -> str | None:
    largest = max(nodes, key=lambda node: node.cores)
    if wanted.cpus is not None and largest.cores < wanted.cpus:
        return f"no node has {count_of(wanted.cpus, 'core')}; the largest has {largest.cores} ({largest.name})"
    largest = max(nodes, key=lambda node: node.memory_bytes)
    if largest.memory_bytes < wanted.memory_bytes:
        most = format_size(largest.memory_bytes)
        return f"no node has {format_size(wanted.memory_bytes)} of memory; the largest has {most} ({largest.name})"
    return None


def _too_few(need: Need, capable: Sequence[NodeView]) -> str:
    if not capable:
        return f"no node has it all together; it needs {need}"
    have = "has" if len(capable) == 1 else "have"
    return f"it needs {need}; only {len(capable)} {have} that ({names([node.name for node in capable])})"


def _nearer(wanted: Resources, nodes: Sequence[NodeView], capable: int) -> Iterator[Resources]:
    """What to ask for instead, the least different first. Not all of these fit."""
    if capable:
        yield replace(wanted, min_nodes=capable, max_nodes=capable)
    if wanted.gpus_per_node > 0:
        yield from _other_gpu_counts(wanted, nodes)
    memories = {gpu.memory_bytes or 0 for node in nodes for gpu in node.gpus}
    yield from (replace(wanted, gpu_memory_bytes=size) for size in _below(wanted.gpu_memory_bytes or 0, memories))
    yield from (replace(wanted, cpus=cores) for cores in _below(wanted.cpus or 0, {node.cores for node in nodes}))
    sizes = {node.memory_bytes for node in nodes}
    yield from (replace(wanted, memory_bytes=size) for size in _below(wanted.memory_bytes, sizes))


def _other_gpu_counts(wanted: Resources, nodes: Sequence[NodeView]) -> Iterator[Resources]:
    """The same number of GPUs on more nodes, evenly or not; then fewer of them."""
    one_each = _capable(Need.of(replace(wanted, gpus_per_node=1)), nodes)
    per_node = sorted((len(_fitting(wanted, node)) for node in one_each), reverse=True)
    counts = _below(wanted.gpus_per_node, set(per_node))
    total = wanted.min_nodes * wanted.gpus_per_node
    for count in counts:
        if total % count == 0:
            yield replace(wanted, min_nodes=total // count, max_nodes=total // count, gpus_per_node=count)
    enough = next((nodes for nodes, gpus in enumerate(accumulate(per_node), start=1) if gpus >= total), None)
    if enough is not None:
        yield replace(wanted, min_nodes=enough, max_nodes=enough, gpus_per_node=ALL_GPUS)
    yield from (replace(wanted, gpus_per_node=count) for count in counts)


def _below(wanted: int, there_are: set[int]) -> list[int]:
    return sorted((amount for amount in there_are if 0 < amount < wanted), reverse=True)


def _flags(wanted: Resources, nearest: Resources) -> str:
    gpus = "all" if nearest.gpus_per_node == ALL_GPUS else str(nearest.gpus_per_node)
    flags = (
        ("--nodes", wanted.min_nodes, nearest.min_nodes, str(nearest.min_nodes)),
        ("--gpus-per-node", wanted.gpus_per_node, nearest.gpus_per_node, gpus),
        ("--gpu-memory", wanted.gpu_memory_bytes, nearest.gpu_memory_bytes, _size(nearest.gpu_memory_bytes or 0)),
        ("--cpus", wanted.cpus, nearest.cpus, str(nearest.cpus)),
        ("--memory", wanted.memory_bytes, nearest.memory_bytes, _size(nearest.memory_bytes)),
    )
    return " ".join(f"{flag} {text}" for flag, old, new, text in flags if old != new)


def _size(size_bytes: int) -> str:
    # Rounded down: what is suggested must still fit.
    return f"{size_bytes // _GIB}GiB" if size_bytes % _GIB == 0 else f"{size_bytes // _MIB}MiB"


def _fitting(wanted: Resources, node: NodeView) -> list[GpuView]:
    return [gpu for gpu in _working(node) if gpu_fits(wanted, gpu.model, gpu.memory_bytes)]


def _working(node: NodeView) -> list[GpuView]:
    return [gpu for gpu in node.gpus if not gpu.is_broken]


def _broken(nodes: Sequence[NodeView]) -> str:
    broken = [f"GPU {gpu.index} of {node.name}" for node in nodes for gpu in node.gpus if gpu.is_broken]
    return f"; broken: {names(broken)}" if broken else ""


# --- users' accounts on nodes -----------------------------------------------------------------------------------------
# Says whether a user's jobs can start on a node that has accounts of its users, and whether waiting helps.


# About the account, and mended by a person only. A name that is not found for a moment, or a full disk, is not: a job
# that may use GPUs must not start without them because its node is being tried.
_LASTING_CAUSES = frozenset({"login-denied", "python-missing", "python-old", "home-not-writable", "unsafe-folder"})


class Seeker(NamedTuple):
    """A user with jobs that wait for nodes: for those of these names, or for any, with all of these labels."""

    user: str
    only: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def may_use(self, node: str, labels: Collection[str]) -> bool:
        return (not self.only or node in self.only) and all(label in labels for label in self.labels)


def seekers(lines: Iterable[Line]) -> set[Seeker]:
    """Jobs that wait for something else than nodes need no login yet."""
    kinds = [(line.user, line.kind.resources) for line in lines if line.kind not in (PARKED, DOOMED)]
    return {Seeker(user, way.only, way.labels) for user, resources in kinds for way in alternatives(resources)}


@dataclass(frozen=True, slots=True)
class LoginView:
    """A node as one user reaches it: its link, and what the node has said over it."""

    user: str
    account: str
    is_valid: bool = True  # whether the account's name is one that systems allow
    is_open: bool = False
    error: str | None = None  # of the last try, while it is not open
    cause: str | None = None
    is_other_machine: bool = False  # than the node's own link leads to
    has_reported: bool = False  # what runs there


def objection(view: LoginView) -> NoLogin | None:
    """None: the user's jobs can start there."""
    user, account = view.user, view.account
    if not view.is_valid:
        return NoLogin(user, f"has no account for {user}: {account!r} is no account's name", is_lasting=True)
    if not view.is_open:
        if view.error is None:
            return NoLogin(user, f"is being connected as {account}")
        return NoLogin(user, f"cannot be reached as {account}: {view.error}", view.cause in _LASTING_CAUSES)
    if view.is_other_machine:
        return NoLogin(user, f"is another machine for {account}: its GPUs are not the same", is_lasting=True)
    return None if view.has_reported else NoLogin(user, f"has not said yet what runs there as {account}")
