"""Every key of the cluster file: its kind, its default and what it means. It reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ugro.features.alerts.config import CHANNELS, Channel
from ugro.features.environments.config import EnvironmentSection
from ugro.features.power.config import OwnerSection, PowerKeys, PowerSection, rule_of
from ugro.kernel.access.config import ACCOUNT, Api, Team
from ugro.kernel.config.kinds import (
    DAY_S,
    BadValueError,
    Bool,
    ByteCount,
    Choice,
    Duration,
    Environment,
    Gigabytes,
    Kind,
    ListOf,
    Number,
    Text,
    Whole,
    is_encodable,
    shown,
)
from ugro.kernel.config.section import (
    HOST,
    LABEL,
    LINE,
    LOCAL_PATH,
    NODE_DIRECTORY,
    USER,
    Section,
    is_line,
    is_program,
    key,
    nested,
    section,
)
from ugro.kernel.feature import import_object, installed
from ugro.kernel.files.model import EXCLUDED
from ugro.kernel.links.model import NodeSpec, Role
from ugro.web.config import Dashboard

# --- how a node is reached --------------------------------------------------------------------------------------------
# A node is reached by ssh, on this machine, in a container or pod, or by a command of the user's.


S = TypeVar("S", bound=Section)
CONTAINERS = ("podman", "docker")
KUBERNETES = "kubernetes"
_NAMES = ("ssh", "local", *CONTAINERS, KUBERNETES)
_WORD = Text("a command's words as texts", lambda text: bool(text) and len(text) <= 4096 and is_encodable(text))

CONTAINER_NAME = Text(
    "the name or id of a container, such as gpu1",
    lambda text: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", text) is not None,
)
KUBERNETES_NAME = Text(
    "a name of Kubernetes, such as trainer-0",
    lambda text: re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text) is not None,
)


class Transport(Kind):
    expected = f"{', '.join(_NAMES)}, or a command as a list of words"

    def parse(self, value: object) -> str | tuple[str, ...]:
        if isinstance(value, str) and value in _NAMES:
            return value
        if not isinstance(value, list | tuple) or not value:
            raise self.refuse(value, hint="a command is a list: transport: [docker, exec, -i, NAME]")
        words = tuple(_WORD.parse(word) for word in value)
        if words[0].startswith("-"):
            raise self.refuse(words[0], hint="a command begins with its program")
        return words


@dataclass(frozen=True, slots=True)
class Way:
    """The keys of a node that say how it is reached."""

    transport: str | tuple[str, ...]
    user: str | None
    container: str | None
    pod: str | None
    namespace: str | None

    def check(self) -> None:
        is_pod = self.transport == KUBERNETES
        if self.container and not is_pod and self.transport not in CONTAINERS:
            hint = "add transport: podman, docker or kubernetes"
            raise BadValueError("is for nodes that are containers", hint=hint, at=("container",))
        for word in ("pod", "namespace"):
            if getattr(self, word) and not is_pod:
                raise BadValueError("is for nodes that are pods", hint="add transport: kubernetes", at=(word,))
        if is_pod and self.user:
            hint = "kubectl runs commands as the user of the pod"
            raise BadValueError("a pod has no user to choose", hint=hint, at=("user",))

    def command_for(self, name: str) -> str | tuple[str, ...]:
        """``ssh``, ``local``, or the words before a command that make it one on the node."""
        if self.transport == KUBERNETES:
            where = ("--namespace", self.namespace) if self.namespace else ()
            which = ("--container", self.container) if self.container else ()
            return ("kubectl", "exec", "--stdin", "--quiet", *where, *which, self.pod or name, "--")
        if isinstance(self.transport, str) and self.transport in CONTAINERS:
            user = ("--user", self.user) if self.user else ()
            return (self.transport, "exec", "--interactive", *user, self.container or name)
        return self.transport


# --- the sections and their keys --------------------------------------------------------------------------------------


_PORT = Whole(1, 65535)
_DURATION = Duration()
_TEN_YEARS_S = 3650 * DAY_S
_NUMBER = Number()
_BOOL = Bool()
_LABELS = ListOf("a list of words such as [fast, lab2]", LABEL)
_PROGRAM = Text("a program or its path, such as python3.11 or ~/venv/bin/python", is_program)
# One agent serves several cluster files, and some come with a repository: they do not say where its state is.
_STORE = "it stands in store.yaml of the state directory, ~/.ugro; ugro store migrate --to URL writes it"


@section
class Ssh(Section):
    """How UGRO reaches the nodes. Keys, jump hosts and host keys are configured in OpenSSH."""

    timeout: float = key(10.0, _DURATION, "Longest wait for the answer to one ordinary request, in seconds.")
    connect_timeout: float = key(5.0, _DURATION, "Longest wait for a connection to open, in seconds.")
    max_retries: int = key(
        3,
        Whole(0, 100),
        "Quick reconnects before a node is reported down. UGRO then keeps trying in the background, with growing "
        "pauses.",
    )
    pool_size: int = key(10, Whole(1, 1000), "How many connections may be opening at the same time.")
    key_file: str | None = key(
        None, LOCAL_PATH, "A private key to use instead of those that ssh finds itself.", example="~/.ssh/id_ed25519"
    )
    config_file: str | None = key(
        None,
        LOCAL_PATH,
        "An ssh configuration file to use instead of ~/.ssh/config (`ssh -F`).",
        example="~/.ssh/cluster_config",
    )


@section
class HealthCheck(Section):
    """How UGRO probes and compares nodes."""

    timeout: float = key(3.0, _DURATION, "Longest wait for one node's probe, in seconds.")
    max_workers: int = key(
        20, Whole(1, 1000), "How many nodes `ugro init` and `ugro doctor` examine at the same time."
    )
    cpu_weight: float = key(1.0, _NUMBER, "Weight of CPU load when the best node is picked; the lowest sum wins.")
    gpu_weight: float = key(3.0, _NUMBER, "Weight of the share of used GPU memory when the best node is picked.")
    refresh_interval: float = key(
        60.0,
        Duration(may_be_zero=True),
        "How long a probe's result may be used for picking nodes, in seconds; 0 probes every time.",
    )


@section
class Sync(Section):
    """How code is sent to the nodes."""

    exclude_patterns: tuple[str, ...] = key(
        EXCLUDED,
        ListOf("a list of patterns such as [.git, '*.pyc']", Text("a pattern", is_line)),
        "Names and patterns of files and directories that are not sent.",
    )
    use_checksums: bool = key(True, _BOOL, "Compare contents to find changed files; false compares sizes and times.")
    follow_symlinks: bool = key(False, _BOOL, "Send what a symbolic link points to, instead of the link.")
    max_parallel_transfers: int = key(5, Whole(1, 1000), "How many nodes may receive code at the same time.")
    max_size: int = key(
        500_000_000,
        ByteCount(),
        "The most code that is sent without `--force`. It catches a data set that lies in the code's folder.",
    )
    store_limit: int = key(
        10_000_000_000,
        ByteCount(),
        "How much code each node, and this machine, keeps; the least recently used is removed first.",
    )
    folder_limit: int = key(
        100_000_000_000,
        ByteCount(),
        "How many bytes of folders that jobs name (`folders`) each node, and this machine, keeps; also the largest "
        "folder that is taken. The least recently used are removed first.",
    )
    outside_links: str = key(
        "keep",
        Choice(("keep", "follow", "skip", "error")),
        "What to do with a symbolic link that leads out of the directory: send the link (keep), send what it points "
        "to (follow), leave it out (skip), or send nothing (error).",
    )


@section
class Cluster(Section):
    """The cluster as a whole."""

    name: str = key("default", LABEL, "The cluster's name in reports and metrics.")
    master_ip: str | None = key(
        None,
        HOST,
        "The address at which ranks meet; null takes the first node's own address.",
        example="192.168.1.10",
    )
    master_port: int = key(
        29500, _PORT, "The port at which ranks meet, if it is free. If the key is not set: any free port."
    )


@section
class Training(Section):
    """Defaults for training jobs; null leaves the choice to the job or its recipe."""

    batch_size_per_gpu: int | None = key(
        None, Whole(1, 1_000_000), "How many samples one GPU takes at a time.", example=8
    )
    gradient_accumulation: int | None = key(
        None, Whole(1, 1_000_000), "How many batches are added up before the weights are updated.", example=4
    )
    default_model: str | None = key(
        None, LINE, "The model that is trained when the job names none.", example="llama-7b"
    )
    default_dataset: str | None = key(
        None, LINE, "The dataset that is used when the job names none.", example="wikitext"
    )


@section
class Monitor(Section):
    """How often UGRO probes nodes, and when it pauses for a node that does not answer."""

    busy_interval: float = key(5.0, _DURATION, "Time between two probes of a node while there are jobs; at most 60 s.")
    recent_interval: float = key(10.0, _DURATION, "The same within 30 minutes of the last job.")
    quiet_interval: float = key(20.0, _DURATION, "The same within 2 hours of the last job.")
    idle_interval: float = key(40.0, _DURATION, "The same after that.")
    breaker_failures: int = key(3, Whole(1, 1000), "After this many failures in a row, probes of a node pause.")
    breaker_pause: float = key(
        300.0, _DURATION, "Length of the pause, in seconds; a node that reconnects is probed at once."
    )


@section
class Metrics(Section):
    """How long metrics of nodes and jobs are kept."""

    node_hours: float = key(24.0, _NUMBER, "How long a node's metrics are kept, in hours.")
    job_days: float = key(365.0, _NUMBER, "How long a job's metrics are kept, in days.")
    max_gb: float = key(
        10.0,
        Gigabytes(),
        "The most space for metrics. Above it, the oldest jobs lose their single points first and keep coarser curves.",
    )


@section
class KernelSettings(Section):
    """All of the cluster file but its nodes, and what features add."""

    other_keys = ("nodes",)
    elsewhere = MappingProxyType({"store": _STORE})

    remote_root: str = key(
        "~/grid_workspace",
        NODE_DIRECTORY,
        "The directory on each node in which UGRO keeps its files. Other users must not be able to write to it.",
    )
    ssh: Ssh = nested(Ssh)
    health_check: HealthCheck = nested(HealthCheck)
    sync: Sync = nested(Sync)
    cluster: Cluster = nested(Cluster)
    training: Training = nested(Training)
    environment: EnvironmentSection = nested(EnvironmentSection)
    monitor: Monitor = nested(Monitor)
    metrics: Metrics = nested(Metrics)
    dashboard: Dashboard = nested(Dashboard)
    team: Team = nested(Team)
    api: Api = nested(Api)
    channels: dict[str, Channel] = key(
        {},
        CHANNELS,
        "Where alerts and notifications about jobs can be sent: a map of names to channels, see below.",
        example={"ops": {"type": "slack", "url_file": "~/.ugro/slack_url"}},
    )

    def section(self, kind: type[S]) -> S:
        """Returns the section of a feature; its defaults, if the feature is left out."""
        return next((one for one in vars(self).values() if isinstance(one, kind)), None) or kind()

    def check(self) -> None:
        for name in self.sections():
            try:
                getattr(self, name).check_within(self)
            except BadValueError as error:
                raise error.within(name) from error


def _with_features() -> type[KernelSettings]:
    targets = {name: target for feature in installed() for name, target in feature.settings.items()}
    found = {name: import_object(target) for name, target in targets.items()}
    body = {name: nested(one) for name, one in found.items()}
    about = {"__annotations__": found, "__doc__": KernelSettings.__doc__, "__module__": __name__}
    return section(type("Settings", (KernelSettings,), {**about, **body}))


if TYPE_CHECKING:
    Settings = KernelSettings  # sections of features are found by their class: config.section(HookSection)
else:
    Settings = _with_features()


@section
class Config(Settings):
    """The file with the environment applied. ``path`` is None when there is no file."""

    path: Path | None = None
    nodes: tuple[NodeSpec, ...]


@section
class NodeEntry(Section):
    """One node in the map form of `nodes`."""

    noun = "a node"

    ip: str | None = key(
        None, HOST, "The address that ssh connects to; the same as `host`.", example="192.168.1.11"
    )
    host: str | None = key(
        None,
        HOST,
        "The host name, address or ssh alias that ssh connects to; without it, the node's name.",
        example="gpu1.lan",
    )
    user: str | None = key(
        None,
        USER,
        "The user name to log in with; without it, ssh decides. `$(whoami)` and `${USER}` mean the user here; no shell "
        "is run.",
        example="ann",
    )
    port: int | None = key(None, _PORT, "The port of the ssh server; without it, ssh decides.", example=22)
    account: str | None = key(
        None,
        ACCOUNT,
        "The account of a job on this node, with `{user}` for the job's user: `\"{user}\"` logs in as the person. "
        "Without it, `team.account`; without that too, jobs run in the account of `user`.",
        example="{user}",
    )
    role: Role = key(Role.WORKER, Choice(Role), "The node's role in the cluster; at most one node is the master.")
    gpu: str | None = key(
        None, LINE, "A note about its GPU. UGRO uses what it detects, not this.", example="RTX 4070"
    )
    vram_gb: float | None = key(
        None,
        Gigabytes(),
        "A note about its GPU memory, in GB (10^9 bytes). UGRO uses what it detects, not this.",
        example=8,
    )
    labels: tuple[str, ...] = key((), _LABELS, "Words by which jobs can ask for the node.", example=["fast", "lab2"])
    python: str | None = key(
        None,
        _PROGRAM,
        "The Python on the node, 3.9 or newer; without it, the best one found.",
        example="~/venv/bin/python",
    )
    remote_root: str | None = key(
        None,
        NODE_DIRECTORY,
        "The directory for UGRO's files on this node, instead of the common one.",
        example="/data/ugro",
    )
    transport: str | tuple[str, ...] = key(
        "ssh",
        Transport(),
        "How to reach the node: over ssh, as this machine itself (local), as a container (podman, docker), as a pod "
        "(kubernetes), or by a command that connects stdin and stdout to a shell on the node.",
        example=["docker", "exec", "-i", "gpu1"],
    )
    container: str | None = key(
        None,
        CONTAINER_NAME,
        "The container, with `transport: podman` or `docker`: without it, the node's name. With `kubernetes`: the "
        "container of the pod.",
        example="trainer",
    )
    pod: str | None = key(
        None, KUBERNETES_NAME, "The pod, with `transport: kubernetes`; without it, the node's name.", example="gpu-0"
    )
    namespace: str | None = key(
        None, KUBERNETES_NAME, "The pod's namespace; without it, that of kubectl's context.", example="training"
    )
    env: dict[str, str] = key(
        {},
        Environment(),
        "Environment variables for UGRO's program on the node.",
        example={"CUDA_HOME": "/usr/local/cuda"},
    )
    owner: OwnerSection = nested(OwnerSection)
    power: PowerKeys = nested(PowerKeys)

    def check(self) -> None:
        if self.host and self.ip and self.host != self.ip:
            raise BadValueError(
                f"{shown(self.host)} is not the ip, {shown(self.ip)}",
                hint="ip and host are two names for one key: give one of them",
                at=("host",),
            )
        self._way.check()
        if self.account is not None and self.transport != "ssh":
            hint = "remove account, or reach the node by ssh"
            raise BadValueError("only nodes that are reached by ssh have accounts", hint=hint, at=("account",))

    @property
    def _way(self) -> Way:
        return Way(self.transport, self.user, self.container, self.pod, self.namespace)

    def spec(self, name: str, common: Settings) -> NodeSpec:
        """``common``: used for what the node does not say itself."""
        account = (self.account or common.team.account) if self.transport == "ssh" else None
        return NodeSpec(
            name=name,
            host=self.host or self.ip or "",
            user=self.user,
            port=self.port,
            role=self.role,
            gpu=self.gpu,
            vram_bytes=None if self.vram_gb is None else round(self.vram_gb * 10**9),
            labels=self.labels,
            python=self.python,
            remote_root=self.remote_root or common.remote_root,
            transport=self._way.command_for(name),
            # Sorted: the same variables in another order are no reason for a new link.
            env=tuple(sorted(self.env.items())),
            owner=self.owner.rule(common.section(OwnerSection)),
            power=rule_of(name, self.labels, self.power, common.section(PowerSection)),
            account=account,
        )
