"""Every key of the cluster file: its kind, its default and what it means. It reads no file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, InstanceOf, ValidationInfo, field_validator, model_validator

from ugro.config.channels import LOG, Channel, Channels
from ugro.config.kinds import (
    BadValueError,
    Bytes,
    Choice,
    Duration,
    Environment,
    Flag,
    Gigabytes,
    ListOf,
    OrNull,
    Text,
    Transport,
    Weight,
    Whole,
    is_directory_on_node,
    is_host,
    is_label,
    is_line,
    is_local_path,
    is_program,
    is_user,
)
from ugro.config.section import Section as Section
from ugro.config.yamltext import shown
from ugro.core.node import NodeSpec, Role

_HOST = Text("a host name or an address, without spaces, @ or a leading -", is_host)
_USER = Text("a user name, without spaces or a leading -", is_user)
_LOCAL_PATH = Text("a path that starts with / or ~", is_local_path, expands_home=True)
_NODE_DIRECTORY = Text("a directory on the node such as ~/grid_workspace or /data/ugro", is_directory_on_node)
_LABEL = Text("a word of at most 64 characters, without spaces or commas", is_label)
_LINE = Text("a text on one line", is_line)
_PORT = Whole(1, 65535)

Seconds = Annotated[float, Duration()]
SecondsOrZero = Annotated[float, Duration(may_be_zero=True)]
Port = Annotated[int, _PORT]
PositiveWeight = Annotated[float, Weight()]
YesNo = Annotated[bool, Flag()]
Line = Annotated[str, _LINE]
LineOrNull = Annotated[str | None, OrNull(_LINE)]
HostOrNull = Annotated[str | None, OrNull(_HOST)]
LocalPathOrNull = Annotated[str | None, OrNull(_LOCAL_PATH)]
NodeDirectory = Annotated[str, _NODE_DIRECTORY]


class Ssh(Section):
    """How nodes are reached. Keys, jump hosts and host keys are OpenSSH's own affair."""

    timeout: Seconds = Field(10.0, description="Longest wait for the answer to one ordinary request, in seconds.")
    connect_timeout: Seconds = Field(5.0, description="Longest wait for a connection to open, in seconds.")
    max_retries: Annotated[int, Whole(0, 100)] = Field(
        3,
        description="Quick redials before a node is reported down; it is then retried in the background "
        "for ever, with growing pauses.",
    )
    pool_size: Annotated[int, Whole(1, 1000)] = Field(
        10, description="How many connections are being opened at the same moment."
    )
    key_file: LocalPathOrNull = Field(
        None,
        description="A private key to use instead of those that ssh finds itself.",
        examples=["~/.ssh/id_ed25519"],
    )
    config_file: LocalPathOrNull = Field(
        None,
        description="An ssh configuration file to use instead of ~/.ssh/config (`ssh -F`).",
        examples=["~/.ssh/cluster_config"],
    )


class HealthCheck(Section):
    """How nodes are probed and compared."""

    timeout: Seconds = Field(3.0, description="Longest wait for one node's probe, in seconds.")
    max_workers: Annotated[int, Whole(1, 1000)] = Field(
        20, description="How many nodes `ugro init` and `ugro doctor` examine at the same time."
    )
    cpu_weight: PositiveWeight = Field(
        1.0, description="What a node's CPU load counts when the best node is picked; the lowest sum wins."
    )
    gpu_weight: PositiveWeight = Field(
        3.0, description="What a node's share of used GPU memory counts when the best node is picked."
    )
    refresh_interval: SecondsOrZero = Field(
        60.0, description="How long a probe's result serves for picking nodes, in seconds; 0 is not at all."
    )


class Sync(Section):
    """How code travels to the nodes."""

    exclude_patterns: Annotated[
        tuple[str, ...], ListOf("a list of patterns such as [.git, '*.pyc']", Text("a pattern", is_line))
    ] = Field(
        (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next"),
        description="Names and patterns of files and directories that stay at home.",
    )
    use_checksums: YesNo = Field(
        True, description="Whether contents decide what changed; false trusts sizes and times alone."
    )
    follow_symlinks: YesNo = Field(
        False, description="Whether a symbolic link travels as what it points to, instead of as a link."
    )
    max_parallel_transfers: Annotated[int, Whole(1, 1000)] = Field(
        5, description="How many nodes receive code at the same time."
    )
    max_size: Annotated[int, Bytes()] = Field(
        500_000_000,
        description="How much code may be sent without `--force`: a data set in the wrong place is noticed before it "
        "travels.",
    )
    store_limit: Annotated[int, Bytes()] = Field(
        10_000_000_000,
        description="How much code each node, and this machine, keeps; what was not used for longest goes first.",
    )
    outside_links: Annotated[str, Choice(("keep", "follow", "skip", "error"))] = Field(
        "keep",
        description="What becomes of a symbolic link that leads out of the directory: it travels as a link (keep), as "
        "what it points to (follow), not at all (skip), or nothing is sent (error).",
    )


class Ray(Section):
    """The Ray cluster that `ugro cluster start` makes."""

    dashboard_port: Port = Field(8265, description="The port of Ray's dashboard on the head node.")
    redis_port: Port = Field(6379, description="The port on which the head node takes in the other nodes.")
    head_bind_all: YesNo = Field(
        True, description="Whether the head node listens on all its addresses, or on loopback alone."
    )
    namespace: Line = Field("default", description="The Ray namespace that jobs run in.")
    log_level: Annotated[str, Choice(("debug", "info", "warning", "error", "critical"))] = Field(
        "info", description="How much Ray writes to its logs."
    )


class Cluster(Section):
    """The cluster as a whole."""

    name: Annotated[str, _LABEL] = Field("default", description="What the cluster is called in reports and metrics.")
    master_ip: HostOrNull = Field(
        None,
        description="The address at which ranks meet; null takes the first node's own address.",
        examples=["192.168.1.10"],
    )
    master_port: Port = Field(29500, description="Where ranks meet, if it is free. Unset: any free port.")


class Training(Section):
    """Defaults for training jobs; null leaves the choice to the job or its recipe."""

    batch_size_per_gpu: Annotated[int | None, OrNull(Whole(1, 1_000_000))] = Field(
        None, description="How many samples one GPU takes at a time.", examples=[8]
    )
    gradient_accumulation: Annotated[int | None, OrNull(Whole(1, 1_000_000))] = Field(
        None, description="How many batches are added up before the weights move.", examples=[4]
    )
    default_model: LineOrNull = Field(
        None, description="The model that is trained when none is named.", examples=["llama-7b"]
    )
    default_dataset: LineOrNull = Field(
        None, description="The dataset that is used when none is named.", examples=["wikitext"]
    )


class Monitor(Section):
    """How often nodes are looked at, and when one that does not answer is left alone."""

    busy_interval: Seconds = Field(5.0, description="Between two looks at a node while there are jobs; at most 60 s.")
    recent_interval: Seconds = Field(10.0, description="The same within 30 minutes of the last work.")
    quiet_interval: Seconds = Field(20.0, description="The same within 2 hours of the last work.")
    idle_interval: Seconds = Field(40.0, description="The same after that.")
    breaker_failures: Annotated[int, Whole(1, 1000)] = Field(
        3, description="After so many failures in a row a node is left alone for a while."
    )
    breaker_pause: Seconds = Field(
        300.0, description="For how long; a node whose link comes back is asked at once."
    )


class Alerts(Section):
    """What is told to whom when something is wrong with nodes. The agent's log and `ugro events` have all."""

    channels: Annotated[tuple[str, ...], ListOf("a list of names of channels such as [ops]", _LABEL)] = Field(
        (), description="The channels that are told.", examples=[("log",)]
    )
    least: Annotated[str, Choice(("info", "warning", "critical"))] = Field(
        "info", description="What is less than this is not sent. Recoveries are sent if their alert was."
    )
    repeat: Seconds = Field(3600.0, description="How often an alert that goes on is told again, at most.")
    score_warning: PositiveWeight = Field(70.0, description="A health score below this is a warning.")
    score_critical: PositiveWeight = Field(50.0, description="A health score below this is critical.")
    gpu_temperature_warning: PositiveWeight = Field(80.0, description="A GPU above this, in °C, is a warning.")
    gpu_temperature_critical: PositiveWeight = Field(85.0, description="A GPU above this, in °C, is critical.")
    memory_warning: PositiveWeight = Field(0.90, description="A larger share of used memory is a warning.")
    memory_critical: PositiveWeight = Field(0.95, description="A larger share of used memory is critical.")
    unhealthy_nodes: PositiveWeight = Field(
        0.5, description="A larger share of nodes that are unhealthy or unreachable is critical."
    )


class Metrics(Section):
    """For how long curves of nodes and jobs are kept."""

    node_hours: PositiveWeight = Field(24.0, description="How far back a node's curves go, in hours.")
    job_days: PositiveWeight = Field(365.0, description="How long a job's curves are kept, in days.")
    max_gb: Annotated[float, Gigabytes()] = Field(
        10.0, description="When there is more, the points of the oldest jobs go first; their curves stay, coarser."
    )


class Dashboard(Section):
    """The page that the agent serves. Whoever opens it needs a link from `ugro dashboard`, or the token."""

    enabled: YesNo = Field(True, description="Whether there is one.")
    host: Annotated[str, _HOST] = Field(
        "127.0.0.1", description="The address it listens on; 0.0.0.0 is all of them, and gets a warning without TLS."
    )
    port: Port = Field(8099, description="Its port; when that is taken, another.")
    names: Annotated[tuple[str, ...], ListOf("a list of host names such as [gpu-master.lan]", _HOST)] = Field(
        (), description="Host names under which browsers may call it, besides its own address.", examples=[("lab.lan",)]
    )
    certificate_file: LocalPathOrNull = Field(
        None, description="A TLS certificate (PEM); with it, the page is https.", examples=["~/.ugro/cert.pem"]
    )
    key_file: LocalPathOrNull = Field(
        None, description="The certificate's private key, when that is in another file.", examples=["~/.ugro/key.pem"]
    )


class Settings(Section):
    """All of the cluster file but its nodes."""

    remote_root: NodeDirectory = Field(
        "~/grid_workspace", description="The directory on each node in which UGRO keeps all its files."
    )
    ssh: Ssh = Field(default_factory=Ssh)
    health_check: HealthCheck = Field(default_factory=HealthCheck)
    sync: Sync = Field(default_factory=Sync)
    ray: Ray = Field(default_factory=Ray)
    cluster: Cluster = Field(default_factory=Cluster)
    training: Training = Field(default_factory=Training)
    monitor: Monitor = Field(default_factory=Monitor)
    alerts: Alerts = Field(default_factory=Alerts)
    metrics: Metrics = Field(default_factory=Metrics)
    dashboard: Dashboard = Field(default_factory=Dashboard)
    channels: Annotated[dict[str, Channel], Channels()] = Field(
        default_factory=dict,
        description="By whom people are told of alerts and of jobs that end: a map of names to channels, see below.",
        examples=[{}],
    )

    @model_validator(mode="after")
    def _names_its_channels(self) -> Self:
        known = {LOG, *self.channels}
        for index, name in enumerate(self.alerts.channels):
            if name not in known:
                raise BadValueError(
                    f"there is no channel {shown(name)}", hint="add it to channels", at=("alerts", "channels", index)
                )
        return self


class Config(Settings):
    """The file with the environment applied. ``path`` is None when there is no file."""

    path: Path | None = None
    nodes: tuple[InstanceOf[NodeSpec], ...]


class NodeEntry(Section):
    """One node in the map form of `nodes`."""

    ip: HostOrNull = Field(
        None, description="The address that ssh dials; the same as `host`.", examples=["192.168.1.11"]
    )
    host: HostOrNull = Field(
        None,
        description="The host name, address or ssh alias that ssh dials; without it, the node's name.",
        examples=["gpu1.lan"],
    )
    user: Annotated[str | None, OrNull(_USER)] = Field(
        None, description="The user name to log in with; without it, ssh decides.", examples=["ann"]
    )
    port: Annotated[int | None, OrNull(_PORT)] = Field(
        None, description="The port of the ssh server; without it, ssh decides.", examples=[22]
    )
    role: Annotated[str, Choice(tuple(Role))] = Field(
        "worker", description="What the node is to the cluster; at most one is the master."
    )
    gpu: LineOrNull = Field(
        None, description="A note of what its GPU is; what is detected counts.", examples=["RTX 4070"]
    )
    vram_gb: Annotated[float | None, OrNull(Gigabytes())] = Field(
        None,
        description="A note of its GPU memory, in GB (10^9 bytes); what is detected counts.",
        examples=[8],
    )
    labels: Annotated[tuple[str, ...], ListOf("a list of words such as [fast, lab2]", _LABEL)] = Field(
        (), description="Words by which jobs can ask for the node.", examples=[["fast", "lab2"]]
    )
    python: Annotated[
        str | None, OrNull(Text("a program or its path, such as python3.11 or ~/venv/bin/python", is_program))
    ] = Field(
        None,
        description="The Python on the node, 3.9 or newer; without it, the best one found.",
        examples=["~/venv/bin/python"],
    )
    remote_root: Annotated[str | None, OrNull(_NODE_DIRECTORY)] = Field(
        None,
        description="The directory for UGRO's files on this node, instead of the common one.",
        examples=["/data/ugro"],
    )
    transport: Annotated[str | tuple[str, ...], Transport()] = Field(
        "ssh",
        description="How the node is reached: over ssh, as this machine itself (local), or by a command that "
        "gives stdin and stdout on the node.",
        examples=[["docker", "exec", "-i", "gpu1"]],
    )
    env: Annotated[dict[str, str], Environment()] = Field(
        default_factory=dict,
        description="Environment variables for UGRO's program on the node.",
        examples=[{"CUDA_HOME": "/usr/local/cuda"}],
    )

    @field_validator("host", mode="after")
    @classmethod
    def _agrees_with_ip(cls, host: str | None, entry: ValidationInfo) -> str | None:
        ip = entry.data.get("ip")
        if host and ip and host != ip:
            raise BadValueError(
                f"{shown(host)} is not the ip, {shown(ip)}",
                hint="ip and host are two words for one key: give one of them",
            )
        return host

    def spec(self, name: str, remote_root: str) -> NodeSpec:
        return NodeSpec(
            name=name,
            host=self.host or self.ip or "",
            user=self.user,
            port=self.port,
            role=Role(self.role),
            gpu=self.gpu,
            vram_bytes=None if self.vram_gb is None else round(self.vram_gb * 10**9),
            labels=self.labels,
            python=self.python,
            remote_root=self.remote_root or remote_root,
            transport=self.transport,
            # Sorted: the same variables in another order are no reason for a new link.
            env=tuple(sorted(self.env.items())),
        )
