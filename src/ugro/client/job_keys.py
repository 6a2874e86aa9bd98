"""The keys of a job file, with their types, for ``client.jobs.submit``. docs/jobs.md says more about each.

A test compares them with the schema that the agent reads them by, ``ugro.kernel.jobs.config.schema``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class EnvironmentKeys(TypedDict, total=False):
    """The Python environment that the job runs in. UGRO makes it on its nodes, once, from exactly the same packages."""

    python: str | None
    """The version of Python."""

    requirements: str | None
    """A requirements file, read when the job is submitted."""

    packages: Sequence[str] | str
    """Packages to install."""

    constraints: str | None
    """A file of versions that packages must have if they are installed."""

    lock: str | None
    """A `uv.lock` or `pylock.toml` whose packages are installed, instead of `requirements` and `packages`."""

    project: str | None
    """The `pyproject.toml` of a `uv.lock`."""

    index_url: str | None
    """The package index to use instead of that of pip on this machine, or PyPI."""

    extra_index_url: Sequence[str] | str
    """Further package indexes."""

    find_links: Sequence[str] | str
    """Folders on this machine, or pages, with wheels."""

    no_index: bool
    """Use no package index, only `find_links`."""

    offline: bool
    """Send all packages from this machine, which downloads them once."""

    overrides: Mapping[str, Any]
    """What is different on nodes with a label, such as another CUDA build for older GPUs."""

    existing: str | None
    """A virtual or conda environment that is on every node."""

    upgrade: bool
    """Resolve the packages again when the job is submitted, to the newest versions."""

    enabled: bool
    """Whether the job runs in an environment."""


class GpuKeys(TypedDict, total=False):
    """Which GPUs the job accepts. Without keys, any."""

    memory: str | None
    """Least memory of each GPU."""

    model: Sequence[str] | str
    """Accept only GPUs whose name contains one of these words."""


class AlternativeKeys(TypedDict, total=False):
    """What the job needs on each node."""

    nodes: int | str
    """Number of nodes."""

    gpus_per_node: int | Literal["all"] | None
    """Number of GPUs on each node."""

    gpu: GpuKeys
    """Which GPUs the job accepts."""

    cpus: int | None
    """Number of CPU cores on each node."""

    memory: str | None
    """Memory on each node."""

    labels: Sequence[str]
    """Use only nodes that have all of these labels."""

    only: Sequence[str]
    """Use only these nodes."""


class ResourcesKeys(TypedDict, total=False):
    """What the job needs. The same is needed on each of its nodes."""

    nodes: int | str
    """Number of nodes."""

    gpus_per_node: int | Literal["all"] | None
    """Number of GPUs on each node."""

    gpu: GpuKeys
    """Which GPUs the job accepts."""

    cpus: int | None
    """Number of CPU cores on each node."""

    memory: str | None
    """Memory on each node."""

    labels: Sequence[str]
    """Use only nodes that have all of these labels."""

    only: Sequence[str]
    """Use only these nodes."""

    any_of: Sequence[AlternativeKeys]
    """Alternatives, the preferred one first: maps with the keys above, which can then not be used beside `any_of`."""


class AfterKeys(TypedDict, total=False):
    """Jobs to wait for, by id or by name; of several with one name, the newest."""

    ok: Sequence[int | str]
    """Start when these jobs have succeeded."""

    any: Sequence[int | str]
    """Start when these jobs have ended, successfully or not."""


class RetryKeys(TypedDict, total=False):
    """What happens after a failure. Failures of nodes are retried in any case, within limits."""

    max: int
    """Retry up to N times if the program fails."""

    on: Sequence[str]
    """Retry only after these causes of failure."""

    never_on: Sequence[str]
    """Never retry after these causes of failure."""

    put_back: bool
    """Put the files that an attempt made in its working directory back into that of the next one, and of `ugro retry`,
    so that a script finds its snapshot."""


class CheckpointKeys(TypedDict, total=False):
    """Where the job keeps checkpoints from which a later attempt can continue."""

    dir: str | None
    """Directory for checkpoints, below the working directory or absolute."""

    every: float | str | None
    """How often the program should write a checkpoint."""


class DisconnectKeys(TypedDict, total=False):
    """What happens when a node of the job cannot be reached. The job's processes keep running meanwhile."""

    lost_after: float | str
    """How long a node may be unreachable before it counts as lost."""

    on_lost: Literal["wait", "restart"]
    """When a node is lost: wait for it, or restart elsewhere."""


class ElasticKeys(TypedDict, total=False):
    """When a rank dies or its node is lost, the others go on without it. The script must use `ugro.train`."""

    min_ranks: int | None
    """Go on as long as so many ranks are left."""

    timeout: float | str
    """How long a rank may keep the others waiting before they go on without it."""

    rejoins: int
    """How often a lost rank is started again, to join the others."""


class StopKeys(TypedDict, total=False):
    """How the job is stopped when it is cancelled, preempted, or over its time limit."""

    signal: str
    """Signal that asks the processes to stop."""

    grace: float | str
    """How long the processes may take to stop before they are killed."""


class ResultsKeys(TypedDict, total=False):
    """Which files of the job are collected. The others stay on the node; `ugro results` lists and fetches them."""

    checkpoints: str
    """Which checkpoints to collect: all, none, best, or 'last N'."""

    limit: str | None
    """The most to collect from one node in one attempt, small files first."""

    workdir: bool
    """Collect the files that the job makes or changes in its working directory."""

    workdir_limit: str | None
    """The most of these files to collect from one node in one attempt, small files first."""


class JobKeys(TypedDict, total=False):
    """What runs, where, and what happens when something fails."""

    name: str | None
    """Name of the job."""

    command: str | Sequence[str] | None
    """What to run: a list is run as it is, a text by `sh -c`."""

    script: str | None
    """A Python script to run instead of a command: one process per GPU, or one per node without GPUs."""

    args: str | Sequence[str]
    """The script's arguments."""

    launcher: Literal["command", "ddp", "torchrun", "ray"] | None
    """What starts the processes."""

    balance: Literal["off", "static", "adaptive"] | None
    """How `ugro.train` divides batches among the ranks."""

    train_sync: Literal["step", "local"] | None
    """How often the ranks of `ugro.train` synchronise."""

    nan: Literal["stop", "skip", "ignore"] | None
    """What `ugro.train` does when a loss or gradients are not finite."""

    env: Mapping[str, str | None]
    """Environment variables; one without a value is taken from the submitter's environment."""

    setup: str | None
    """Shell commands to run on each node before the job."""

    environment: EnvironmentKeys
    """The Python environment that the job runs in."""

    workdir: str | PathLike[str] | None
    """Local directory whose code is sent to the nodes."""

    cwd: str | None
    """Directory on the nodes to run in, instead of a copy of the code."""

    sync: bool
    """Send the code in `workdir` to the nodes."""

    folders: Mapping[str, str | PathLike[str]]
    """Folders or files of this machine that the job reads beside its code, such as models and data."""

    resources: ResourcesKeys
    """What the job needs."""

    priority: int | Literal["urgent", "normal", "batch"]
    """Jobs with a higher priority start first."""

    preemptible: bool | None
    """Let a more urgent job interrupt this one, which is then queued again."""

    time_limit: float | str | None
    """Stop an attempt that runs longer than this."""

    after: AfterKeys
    """Jobs to wait for, by id or by name; of several with one name, the newest."""

    retry: RetryKeys
    """What happens after a failure."""

    checkpoint: CheckpointKeys
    """Where the job keeps checkpoints from which a later attempt can continue."""

    disconnect: DisconnectKeys
    """What happens when a node of the job cannot be reached."""

    elastic: ElasticKeys
    """When a rank dies or its node is lost, the others go on without it."""

    stop: StopKeys
    """How the job is stopped when it is cancelled, preempted, or over its time limit."""

    outputs: Sequence[str]
    """Files in the job's directory to collect, even if an ignore file names them."""

    results: ResultsKeys
    """Which files of the job are collected."""

    seed: int | None
    """Random seed, given to every process of every attempt as `UGRO_SEED`."""

    inputs: Sequence[str | PathLike[str]]
    """Local files whose contents count for `cache`."""

    cache: bool
    """Reuse the result of an identical successful job."""

    notify: Sequence[str]
    """Channels to notify when the job ends."""

    private: bool
    """Hide the job, its logs and its results from other users."""
