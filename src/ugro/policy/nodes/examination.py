"""What ``ugro doctor`` finds out about one node, before it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.core.node import Facts, LinkQuality, Machine, NodeSpec


@dataclass(frozen=True, slots=True)
class Unknown:
    """In place of what a check would have found: why it found nothing."""

    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SshSettings:
    """The user's own ssh configuration for a node, as ``ssh -G`` prints it."""

    strict_host_key_checking: str
    user_known_hosts_file: str


@dataclass(frozen=True, slots=True)
class Root:
    path: str
    error: str | None
    free_bytes: int | None
    filesystem: str | None
    folder_id: str | None = None  # the same on nodes that share the folder


@dataclass(frozen=True, slots=True)
class PortUse:
    port: int
    is_free: bool
    error: str | None = None
    pid: int | None = None
    process: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    ports: tuple[PortUse, ...]


@dataclass(frozen=True, slots=True)
class Survival:
    """What happens to a user's processes when the last session ends."""

    user: str
    has_logind: bool
    kills_processes: bool
    lingers: bool


@dataclass(frozen=True, slots=True)
class Packages:
    """Installed versions; ``None`` means not installed, or not known."""

    python: str
    torch: str | None = None
    torch_cuda: str | None = None
    cuda_runtime: str | None = None
    nccl: str | None = None

    @property
    def torch_release(self) -> str | None:
        return self.torch.partition("+")[0] if self.torch else None

    @property
    def torch_build(self) -> str:
        return self.torch.partition("+")[2] if self.torch else ""

    @property
    def cuda(self) -> str | None:
        """What torch was built for; the local part of a wheel's version has it: +cu124, +cpu or +rocm6.2."""
        build = self.torch_build
        if self.torch_cuda:
            return self.torch_cuda
        if build.startswith("cu") and build[2:].isdigit():
            return f"{build[2:-1]}.{build[-1]}"
        if build.startswith(("cpu", "rocm")):
            return f"none ({build})"
        return ".".join(self.cuda_runtime.split(".")[:2]) if self.torch and self.cuda_runtime else None


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found on one node; ``None`` where there was nothing to check."""

    spec: NodeSpec
    machine: Machine
    quality: LinkQuality
    facts: Facts | Unknown
    ssh: SshSettings | Unknown | None
    root: Root | Unknown
    ports: Ports | Unknown
    port_keys: Mapping[int, str]  # the key in cluster.yaml that names each port
    survival: Survival | Unknown | None
    packages: Packages | Unknown

    @property
    def name(self) -> str:
        return self.spec.name
