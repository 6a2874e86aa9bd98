"""Python environments that UGRO makes on nodes: what is asked for, how one is made, and what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.support.secrets import without_passwords

# --- env report -------------------------------------------------------------------------------------------------------
# Python environments as commands show them: making one, the versions on each node, and what nodes keep.


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


# --- python env -------------------------------------------------------------------------------------------------------


class Whose(StrEnum):
    """Who chose packages and their sources. The agent resolves them on its own machine, with its own account."""

    OWNER = "owner"  # somebody who has the agent's account
    CLUSTER = "cluster"  # the cluster file alone, for a job of somebody else
    OTHER = "other"  # somebody else


@dataclass(frozen=True, slots=True)
class EnvRequest:
    """What a job or the cluster file asks for. Files were read when it was submitted: this holds their contents."""

    python: str | None = None  # "3.11"; None: what the nodes have
    requirements: tuple[str, ...] = ()  # lines, of `packages` or of a requirements file
    constraints: tuple[str, ...] = ()
    lock: str | None = None  # the text of a uv.lock or pylock.toml
    lock_name: str | None = None
    project: str | None = None  # the text of the pyproject.toml beside a uv.lock
    index_url: str | None = None  # may hold a password: masked wherever it is shown
    extra_index_url: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()  # addresses, and folders of this machine
    overrides: tuple[EnvOverride, ...] = ()
    existing: str | None = None  # a virtual or conda environment on the nodes: checked, not made
    offline: bool = False  # the nodes get their wheels from the agent
    no_index: bool = False  # only ``find_links``
    upgrade: bool = False  # resolve it again when the job is submitted
    user: str = ""  # if somebody else chose them: who
    whose: Whose | None = None  # recorded with it: when a job starts, nobody asks any more; None: not recorded yet

    @property
    def is_foreign(self) -> bool:
        """Whether it gets nothing of the agent's account: no code of a package runs there, no login is lent to it."""
        return self.whose is Whose.OTHER

    @property
    def is_local(self) -> bool:
        """Whether nodes cannot reach what it names: a folder of this machine."""
        return any("://" not in place or place.startswith("file:") for place in self.places)

    @property
    def places(self) -> tuple[str, ...]:
        """Where packages are looked for, if it says so."""
        index = (self.index_url,) if self.index_url else ()
        return (*index, *self.extra_index_url, *self.find_links)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Also those of overrides. Each may hold a password."""
        return (*self.places, *(address for one in self.overrides for address in one.addresses))

    def with_addresses(self, change: Callable[[str], str]) -> EnvRequest:
        return replace(
            self,
            index_url=change(self.index_url) if self.index_url else None,
            extra_index_url=tuple(map(change, self.extra_index_url)),
            find_links=tuple(map(change, self.find_links)),
            overrides=tuple(one.with_addresses(change) for one in self.overrides),
        )

    @property
    def masked(self) -> EnvRequest:
        """To be shown: without passwords."""
        return self.with_addresses(without_passwords)


@dataclass(frozen=True, slots=True)
class EnvOverride:
    """Replaces packages on nodes with a label, such as another CUDA build for older GPUs."""

    label: str
    requirements: tuple[str, ...] = ()
    index_url: str | None = None
    extra_index_url: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        return (*((self.index_url,) if self.index_url else ()), *self.extra_index_url)

    def with_addresses(self, change: Callable[[str], str]) -> EnvOverride:
        return replace(
            self,
            index_url=change(self.index_url) if self.index_url else None,
            extra_index_url=tuple(map(change, self.extra_index_url)),
        )


@dataclass(frozen=True, slots=True)
class Platform:
    """What wheels must fit: the same for equal nodes."""

    arch: str  # x86_64, aarch64, as `uname -m`
    libc: str  # glibc or musl
    libc_version: tuple[int, int]
    python: str  # 3.11


@dataclass(frozen=True, slots=True)
class Blob:
    """A file in the content store, by its SHA-256."""

    name: str  # of the file: torch-2.13.0-….whl, or uv
    content: str
    size: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an environment is made on a node. Its name is the hash of all that decides what is in it.

    The node gets ``tree`` before it is asked to make the environment, as it gets code: a folder in the content store
    that has the installer and the wheels in it, under their names.
    """

    name: str  # letters, digits, - and _
    platform: Platform
    requirements: str  # pinned, a line for each package with its SHA-256 hashes
    installer: Blob  # uv for the node's platform
    tree: str
    wheels: tuple[Blob, ...] = ()  # all of them, for a node without internet; none: the node downloads
    index_url: str | None = None
    extra_index_url: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    label: str = ""  # of the override that was used


@dataclass(frozen=True, slots=True)
class Made:
    """An environment on a node that is whole and never changes."""

    name: str
    python: str  # the path of its interpreter
    version: str  # 3.11.2
    size: int
    made_at: str
    used_at: str
    packages: tuple[tuple[str, str], ...] = ()  # name and version
    is_made: bool = False  # by UGRO; others were found
    torch_cuda: str | None = None  # what torch was built for: 12.6, or "none (cpu)"; None: not known
    nccl: str | None = None  # of conda; that of a wheel is among the packages


@dataclass(frozen=True, slots=True)
class EnvProgress:
    """How far the making of an environment is, on one node."""

    phase: str  # one of PHASES
    done: int = 0  # packages
    total: int = 0
    bytes: int = 0  # that the installer has written so far
    line: str = ""  # the installer's latest; without passwords


# In this order. waiting: another job makes the same one, or the node's installer is busy.
PHASES = ("waiting", "unpacking", "python", "installing", "checking")


@dataclass(frozen=True, slots=True)
class EnvOnNode:
    made: Made
    in_use: int = 0  # by so many runs

    @property
    def name(self) -> str:
        return self.made.name


@dataclass(frozen=True, slots=True)
class EnvRemoved:
    """What became of one that was to be removed; ``problem`` says why it stays: in-use, not-found or busy."""

    name: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class EnvsRemoved:
    removed: tuple[EnvRemoved, ...]
    freed_bytes: int = 0  # so far
    is_deleting: bool = False  # they are gone, and not all of their space is free yet


@dataclass(frozen=True, slots=True)
class EnvsTidied:
    removed: tuple[str, ...] = ()
    freed_bytes: int = 0  # so far
    kept_bytes: int = 0  # of all environments, and of what is kept for the next one
    is_deleting: bool = False  # as above


@dataclass(frozen=True, slots=True)
class EnvHost:
    """What decides which environments a node can have."""

    arch: str  # as `uname -m`
    libc: str  # glibc or musl
    libc_version: tuple[int, int]
    pythons: tuple[tuple[str, str], ...] = ()  # version (3.11.2) and path; the one that UGRO itself uses is the first
    reaches: tuple[bool, ...] = ()  # whether it reaches each of the addresses that were asked for
