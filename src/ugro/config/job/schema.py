"""Every key of a job file: its kind, its default and what it means. It reads no file and resolves no names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from ugro.config.job.kinds import (
    JOB_NAME,
    LABEL,
    PRIORITIES,
    SNIPPET,
    Arguments,
    BalanceMode,
    CheckpointRule,
    Command,
    FailureCause,
    GpuCount,
    JobEnvironment,
    JobReference,
    LeastSize,
    NodeCount,
    OneOrMore,
    Priority,
    Range,
    Signal,
    Size,
    TimeSpan,
    is_job_name,
    is_path_inside,
    is_path_on_node,
    is_path_without_detour,
)
from ugro.config.kinds import BadValueError, Choice, Flag, ListOf, OrNull, Text, Whole, is_line
from ugro.config.schema import Section
from ugro.config.yamltext import shown
from ugro.core import job
from ugro.core.job import JobSpec, Launcher, OnLost
from ugro.policy.balance.planner import Mode

_DAY_S = 86400.0
_LABELS = ListOf("a list of words such as [fast, lab2]", LABEL)
_MODELS = OneOrMore(ListOf("a model such as RTX4090, or a list of them", Text("a model's name", is_line)))
_CAUSES = ListOf("a list of causes such as [node_lost, cuda_oom]", FailureCause())
_JOBS = ListOf("a list of ids and names such as [12, prepare]", JobReference())
_SCRIPT = Text("a Python file such as train.py, without .. in its path", is_path_without_detour)
_CHECKPOINTS = Text("a directory such as checkpoints or /data/run1, without ..", is_path_without_detour)
_NODE_PATH = Text("a directory on the node that begins with / or ~", is_path_on_node)
_LINE = Text("a text on one line", is_line)
_OUTPUT = Text("a pattern inside the job's directory, such as results/*.csv", is_path_inside)
_INPUT = Text("a file on this machine", is_line, expands_home=True)

SecondsOrNull = Annotated[float | None, OrNull(TimeSpan(365 * _DAY_S))]


class GpuSection(Section):
    """Which GPUs will do. Without keys, any."""

    memory: Annotated[int | None, OrNull(LeastSize())] = Field(
        None, description="The least memory of each GPU.", examples=["8GB.."]
    )
    model: Annotated[tuple[str, ...], _MODELS] = Field(
        (),
        description="Words of which a GPU's name has at least one; case, spaces and dashes do not matter.",
        examples=[["RTX4090", "RTX3090"]],
    )

    @property
    def is_given(self) -> bool:
        return self.memory is not None or bool(self.model)


class AlternativeSection(Section):
    """What each node of the job gives to it."""

    nodes: Annotated[Range, NodeCount()] = Field(
        Range(1, 1),
        description="On how many nodes it runs; of a range, as many as can be had when it starts.",
        examples=["2..4"],
    )
    gpus_per_node: Annotated[int | None, OrNull(GpuCount())] = Field(
        None,
        description="How many GPUs of each node; `all` is every free one that will do, and at least one. "
        "Null is 1 where `gpu` asks for something; else 0 for a command, and for a script `all` where as many nodes "
        "have GPUs as it needs, 0 on every node where they do not.",
        examples=["all"],
    )
    gpu: GpuSection = Field(default_factory=GpuSection)
    cpus: Annotated[int | None, OrNull(Whole(0, 100_000))] = Field(
        None,
        description="How many cores of each node. Null is one for each process, as far as the node has them; with 0 it "
        "takes none, and up to four such jobs per core share a node.",
        examples=[4],
    )
    memory: Annotated[int | None, OrNull(Size())] = Field(
        None, description="How much memory of each node.", examples=["16GB"]
    )
    labels: Annotated[tuple[str, ...], _LABELS] = Field(
        (), description="Labels that each node must have, all of them.", examples=[["fast"]]
    )

    @model_validator(mode="after")
    def _has_gpus_to_choose(self) -> Self:
        if self.gpus_per_node == 0 and self.gpu.is_given:
            raise BadValueError(
                "there is nothing to choose among 0 GPUs",
                hint="ask for at least one, or say nothing about its model and memory",
                at=("gpus_per_node",),
            )
        return self

    def resources(self, launcher: Launcher) -> job.Resources:
        default_gpus = 0 if launcher is Launcher.COMMAND else job.ANY_GPUS
        if self.gpu.is_given:
            default_gpus = 1
        return job.Resources(
            min_nodes=self.nodes.low,
            max_nodes=self.nodes.high,
            gpus_per_node=default_gpus if self.gpus_per_node is None else self.gpus_per_node,
            gpu_memory_bytes=self.gpu.memory,
            gpu_models=self.gpu.model,
            cpus=self.cpus,
            memory_bytes=self.memory or 0,
            labels=self.labels,
        )


class ResourcesSection(AlternativeSection):
    """What the job needs. Every node of it gets the same demands."""

    any_of: tuple[AlternativeSection, ...] = Field(
        (),
        description="Alternatives, the preferred one first: maps with the keys above, which then stand only there.",
        examples=[[{"gpus_per_node": 2}, {"nodes": 2, "gpus_per_node": 1}]],
    )

    @field_validator("any_of", mode="before")
    @classmethod
    def _is_a_list(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise BadValueError(f"expected a list of maps, got {shown(value)}")
        return value

    @model_validator(mode="after")
    def _stands_alone(self) -> Self:
        others = [key for key in type(self).model_fields if key in self.model_fields_set and key != "any_of"]
        if self.any_of and others:
            raise BadValueError("does not count beside any_of", hint="put it into each alternative", at=(others[0],))
        return self

    def resources(self, launcher: Launcher) -> job.Resources:
        if self.any_of:
            return job.Resources(any_of=tuple(way.resources(launcher) for way in self.any_of))
        return super().resources(launcher)


class AfterSection(Section):
    """Jobs that it waits for, by id or by name; of several with one name, the newest."""

    ok: Annotated[tuple[int | str, ...], _JOBS] = Field(
        (), description="Jobs that must have succeeded; if one fails, this one does.", examples=[["prepare"]]
    )
    any: Annotated[tuple[int | str, ...], _JOBS] = Field(
        (), description="Jobs that must have ended, well or not.", examples=[[12]]
    )


class RetrySection(Section):
    """What happens after a failure. What the machines did to a job is retried anyway, up to a budget."""

    max: Annotated[int, Whole(0, 100)] = Field(
        0,
        description="How often it is tried again; progress to a newer checkpoint starts the count anew.",
        examples=[3],
    )
    on: Annotated[tuple[str, ...], _CAUSES] = Field(
        (),
        description="The only causes after which a retry is used; empty: all but what would surely happen again.",
        examples=[["cuda_oom", "nccl_timeout"]],
    )
    never_on: Annotated[tuple[str, ...], _CAUSES] = Field(
        (), description="Causes after which it is never tried again.", examples=[["import_error"]]
    )

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        both = [cause for cause in self.never_on if cause in self.on]
        if both:
            raise BadValueError(f"{both[0]} is in on, too", hint="remove it from one of them", at=("never_on",))
        if self.on and not self.max:
            raise BadValueError("it has no retries to use", hint="say how many it has", at=("on",))
        return self

    def retry(self) -> job.Retry:
        return job.Retry(self.max, self.on, self.never_on)


class CheckpointSection(Section):
    """Where the job keeps what a later attempt can go on from."""

    dir: Annotated[str | None, OrNull(_CHECKPOINTS)] = Field(
        None,
        description="The directory of its checkpoints; a relative one is inside the job's directory.",
        examples=["checkpoints"],
    )
    every: SecondsOrNull = Field(
        None, description="How often it should write one; null leaves it to the program.", examples=["10m"]
    )

    def checkpoint(self) -> job.Checkpoint:
        return job.Checkpoint(self.dir, self.every)


class DisconnectSection(Section):
    """What happens when a node of the job cannot be reached. Its processes go on meanwhile."""

    lost_after: Annotated[float, TimeSpan(365 * _DAY_S)] = Field(
        job.Disconnect().lost_after_s, description="How long until the node counts as lost, in seconds."
    )
    on_lost: Annotated[str, Choice(tuple(OnLost))] = Field(
        str(job.Disconnect().on_lost),
        description="What to do then: wait for the node, or restart elsewhere once its processes have surely ended.",
    )

    def disconnect(self) -> job.Disconnect:
        return job.Disconnect(self.lost_after, OnLost(self.on_lost))


class StopSection(Section):
    """How the job is told to end: cancelled, preempted, or over its time limit."""

    signal: Annotated[str, Signal()] = Field(job.Stop().signal, description="The signal that its processes get first.")
    grace: Annotated[float, TimeSpan(3600.0, may_be_zero=True)] = Field(
        job.Stop().grace_s, description="How long they then have before they are killed, in seconds."
    )

    def stop(self) -> job.Stop:
        return job.Stop(self.signal, self.grace)


class ResultsSection(Section):
    """What of the job's outputs comes home. What does not stays on the node, and `ugro results` says so."""

    checkpoints: Annotated[str, CheckpointRule()] = Field(
        job.ResultRule().checkpoints,
        description="Which of the checkpoints in `$UGRO_OUTPUT/checkpoints`: `last 3` are the newest three; `best` are "
        "those with best in their name, or else the newest.",
        examples=["last 3"],
    )
    limit: Annotated[int | None, OrNull(Size())] = Field(
        None, description="How much of one attempt from one node, small files first.", examples=["20GB"]
    )

    def rule(self) -> job.ResultRule:
        return job.ResultRule(self.checkpoints, self.limit)


class JobSection(Section):
    """What runs, where, and what happens when it does not go well."""

    name: Annotated[str | None, OrNull(JOB_NAME)] = Field(
        None, description="What it is called; without it, after its script or program.", examples=["train"]
    )
    command: Annotated[tuple[str, ...] | None, OrNull(Command())] = Field(
        None,
        description="What to run: a list is run as it is, a text by `sh -c`.",
        examples=[["./prepare.sh", "--all"]],
    )
    script: Annotated[str | None, OrNull(_SCRIPT)] = Field(
        None,
        description="A Python file to run instead of a command: one process per GPU, or one per node without GPUs.",
        examples=["train.py"],
    )
    args: Annotated[tuple[str, ...], Arguments()] = Field(
        (), description="The script's arguments.", examples=[["--epochs", "10"]]
    )
    launcher: Annotated[str | None, OrNull(Choice(tuple(Launcher)))] = Field(
        None,
        description="What starts the processes: UGRO itself with torchrun's environment (ddp), PyTorch's own launcher "
        "(torchrun), or a command on one node. Null is ddp for a script, else command.",
        examples=["torchrun"],
    )
    balance: Annotated[str | None, OrNull(BalanceMode(tuple(Mode)))] = Field(
        None,
        description="How a training with `ugro.train` shares its batches among the ranks: equally (off), by what the "
        "devices are (static), or by what is measured while it runs (adaptive). Null leaves it to the script, which "
        "without a wish of its own is adaptive.",
        examples=["static"],
    )
    env: Annotated[dict[str, str | None], JobEnvironment()] = Field(
        default_factory=dict,
        description="Environment variables. One without a value must come with the submit: from `--env`, or from the "
        "submitter's own environment.",
        examples=[{"HF_HOME": "/data/hf"}],
    )
    setup: Annotated[str | None, OrNull(SNIPPET)] = Field(
        None,
        description="A shell snippet that is run before the job, once per node and content.",
        examples=["pip install -r requirements.txt"],
    )
    workdir: Annotated[str | None, OrNull(Text("a directory on this machine", is_line, expands_home=True))] = Field(
        None,
        description="The directory here whose code goes to the nodes; a relative one is seen from the job file. "
        "Null is the job file's own directory.",
        examples=["~/project"],
    )
    cwd: Annotated[str | None, OrNull(_NODE_PATH)] = Field(
        None,
        description="The directory on the node to run in, as it is there; null is the job's own copy of the code.",
        examples=["~/project"],
    )
    sync: Annotated[bool, Flag()] = Field(
        True,
        description="Whether the code in `workdir` goes to the nodes, as it is when the job is submitted; not where "
        "there is a `cwd`.",
        examples=[False],
    )
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    priority: Annotated[int, Priority()] = Field(
        PRIORITIES["normal"],
        description="Who goes first: urgent is 90, normal is 50, batch is 10.",
        examples=["batch"],
    )
    preemptible: Annotated[bool | None, OrNull(Flag())] = Field(
        None,
        description="Whether a more urgent job may take its place; it is then queued again. Null is true for batch and "
        "below, else false.",
        examples=[True],
    )
    time_limit: SecondsOrNull = Field(None, description="How long an attempt may run.", examples=["8h"])
    after: AfterSection = Field(default_factory=AfterSection)
    retry: RetrySection = Field(default_factory=RetrySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    disconnect: DisconnectSection = Field(default_factory=DisconnectSection)
    stop: StopSection = Field(default_factory=StopSection)
    outputs: Annotated[tuple[str, ...], ListOf("a list of patterns such as ['results/*.csv']", _OUTPUT)] = Field(
        (),
        description="Files to bring home from the job's directory, beside what it writes to `$UGRO_OUTPUT`: those that "
        "changed since it began. A directory is all below it, `**` any directories.",
        examples=[["results/*.csv"]],
    )
    results: ResultsSection = Field(default_factory=ResultsSection)
    seed: Annotated[int | None, OrNull(Whole(0, 2**32 - 1))] = Field(
        None, description="Given to every process as `UGRO_SEED`, also when it is run again.", examples=[42]
    )
    inputs: Annotated[tuple[str, ...], ListOf("a list of files such as [data/train.csv]", _INPUT)] = Field(
        (),
        description="Files on this machine that count for `cache`, by their content; a relative one is seen from "
        "`workdir`.",
        examples=[["data/train.csv"]],
    )
    cache: Annotated[bool, Flag()] = Field(
        False,
        description="Do not run what has succeeded before with the same code, command, environment and inputs.",
        examples=[True],
    )
    notify: Annotated[tuple[str, ...], ListOf("a list of texts such as [mail]", _LINE)] = Field(
        (),
        description="The channels of the cluster file that are told when it ends; log is the agent's log.",
        examples=[["mail"]],
    )

    @model_validator(mode="after")
    def _runs_one_thing(self) -> Self:
        if self.command is not None and self.script is not None:
            raise BadValueError("there is a command, too", hint="a job runs one of them", at=("script",))
        if self.command is None and self.script is None:
            raise BadValueError("there is nothing to run", hint="give a script such as train.py, or a command")
        if self.args and self.script is None:
            raise BadValueError("only a script has args", hint="put them into the command itself", at=("args",))
        if self.balance and self.script is None:
            raise BadValueError("a command runs in one process", hint="a script can have ranks", at=("balance",))
        return self

    @model_validator(mode="after")
    def _suits_its_launcher(self) -> Self:
        if self.script is not None and self.launcher == Launcher.COMMAND:
            hint = "give a command that runs it: python3 train.py"
            raise BadValueError("a script is run by ddp or torchrun", hint=hint, at=("launcher",))
        if self.script is None and self.launcher in (Launcher.DDP, Launcher.TORCHRUN):
            hint = "give a script and its args"
            raise BadValueError(f"{self.launcher} runs a Python script", hint=hint, at=("launcher",))
        if self.script is None:
            self._is_on_one_node()
        return self

    def _is_on_one_node(self) -> None:
        ways: Mapping[tuple[str | int, ...], AlternativeSection] = {
            ("resources",): self.resources,
            **{("resources", "any_of", index): way for index, way in enumerate(self.resources.any_of)},
        }
        for place, way in ways.items():
            if way.nodes.low > 1:
                raise BadValueError(
                    f"a command runs on one node, got {way.nodes}",
                    hint="a script runs on several",
                    at=(*place, "nodes"),
                )

    def spec(self, env: Mapping[str, str], after: job.After) -> JobSpec:
        """``env`` and ``after`` complete: with the submitter's variables, and with ids for names."""
        is_batch = self.priority <= PRIORITIES["batch"]
        launcher = Launcher(self.launcher or (Launcher.COMMAND if self.script is None else Launcher.DDP))
        return JobSpec(
            name=self.name or self._default_name(),
            argv=self.command or (str(self.script), *self.args),
            launcher=launcher,
            # Sorted: the same variables in another order are the same job.
            env=tuple(sorted(env.items())),
            cwd=self.cwd,
            setup=self.setup,
            resources=self.resources.resources(launcher),
            priority=self.priority,
            is_preemptible=is_batch if self.preemptible is None else self.preemptible,
            time_limit_s=self.time_limit,
            after=after,
            retry=self.retry.retry(),
            checkpoint=self.checkpoint.checkpoint(),
            disconnect=self.disconnect.disconnect(),
            stop=self.stop.stop(),
            outputs=self.outputs,
            results=self.results.rule(),
            seed=self.seed,
            inputs=self.inputs,
            is_cached=self.cache,
            notify=self.notify,
            balance=self.balance,
        )

    def _default_name(self) -> str:
        program = self.script or (self.command or ("",))[0]
        if self.command and self.command[:2] == ("sh", "-c"):
            program = (self.command[2].split() or ["sh"])[0]
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePosixPath(program).name.removesuffix(".py"))
        candidates = (word.strip("._-")[:64], f"job-{word}"[:64].rstrip("._-"))
        return next((name for name in candidates if is_job_name(name)), "job")
