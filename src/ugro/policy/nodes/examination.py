"""What ``ugro doctor`` finds out about one node, before it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.core.node import Facts, LinkQuality, Machine, NodeSpec
from ugro.core.owner import OwnerReport
from ugro.remote.messages import Packages, Ports, Root, Survival


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
    strange_runs: str | None = None  # what it reports that is not believed
    owner: OwnerReport | None = None

    @property
    def name(self) -> str:
        return self.spec.name
