"""The kinds of values that only job files have."""

from __future__ import annotations

import json
import os.path
import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from ugro.kernel.config.kinds import (
    BadValueError,
    Kind,
    LeastSize,
    Limits,
    ListOf,
    Size,
    Text,
    Whole,
    expect_at_most,
    shown,
)
from ugro.kernel.config.section import (
    LABEL,
    NO_OPTION,
    SNIPPET,
    WORD,
    Nested,
    Section,
    is_job_name,
    is_line,
    is_node_name,
    key,
    nearest,
    nested,
    section,
)
from ugro.kernel.jobs.model import ALL_GPUS, ALL_NODES, ANY_GPUS, Cause, JobSpec, Launcher, Resources
from ugro.kernel.support.quantities import format_size

# --- how large a job may be -------------------------------------------------------------------------------------------
# The bounds are such that what is accepted can also be started: a node is told about its processes in one message, and
# Linux gives no program a longer word than 128 KiB.


MOST_WORDS = 10_000
LONGEST_BYTES = 128 * 1024 - 1  # of one word, or of one variable with its name
MOST_BYTES = 256 << 10  # of all words and variables of one process, as JSON
FILE_LIMITS = Limits(MOST_BYTES, 10_000)  # of files that users send: of jobs, sweeps and services
USE_A_FILE = "put them into a file that the program reads: code and --folder are sent to the nodes"
_MOST_ON_A_NODE = 816 << 10  # of its processes in one message, beside their own variables of UGRO's
_MOST_OF_RAY = 120 << 10  # its driver gets the words in one variable
_USUAL_PROCESSES = 16  # on a node, where the job takes all its GPUs


def why_too_large(spec: JobSpec) -> tuple[str, str] | None:
    """Returns the key that is too large and the reason; None if nodes can be told to start it."""
    words, variables = len(json.dumps(spec.argv)), len(json.dumps(dict(spec.env)))
    if max(words, variables) > LONGEST_BYTES:  # else no single one can be
        for key, one in (*(("args", word) for word in spec.argv), *(("env", f"{n}={v}") for n, v in spec.env)):
            if len(one.encode("utf-8", "surrogateescape")) > LONGEST_BYTES:
                return key, "one of them is longer than 128 KiB, which is all that Linux passes to a program"
    largest = "env" if variables > words else "command" if spec.launcher is Launcher.COMMAND else "args"
    if spec.launcher is Launcher.RAY and words > _MOST_OF_RAY:
        reason = f"the words of a Ray job may have {format_size(_MOST_OF_RAY)}, and these have {format_size(words)}"
        return "args", reason
    most, where = MOST_BYTES, ""
    if spec.launcher is Launcher.DDP:
        gpus = max((way.gpus_per_node for way in (spec.resources, *spec.resources.any_of)), default=0)
        processes = gpus if gpus > 0 else _USUAL_PROCESSES
        # One more: the ranks of an elastic training have a store beside them.
        most = min(MOST_BYTES, _MOST_ON_A_NODE // (processes + 1))
        where = f" of a script with up to {processes} processes on a node"
    if words + variables <= most:
        return None
    size = format_size(words + variables)
    return largest, f"the words and variables{where} may have {format_size(most)}, and these have {size}"


# --- kinds of values --------------------------------------------------------------------------------------------------


MOST_NODES = 10_000
_LARGEST_ID = 2**63 - 1
_MOST_FOLDERS = 20


@dataclass(frozen=True)
class Range:
    low: int
    high: int

    def __str__(self) -> str:
        if self.low == ALL_NODES:
            return "all"
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


class NodeCount(Kind):
    expected = "a number of nodes such as 3, a range such as 2..4, or all"
    metavar = "N|N..M|all"
    choices = ("all",)

    def parse(self, value: object) -> Range:
        if isinstance(value, Range):
            return value
        if isinstance(value, str) and value.strip() == "all":
            return Range(ALL_NODES, ALL_NODES)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.refuse(value)
        text = str(value) if isinstance(value, str) or 0 < value <= MOST_NODES else ""
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", text)
        if ends is None:
            raise self.refuse(value, hint=_node_count_hint(text.strip()))
        low, high = int(ends[1]), int(ends[2] or ends[1])
        if low > high:
            raise BadValueError(f"the range {shown(value)} ends before it begins", hint=f"write it as {high}..{low}")
        if low < 1 or high > MOST_NODES:
            raise BadValueError(f"expected 1 to {MOST_NODES} nodes, got {shown(value)}")
        return Range(low, high)

    def written(self, value: Range) -> object:
        return value.low if value.low == value.high != ALL_NODES else str(value)


def _node_count_hint(text: str) -> str | None:
    if text == "best":
        return "the best nodes are found before a job is submitted: ugro launch --nodes best"
    return "a range of nodes needs both ends: 2..4" if text.endswith("..") or text.startswith("..") else None


class FolderMap(Kind):
    """Names to paths on this machine; on a command line, texts such as ``model=~/models/x``."""

    expected = "a map of names to paths on this machine, such as {model: ~/models/x}"
    metavar = "NAME=PATH"

    def parse(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > _MOST_FOLDERS:
            raise self.refuse(value)
        found: dict[str, str] = {}
        for name, path in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
                raise BadValueError("expected names of letters, digits and _", hint="for example: model")
            if not isinstance(path, str) or not path.strip() or not is_line(path):
                raise BadValueError(f"expected a path on this machine, got {shown(path)}", at=(name,))
            found[name] = os.path.expanduser(path)
        if len({name.upper() for name in found}) != len(found):
            raise BadValueError("two names differ in their case alone", hint="each is a variable in capitals")
        return found


class CheckpointRule(Kind):
    expected = "all, none, best, or last N such as last 3"
    metavar = "RULE"
    choices = ("all", "none", "best")

    def parse(self, value: object) -> str:
        words = " ".join(value.split()) if isinstance(value, str) else ""
        if words not in self.choices and not re.fullmatch(r"last [1-9][0-9]{0,5}", words):
            raise self.refuse(value)
        return words


class Command(Kind):
    """A text is run by a shell; a list is not."""

    expected = "a list of words, or one text for sh -c"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return ("sh", "-c", SNIPPET.parse(value))
        if not isinstance(value, list | tuple):
            raise self.refuse(value)
        expect_at_most(MOST_WORDS, value, "words")
        if not value:
            raise BadValueError("expected at least the program's name, got an empty list")
        words = _words(value)
        if not words[0]:
            raise BadValueError("expected the program's name, got an empty text", at=(0,))
        return words

    def written(self, value: tuple[str, ...]) -> object:
        return list(value)


class Arguments(Kind):
    expected = "a list of words, or one text that is split at its spaces"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            expect_at_most(MOST_WORDS, value, "words")
            return _words(value)
        if not isinstance(value, str):
            raise self.refuse(value)
        if len(value) > MOST_BYTES:  # before its quotes are looked for
            raise BadValueError(f"expected at most {format_size(MOST_BYTES)} of words", hint=USE_A_FILE)
        try:
            words = shlex.split(value)
            expect_at_most(MOST_WORDS, words, "words")
            return _words(words)
        except BadValueError:
            raise
        except ValueError as error:
            # It may hold a secret, so it is not shown.
            raise BadValueError("a quote in it is not closed", hint="close it, or write a list of words") from error

    def written(self, value: tuple[str, ...]) -> object:
        return list(value)


class Signal(Kind):
    """Without KILL, which leaves no time to stop: ``grace: 0`` does the same."""

    choices = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
    metavar = "SIGNAL"

    def parse(self, value: object) -> str:
        name = value.upper().removeprefix("SIG") if isinstance(value, str) else ""
        if name not in self.choices:
            raise self.refuse(value, hint="to kill at once, use a grace of 0" if name == "KILL" else None)
        return name


class FailureCause(Kind):
    expected = "a cause of failure such as node_lost or exit_code:3"
    metavar = "CAUSE"
    choices = tuple(str(cause) for cause in Cause)

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        code = re.fullmatch(r"exit_code:([1-9][0-9]{0,2})", value)
        if value not in self.choices and not (code and int(code[1]) <= 255):
            near = nearest(value, self.choices)
            known = f"the causes are {', '.join(self.choices)}"
            raise self.refuse(value, hint=f"did you mean {near}?" if near else known)
        return value

    def written(self, value: str) -> object:
        return str(value)


class JobReference(Kind):
    """An id becomes a number; the agent finds the id of a name."""

    expected = "a job's id or name"
    metavar = "JOB"

    def parse(self, value: object) -> int | str:
        is_number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value)
        job = int(str(value)) if is_number else value
        if isinstance(job, int) and not isinstance(job, bool) and 1 <= job <= _LARGEST_ID:
            return job
        if isinstance(job, str) and (is_job_name(job) or job == "last"):
            return job
        raise self.refuse(value)


def _words(value: list[object] | tuple[object, ...] | list[str]) -> tuple[str, ...]:
    words = []
    for index, word in enumerate(value):
        try:
            words.append(WORD.parse(word))
        except BadValueError as error:
            raise error.within(index) from error
    return tuple(words)


# --- what a job needs of each node ------------------------------------------------------------------------------------
# This is the part ``resources`` of a job file.


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
