"""Every key of a job file: its kind, its default, what it means, and which option sets it on the command line.

The first sentence of a meaning is the help of its option. This module reads no file and resolves no names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Self

from ugro.features.environments.config import EnvironmentSection
from ugro.kernel.config.kinds import (
    DAY_S,
    BadValueError,
    Bool,
    Choice,
    Duration,
    Environment,
    ListOf,
    OrNull,
    Size,
    Text,
    Whole,
)
from ugro.kernel.config.section import (
    CHANNEL_NAME,
    JOB_NAME,
    SNIPPET,
    Section,
    is_job_name,
    is_line,
    is_path_inside,
    is_path_on_node,
    is_path_without_parent,
    is_program,
    key,
    nested,
    section,
)
from ugro.kernel.jobs import model as job
from ugro.kernel.jobs.config.kinds import (
    GPUS,
    AlternativeSection,
    Arguments,
    CheckpointRule,
    Command,
    FailureCause,
    FolderMap,
    JobReference,
    ResourcesSection,
    Signal,
)
from ugro.kernel.jobs.model import JobSpec, Launcher, OnLost
from ugro.kernel.support.secrets import is_secret
from ugro.train.rules.failures import OnNan
from ugro.train.rules.shares import Mode
from ugro.train.rules.sync import SyncMode

# --- going on without ranks that are lost -----------------------------------------------------------------------------
# This is the part ``elastic`` of a job file.


_MOST_RANKS = 4096


@section
class ElasticSection(Section):
    """When a rank dies or its node is lost, the others go on without it. The script must use `ugro.train`."""

    makes = job.Elastic

    min_ranks: int | None = key(
        None,
        Whole(1, _MOST_RANKS),
        "Go on as long as so many ranks are left. With fewer, the job fails, and is retried from its last checkpoint. "
        "Null means that all ranks are needed.",
        example=1,
    )
    timeout: float = key(
        job.Elastic().timeout_s,
        Duration(DAY_S),
        "How long a rank may keep the others waiting before they go on without it. It must be longer than anything "
        "that one rank does alone, such as writing a checkpoint.",
        option="rank_timeout",
        to="timeout_s",
    )
    rejoins: int = key(
        job.Elastic().rejoins,
        Whole(0, 1000),
        "How often a lost rank is started again, to join the others.",
        example=0,
    )


# --- the keys of a job file -------------------------------------------------------------------------------------------


PRIORITIES = {"urgent": 90, "normal": 50, "batch": 10}
_OF_SCRIPTS = frozenset({Launcher.DDP, Launcher.TORCHRUN, Launcher.RAY})
_LONG = Duration(365 * DAY_S)
_CAUSES = ListOf("a list of causes such as [node_lost, cuda_oom]", FailureCause())
_JOBS = ListOf("a list of ids and names such as [12, prepare]", JobReference())
_SCRIPT = Text("a Python file such as train.py", is_program)
_CHECKPOINTS = Text("a directory such as checkpoints or /data/run1, without ..", is_path_without_parent, metavar="DIR")
_NODE_PATH = Text("a directory on the node that begins with / or ~", is_path_on_node, metavar="DIR")
_LOCAL_DIRECTORY = Text("a directory on this machine", is_line, expands_home=True, metavar="DIR")
_OUTPUT = Text("a pattern inside the job's directory, such as results/*.csv", is_path_inside, metavar="PATTERN")
_INPUT = Text("a file on this machine", is_line, expands_home=True, metavar="FILE")
_CHANNEL = Text("a text on one line", is_line, metavar=CHANNEL_NAME.metavar)


@section
class AfterSection(Section):
    """Jobs to wait for, by id or by name; of several with one name, the newest."""

    makes = job.After

    ok: tuple[int | str, ...] = key(
        (),
        _JOBS,
        "Start when these jobs have succeeded. If one of them fails, this job fails too.",
        example=["prepare"],
        option="after",
    )
    any: tuple[int | str, ...] = key(
        (), _JOBS, "Start when these jobs have ended, successfully or not.", example=[12], option="after_any"
    )


@section
class RetrySection(Section):
    """What happens after a failure. Failures of nodes are retried in any case, within limits."""

    makes = job.Retry

    max: int = key(
        0,
        Whole(0, 100),
        "Retry up to N times if the program fails. The count starts again when an attempt reaches a newer checkpoint.",
        example=3,
        option="retries",
        to="max_retries",
    )
    on: tuple[str, ...] = key(
        (),
        _CAUSES,
        "Retry only after these causes of failure. Empty means all causes except those that would surely recur.",
        example=["cuda_oom", "nccl_timeout"],
        option="retry_on",
    )
    never_on: tuple[str, ...] = key(
        (), _CAUSES, "Never retry after these causes of failure.", example=["import_error"], option="never_retry_on"
    )
    put_back: bool = key(
        job.Retry().puts_back,
        Bool(),
        "Put the files that an attempt made in its working directory back into that of the next one, and of `ugro "
        "retry`, so that a script finds its snapshot. Of jobs that may have checkpoints, and not with a `cwd`.",
        example=False,
        option="put_back",
        to="puts_back",
    )

    def check(self) -> None:
        both = [cause for cause in self.never_on if cause in self.on]
        if both:
            raise BadValueError(f"{both[0]} is in on, too", hint="remove it from one of them", at=("never_on",))
        if self.on and not self.max:
            raise BadValueError("there are no retries", hint="say how many with max, or --retries", at=("on",))


@section
class CheckpointSection(Section):
    """Where the job keeps checkpoints from which a later attempt can continue."""

    makes = job.Checkpoint

    dir: str | None = key(
        None,
        _CHECKPOINTS,
        "Directory for checkpoints, below the working directory or absolute. A retry finds there what earlier attempts "
        "wrote, on any node. The program also finds the path in `$UGRO_CHECKPOINT_DIR`. Null is `checkpoints`; with a "
        "`cwd`, null is a folder of UGRO's.",
        example="checkpoints",
        option="checkpoint_dir",
    )
    every: float | None = key(
        None,
        _LONG,
        "How often the program should write a checkpoint. Null leaves it to the program.",
        example="10m",
        option="checkpoint_every",
        to="every_s",
    )

    def check(self) -> None:
        if self.dir is not None and not any(part not in ("", ".") for part in self.dir.split("/")):
            hint = "name a directory of its own, such as checkpoints"
            raise BadValueError("the working directory itself cannot be it", hint=hint, at=("dir",))


@section
class DisconnectSection(Section):
    """What happens when a node of the job cannot be reached. The job's processes keep running meanwhile."""

    makes = job.Disconnect

    lost_after: float = key(
        job.Disconnect().lost_after_s,
        _LONG,
        "How long a node may be unreachable before it counts as lost.",
        to="lost_after_s",
    )
    on_lost: OnLost = key(
        job.Disconnect().on_lost,
        Choice(OnLost),
        "When a node is lost: wait for it, or restart elsewhere. The job restarts when its processes on the lost node "
        "have surely ended.",
    )


@section
class StopSection(Section):
    """How the job is stopped when it is cancelled, preempted, or over its time limit."""

    makes = job.Stop

    signal: str = key(
        job.Stop().signal, Signal(), "Signal that asks the processes to stop.", option="stop_signal"
    )
    grace: float = key(
        job.Stop().grace_s,
        Duration(3600.0, may_be_zero=True),
        "How long the processes may take to stop before they are killed.",
        option="stop_grace",
        to="grace_s",
    )


@section
class ResultsSection(Section):
    """Which files of the job are collected. The others stay on the node; `ugro results` lists and fetches them."""

    makes = job.ResultRule

    checkpoints: str = key(
        job.ResultRule().checkpoints,
        CheckpointRule(),
        "Which checkpoints to collect: all, none, best, or 'last N'. `last 3` are the newest three; `best` are those "
        "with best in their name, or else the newest.",
        example="last 3",
        option="result_checkpoints",
    )
    limit: int | None = key(
        None,
        Size(),
        "The most to collect from one node in one attempt, small files first.",
        example="20GB",
        option="result_limit",
        to="limit_bytes",
    )
    workdir: bool = key(
        job.ResultRule().workdir,
        Bool(),
        "Collect the files that the job makes or changes in its working directory. Not with a `cwd`: that is yours, "
        "and its files stay there.",
        example=False,
        option="result_workdir",
    )
    workdir_limit: int | None = key(
        job.ResultRule().workdir_limit_bytes,
        OrNull(Size()),
        "The most of these files to collect from one node in one attempt, small files first. Null is no limit.",
        example="20GB",
        option="result_workdir_limit",
        to="workdir_limit_bytes",
    )


@section
class JobSection(Section):
    """What runs, where, and what happens when something fails."""

    name: str | None = key(
        None, JOB_NAME, "Name of the job. Without it, the name of its script or program.", example="train"
    )
    command: tuple[str, ...] | None = key(
        None,
        Command(),
        "What to run: a list is run as it is, a text by `sh -c`.",
        example=["./prepare.sh", "--all"],
    )
    script: str | None = key(
        None,
        _SCRIPT,
        "A Python script to run instead of a command: one process per GPU, or one per node without GPUs.",
        example="train.py",
    )
    args: tuple[str, ...] = key((), Arguments(), "The script's arguments.", example=["--epochs", "10"])
    launcher: Launcher | None = key(
        None,
        Choice(Launcher),
        "What starts the processes. `ddp` is UGRO itself, with torchrun's environment; `torchrun` is PyTorch's own "
        "launcher; `ray` runs the script once, with a Ray cluster of its own on the job's nodes; `command` is one "
        "process on one node. Null is ddp for a script, else command.",
        example="ddp",
    )
    balance: str | None = key(
        None,
        Choice(str(mode) for mode in Mode),
        "How `ugro.train` divides batches among the ranks. `off` is equally, `static` is by the devices' speeds as "
        "`ugro node bench` measured them, or else as rated, `adaptive` is by the speeds measured while it runs. Null "
        "leaves it to the script, whose default is adaptive.",
        example="static",
    )
    train_sync: str | None = key(
        None,
        Choice(str(mode) for mode in SyncMode),
        "How often the ranks of `ugro.train` synchronise. `step` is in every step, `local` is local SGD: ranks take "
        "their own steps and average their models in rounds. It changes the training. Null leaves it to the script, "
        "whose default is step.",
        example="step",
    )
    nan: str | None = key(
        None,
        Choice(str(choice) for choice in OnNan),
        "What `ugro.train` does when a loss or gradients are not finite. `stop` ends the job with an error before a "
        "checkpoint is written, `skip` leaves the update out on all ranks, `ignore` only says it. Null leaves it to "
        "the script, whose default is stop.",
        example="skip",
    )
    env: dict[str, str | None] = key(
        {},
        Environment(may_lack_values=True),
        "Environment variables; one without a value is taken from the submitter's environment. `--env` adds to those "
        "of the file.",
        example={"HF_HOME": "/data/hf"},
    )
    setup: str | None = key(
        None,
        SNIPPET,
        "Shell commands to run on each node before the job. They run once per node and content.",
        example="pip install -r requirements.txt",
    )
    environment: EnvironmentSection = nested(EnvironmentSection)
    workdir: str | None = key(
        None,
        _LOCAL_DIRECTORY,
        "Local directory whose code is sent to the nodes. A relative path starts at the job file. Null is the "
        "directory of the job file, or the current one; for a script of this machine outside of it, the script's own.",
        example="~/project",
    )
    cwd: str | None = key(
        None,
        _NODE_PATH,
        "Directory on the nodes to run in, instead of a copy of the code.",
        example="~/project",
    )
    sync: bool = key(
        True,
        Bool(),
        "Send the code in `workdir` to the nodes. The code is taken as it is at submission, and not sent where there "
        "is a `cwd`.",
        example=False,
    )
    folders: dict[str, str] = key(
        {},
        FolderMap(),
        "Folders or files of this machine that the job reads beside its code, such as models and data. The nodes get "
        "each once, read-only, as it is at submission; the program finds the one named model in `$UGRO_FOLDER_MODEL`. "
        "A relative path starts at the job file. `--folder` adds to those of the file.",
        example={"model": "~/models/tiny-llama"},
        option="folder",
    )
    resources: ResourcesSection = nested(ResourcesSection)
    priority: int = key(
        PRIORITIES["normal"],
        Whole(0, 100, names=PRIORITIES),
        "Jobs with a higher priority start first. urgent is 90, normal is 50, batch is 10.",
        example="batch",
    )
    preemptible: bool | None = key(
        None,
        Bool(),
        "Let a more urgent job interrupt this one, which is then queued again. Null is true for batch and below, else "
        "false.",
        example=True,
        to="is_preemptible",
    )
    time_limit: float | None = key(
        None, _LONG, "Stop an attempt that runs longer than this.", example="8h", to="time_limit_s"
    )
    after: AfterSection = nested(AfterSection)
    retry: RetrySection = nested(RetrySection)
    checkpoint: CheckpointSection = nested(CheckpointSection)
    disconnect: DisconnectSection = nested(DisconnectSection)
    elastic: ElasticSection = nested(ElasticSection)
    stop: StopSection = nested(StopSection)
    outputs: tuple[str, ...] = key(
        (),
        ListOf("a list of patterns such as ['results/*.csv']", _OUTPUT),
        "Files in the job's directory to collect, even if an ignore file names them. Only files that changed since "
        "the job began are collected. A directory means everything below it, `**` any directories.",
        example=["results/*.csv"],
        option="output",
    )
    results: ResultsSection = nested(ResultsSection)
    seed: int | None = key(
        None,
        Whole(0, 2**32 - 1),
        "Random seed, given to every process of every attempt as `UGRO_SEED`.",
        example=42,
        option="job_seed",
    )
    inputs: tuple[str, ...] = key(
        (),
        ListOf("a list of files such as [data/train.csv]", _INPUT),
        "Local files whose contents count for `cache`. A relative path starts at `workdir`.",
        example=["data/train.csv"],
        option="cache_input",
    )
    cache: bool = key(
        False,
        Bool(),
        "Reuse the result of an identical successful job. Identical means the same code, command, environment and "
        "inputs.",
        example=True,
        to="is_cached",
    )
    notify: tuple[str, ...] = key(
        (),
        ListOf("a list of texts such as [mail]", _CHANNEL),
        "Channels to notify when the job ends. The cluster file defines them; log is the agent's log.",
        example=["mail"],
    )
    private: bool = key(
        False,
        Bool(),
        "Hide the job, its logs and its results from other users. Operators and admins of the team still see it.",
        example=True,
    )

    def check(self) -> None:
        if self.command is not None and self.script is not None:
            raise BadValueError("there is a command, too", hint="a job runs one of them", at=("script",))
        if self.script is None:
            self._check_command()
        elif self.launcher == Launcher.COMMAND:
            hint = "give a command that runs it: python3 train.py"
            raise BadValueError("a script is run by ddp, torchrun or ray", hint=hint, at=("launcher",))
        if self.elastic.min_ranks is not None and (self.script is None or self.launcher not in (None, Launcher.DDP)):
            hint = "it is for a script that uses ugro.train, started by ddp"
            raise BadValueError("only a training can go on with fewer ranks", hint=hint, at=("elastic", "min_ranks"))
        if self.elastic.min_ranks is not None and self.train_sync == SyncMode.LOCAL:
            hint = "leave out elastic.min_ranks, or train_sync"
            raise BadValueError("an elastic job cannot train with local SGD", hint=hint, at=("train_sync",))

    @classmethod
    def unknown(cls, name: str) -> BadValueError:
        """Many look for a key of an inner map here."""
        for outer, inner in cls.sections().items():
            for inner_name, declared in inner.known_keys().items():
                names = (inner_name, declared.option or inner_name, *(GPUS if inner_name == "gpus_per_node" else ()))
                if name in names and declared.section is None:
                    hint = f"did you mean {outer}: {{{inner_name}: …}}?"
                    return BadValueError("unknown key", hint=hint, at=(name,))
        return super().unknown(name)

    def _check_command(self) -> None:
        if self.command is None:
            raise BadValueError("there is nothing to run", hint="give a script such as train.py, or a command")
        if self.args:
            raise BadValueError("only a script has args", hint="put them into the command itself", at=("args",))
        for name in ("balance", "train_sync"):
            if getattr(self, name):
                raise BadValueError("a command runs in one process", hint="a script can have ranks", at=(name,))
        if self.launcher in _OF_SCRIPTS:
            hint = "give a script and its args"
            raise BadValueError(f"{self.launcher} runs a Python script", hint=hint, at=("launcher",))
        ways: Mapping[tuple[str | int, ...], AlternativeSection] = {
            ("resources",): self.resources,
            **{("resources", "any_of", index): way for index, way in enumerate(self.resources.any_of)},
        }
        for place, way in ways.items():
            if way.nodes.low != 1:
                message = f"a command runs on one node, got {way.nodes}"
                raise BadValueError(message, hint="a script runs on several", at=(*place, "nodes"))

    def spec(self, env: Mapping[str, str], after: job.After) -> JobSpec:
        """``env`` and ``after`` are complete: with the submitter's variables, and with ids for names."""
        launcher = self.launcher or (Launcher.COMMAND if self.script is None else Launcher.DDP)
        made = self.made()
        made |= {
            "name": self.name or self._default_name(),
            "argv": self.command or (str(self.script), *self.args),
            "launcher": launcher,
            # Sorted: the same variables in another order are the same job.
            "env": tuple(sorted(env.items())),
            "resources": self.resources.resources(launcher),
            "after": after,
            "environment": None,  # it names files, which somebody else reads
            "folders": (),  # the same
        }
        if self.preemptible is None:
            made["is_preemptible"] = _is_batch(self.priority)
        return JobSpec(**{one.name: made[one.name] for one in fields(JobSpec) if one.name in made})

    @classmethod
    def of_spec(cls, spec: JobSpec) -> Self:
        """The other way round. Values that look secret are left out: they must be given at submission."""
        is_command = spec.launcher is Launcher.COMMAND
        return cls.of(
            spec,
            command=spec.argv if is_command else None,
            script=None if is_command else spec.argv[0],
            args=() if is_command else spec.argv[1:],
            launcher=spec.launcher if spec.launcher in (Launcher.TORCHRUN, Launcher.RAY) else None,
            env={name: None if is_secret(name, value) else value for name, value in spec.env},
            workdir=None,
            sync=spec.snapshot is not None or spec.cwd is not None,
            environment=EnvironmentSection.of_request(spec.environment),
            folders={one.name: one.source for one in spec.folders},
            resources=ResourcesSection.of_resources(spec.resources, spec.launcher),
            preemptible=None if spec.is_preemptible == _is_batch(spec.priority) else spec.is_preemptible,
        )

    def _default_name(self) -> str:
        program = self.script or (self.command or ("",))[0]
        if self.command and self.command[:2] == ("sh", "-c"):
            program = (self.command[2].split() or ["sh"])[0]
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePosixPath(program).name.removesuffix(".py"))
        candidates = (word.strip("._-")[:64], f"job-{word}"[:64].rstrip("._-"))
        return next((name for name in candidates if is_job_name(name)), "job")


def _is_batch(priority: int) -> bool:
    return priority <= PRIORITIES["batch"]
