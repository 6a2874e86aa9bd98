"""The values in answers of checks (``check.WORK``).

Both sides import this file: the node builds the values, and the agent decodes what it gets into the same classes,
because an answer is not trusted. Loaded on a node with the first check only, not at its start: ``dataclasses`` would
take longer to load than the rest of the node program. Methods are declared where they are served: ``program.method``.

Facts about the machine (the first message of a link, and ``probe``) are ``core.node.Machine`` and ``core.node.Facts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class Root:
    """``root``: the folder that holds all of UGRO's files on the node."""

    path: str
    error: Optional[str] = None
    free_bytes: Optional[int] = None
    filesystem: Optional[str] = None
    folder_id: Optional[str] = None  # the same on nodes that share the folder


@dataclass(frozen=True)
class Packages:
    """``packages``: installed versions; ``None`` means not installed, or not known."""

    python: str
    torch: Optional[str] = None
    torch_cuda: Optional[str] = None
    cuda_runtime: Optional[str] = None
    nccl: Optional[str] = None
    is_managed: bool = False  # the system's package manager owns this Python: pip refuses to install into it
    ray: Optional[str] = None

    @property
    def torch_release(self) -> Optional[str]:
        return self.torch.partition("+")[0] if self.torch else None

    @property
    def torch_build(self) -> str:
        return self.torch.partition("+")[2] if self.torch else ""

    @property
    def cuda(self) -> Optional[str]:
        """What torch was built for; the local part of a wheel's version has it: +cu124, +cpu or +rocm6.2."""
        build = self.torch_build
        if self.torch_cuda:
            return self.torch_cuda
        if build.startswith("cu") and build[2:].isdigit():
            return "%s.%s" % (build[2:-1], build[-1])
        if build.startswith(("cpu", "rocm")):
            return "none (%s)" % build
        return ".".join(self.cuda_runtime.split(".")[:2]) if self.torch and self.cuda_runtime else None


@dataclass(frozen=True)
class Environment:
    """``environment``: every installed package."""

    python: str
    packages: Tuple[Tuple[str, str], ...] = ()
    torch_cuda: Optional[str] = None
    gpu_driver: Optional[str] = None


@dataclass(frozen=True)
class Modules:
    """``modules``: which of the ``names`` that were asked for the node's Python does not find.

    ``folders``: where it looks, and when each last changed (in nanoseconds; 0: it is not there). Sent with the next
    question, they save the look: ``is_same`` says that nothing has changed.
    """

    missing: Tuple[str, ...] = ()
    folders: Tuple[Tuple[str, int], ...] = ()
    is_same: bool = False


@dataclass(frozen=True)
class Survival:
    """``survival``: what happens to a user's processes when the last session ends."""

    user: str
    has_logind: bool
    kills_processes: bool
    lingers: bool


@dataclass(frozen=True)
class PortUse:
    port: int
    is_free: bool
    error: Optional[str] = None
    pid: Optional[int] = None
    process: Optional[str] = None
    user: Optional[str] = None


@dataclass(frozen=True)
class Ports:
    """``ports``: who uses the ``ports`` that were asked about."""

    ports: Tuple[PortUse, ...]


@dataclass(frozen=True)
class Listening:
    """``listen``: the ports that are open, sent before the answer."""

    ports: Tuple[int, ...]
    taken: Tuple[int, ...]  # of the wanted ones, those that another process listens on
    addresses: Tuple[str, ...]  # of the node, IPv4, without loopback


@dataclass(frozen=True)
class Target:
    """``connect`` is asked to reach these."""

    node: str
    addresses: Tuple[str, ...]
    ports: Tuple[int, ...]
    word: str  # what the listener waits for
    reply: str  # what it answers


@dataclass(frozen=True)
class Reached:
    node: str
    port: int
    address: str
    interface: str  # that the connection left by; empty if unknown
    peer_interface: str  # that it arrived at
    connect_s: float


@dataclass(frozen=True)
class Missed:
    node: str
    port: int
    address: str
    error: str


@dataclass(frozen=True)
class Connections:
    """``connect``: how one node's attempts to connect to others went."""

    reached: Tuple[Reached, ...] = ()
    missed: Tuple[Missed, ...] = ()
