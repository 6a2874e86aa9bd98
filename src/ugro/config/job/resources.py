"""The part ``resources`` of a job file: what the job needs on each of its nodes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Self

from ugro.config.job.kinds import NodeCount, Range
from ugro.config.kinds import BadValueError, LeastSize, ListOf, Size, Text, Whole
from ugro.config.names import LABEL, is_line, is_node_name
from ugro.config.section import NO_OPTION, Nested, Section, key, nested, section
from ugro.core.job import ALL_GPUS, ANY_GPUS, Launcher, Resources

_MOST_GPUS = 256  # the node program starts no more processes than that for one job
_LABELS = ListOf("a list of words such as [fast, lab2]", LABEL)
_NODES = ListOf("a list of nodes such as [gpu1, gpu2]", Text("a node's name", is_node_name, metavar="NODE"))
_MODELS = ListOf(
    "a model such as RTX4090, or a list of them", Text("a model's name", is_line, metavar="WORD"), may_be_single=True
)
GPUS = ("gpus", "num_gpus", "ngpus")  # what some call gpus_per_node


@section
class GpuSection(Section):
    """Which GPUs the job accepts. Without keys, any."""

    memory: int | None = key(
        None, LeastSize(), "Least memory of each GPU.", example="8GB..", option="gpu_memory"
    )
    model: tuple[str, ...] = key(
        (),
        _MODELS,
        "Accept only GPUs whose name contains one of these words. Case, spaces and dashes are ignored.",
        example=["RTX4090", "RTX3090"],
        option="gpu_model",
    )

    @property
    def is_given(self) -> bool:
        return self.memory is not None or bool(self.model)


@section
class AlternativeSection(Section):
    """What the job needs on each node."""

    elsewhere = MappingProxyType(dict.fromkeys(GPUS, "did you mean gpus_per_node?"))

    nodes: Range = key(
        Range(1, 1),
        NodeCount(),
        "Number of nodes. With a range, the job takes as many as are free when it starts. `all` are those that can "
        "take it when it is submitted, free or not.",
        example="2..4",
    )
    gpus_per_node: int | None = key(
        None,
        Whole(0, _MOST_GPUS, names={"all": ALL_GPUS}),
        "Number of GPUs on each node. `all` is every free one that `gpu` accepts, and at least one. "
        "Null is 1 where `gpu` asks for something. Otherwise it is 0 for a command; for a script it is `all` if enough "
        "nodes have GPUs, and 0 on every node if not.",
        example="all",
    )
    gpu: GpuSection = nested(GpuSection)
    cpus: int | None = key(
        None,
        Whole(0, 100_000),
        "Number of CPU cores on each node. The job gets no more than that: by control groups, or else by affinity; "
        "`OMP_NUM_THREADS` is set to its part for each process, unless you set it. "
        "Null reserves one per process, as far as the node has them, and limits nothing; with 0 the job reserves none, "
        "and up to four such jobs per core share a node.",
        example=4,
    )
    memory: int | None = key(
        None,
        Size(),
        "Memory on each node. A job that takes more is ended, if the node can enforce that (`ugro node show`); "
        "elsewhere it is only reserved.",
        example="16GB",
    )
    labels: tuple[str, ...] = key(
        (), _LABELS, "Use only nodes that have all of these labels.", example=["fast"], option="label"
    )
    only: tuple[str, ...] = key((), _NODES, "Use only these nodes.", example=["gpu1", "gpu2"])

    def check(self) -> None:
        if self.gpus_per_node == 0 and self.gpu.is_given:
            raise BadValueError(
                "0 GPUs cannot have a model or a memory size",
                hint="ask for at least one GPU, or leave out its model and memory",
                at=("gpus_per_node",),
            )

    def resources(self, launcher: Launcher) -> Resources:
        return Resources(
            min_nodes=self.nodes.low,
            max_nodes=self.nodes.high,
            gpus_per_node=_default_gpus(self.gpu, launcher) if self.gpus_per_node is None else self.gpus_per_node,
            gpu_memory_bytes=self.gpu.memory,
            gpu_models=self.gpu.model,
            cpus=self.cpus,
            memory_bytes=self.memory or 0,
            labels=self.labels,
            only=self.only,
        )

    @classmethod
    def of_resources(cls, wanted: Resources, launcher: Launcher) -> Self:
        gpu = GpuSection(memory=wanted.gpu_memory_bytes, model=wanted.gpu_models)
        is_default = wanted.gpus_per_node == _default_gpus(gpu, launcher)
        return cls(
            nodes=Range(wanted.min_nodes, wanted.max_nodes),
            gpus_per_node=None if is_default else wanted.gpus_per_node,
            gpu=gpu,
            cpus=wanted.cpus,
            memory=wanted.memory_bytes or None,
            labels=wanted.labels,
            only=wanted.only,
        )


@section
class ResourcesSection(AlternativeSection):
    """What the job needs. The same is needed on each of its nodes."""

    any_of: tuple[AlternativeSection, ...] = key(
        (),
        ListOf("a list of maps", Nested(AlternativeSection), may_repeat=True),
        "Alternatives, the preferred one first: maps with the keys above, which can then not be used beside `any_of`.",
        example=[{"gpus_per_node": 2}, {"nodes": 2, "gpus_per_node": 1}],
        option=NO_OPTION,
    )

    def check(self) -> None:
        super().check()
        others = [name for name in self.known_keys() if name in self.given_keys and name != "any_of"]
        if self.any_of and others:
            raise BadValueError("cannot be used beside any_of", hint="put it into each alternative", at=(others[0],))

    def resources(self, launcher: Launcher) -> Resources:
        if self.any_of:
            return Resources(any_of=tuple(way.resources(launcher) for way in self.any_of))
        return super().resources(launcher)

    @classmethod
    def of_resources(cls, wanted: Resources, launcher: Launcher) -> Self:
        if wanted.any_of:
            return cls(any_of=tuple(AlternativeSection.of_resources(one, launcher) for one in wanted.any_of))
        return super().of_resources(wanted, launcher)


def _default_gpus(gpu: GpuSection, launcher: Launcher) -> int:
    if gpu.is_given:
        return 1
    return 0 if launcher is Launcher.COMMAND else ANY_GPUS
