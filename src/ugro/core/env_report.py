"""Python environments as commands show them: making one, the versions on each node, and what nodes keep."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.finding import Finding, Grade

SHORT = 12  # letters of an environment's name that are shown
_WELL_KNOWN = frozenset({"torch", "jax", "tensorflow", "transformers", "lightning", "numpy"})


@dataclass(frozen=True, slots=True)
class SetupStep:
    """How far the making of an environment is on one node."""

    node: str
    phase: str
    done: int = 0  # packages
    total: int = 0  # 0: not known
    bytes: int = 0  # of these packages, so far
    total_bytes: int = 0
    line: str = ""  # the installer's newest
    is_last: bool = False  # the node is ready, or has failed


@dataclass(frozen=True, slots=True)
class NodeVersions:
    """What the ranks of a job find on one node; ``None`` means not installed, or not known."""

    node: str
    environment: str | None = None  # its name; None: the node's own Python
    label: str = ""  # of the node, whose override was used
    python: str | None = None
    python_path: str | None = None
    torch: str | None = None
    cuda: str | None = None  # that torch was built for
    nccl: str | None = None
    driver: str | None = None
    others: tuple[tuple[str, str | None], ...] = ()  # further packages whose versions differ between the nodes
    differs: tuple[str, ...] = ()  # in what it differs from most nodes
    size_bytes: int | None = None
    seconds: float | None = None  # that it took to make; None: nothing was made
    error: str | None = None
    hint: str | None = None
    last_lines: tuple[str, ...] = ()  # of the installer
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """The end of ``ugro node setup``."""

    environment: str | None  # what was asked for, in words; None: nothing is configured
    nodes: tuple[NodeVersions, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        if any(one.is_unreachable for one in self.nodes):
            return 5
        return int(any(one.error for one in self.nodes) or any(one.grade is Grade.FAILED for one in self.findings))


@dataclass(frozen=True, slots=True)
class HeldOn:
    """One environment on one node."""

    node: str
    size_bytes: int
    made_at: str
    used_at: str
    runs: int = 0  # that use it now


@dataclass(frozen=True, slots=True)
class KeptEnvironment:
    """An environment, and the nodes that have it."""

    name: str
    python: str
    packages: tuple[tuple[str, str], ...]
    nodes: tuple[HeldOn, ...]

    @property
    def size_bytes(self) -> int:
        """Of one copy, the largest."""
        return max((one.size_bytes for one in self.nodes), default=0)

    @property
    def made_at(self) -> str:
        return max((one.made_at for one in self.nodes), default="")

    @property
    def used_at(self) -> str:
        return max((one.used_at for one in self.nodes), default="")

    @property
    def runs(self) -> int:
        return sum(one.runs for one in self.nodes)

    def first_packages(self, most: int) -> str:
        """Those by which people know an environment first."""
        ordered = sorted(self.packages, key=lambda package: package[0].lower() not in _WELL_KNOWN)
        words = [f"{name} {version}" for name, version in ordered[:most]]
        more = [f"{len(ordered) - most} more"] if len(ordered) > most else []
        return ", ".join([*words, *more])


@dataclass(frozen=True, slots=True)
class Unasked:
    """A node that could not answer."""

    node: str
    error: str
    hint: str | None = None
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class EnvListing:
    environments: tuple[KeptEnvironment, ...]  # the last used first
    unasked: tuple[Unasked, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvRemoval:
    """What was removed from one node."""

    node: str
    removed: tuple[str, ...] = ()
    freed_bytes: int = 0
    kept_bytes: int | None = None  # by all environments; None: not measured
    is_deleting: bool = False  # more becomes free yet
    error: str | None = None
    hint: str | None = None
    is_unreachable: bool = False
