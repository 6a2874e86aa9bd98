"""Whether a job could run on these nodes if they were idle; if not, why, and the nearest request that could.

Drained and unreachable nodes count, and a node that has never reported counts as fitting: a job is refused only for
what is known. Broken GPUs do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ugro.core.job import ALL_GPUS, Resources
from ugro.core.support.quantity import format_size
from ugro.policy.scheduling.cluster_view import GpuView, NodeView, with_named
from ugro.policy.scheduling.demand import Need, gpu_fits, names_in
from ugro.policy.scheduling.makes import Makes, needs_of
from ugro.policy.scheduling.room import Shapes, empty
from ugro.policy.wording import count_of, in_words, names

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
