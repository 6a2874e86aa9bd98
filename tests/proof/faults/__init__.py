"""What a chaos run does to a cluster, by topic: each file here has a dict ``KINDS`` of faults by their names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.rig.disk import SmallDisk
from tests.rig.judge import Book, Ledger
from tests.rig.sshd import SshdNode

Undo = Callable[[], None]


@dataclass(frozen=True)
class Step:
    """``pick`` chooses among what is there when the step is made: 0 the first, nearly 1 the last."""

    at_s: float
    kind: str
    node: int = 0
    pick: float = 0.0
    length_s: float = 0.0
    job: str = ""


@dataclass(frozen=True)
class Hit:
    """What was done, and how to undo it; None as undo: nothing is to be undone."""

    text: str
    undo: Undo | None = None


@dataclass
class Target:
    """The cluster that faults are done to."""

    home: Path
    cluster: Path
    ledger: Ledger
    book: Book
    nodes: Sequence[SshdNode]
    disks: dict[str, SmallDisk] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    weight: int  # how often it is drawn, against the others
    inflict: Callable[[Target, Step], Hit | None]  # None: there was nothing to do it to
    longest_s: float = 5.0
    # Why it cannot be had on this machine.
    impossible: Callable[[], str | None] = lambda: None
    # Called before the sshds and the first agent start, with the nodes that there will be.
    prepare: Callable[[Sequence[SshdNode], ExitStack], None] = lambda nodes, stack: None


def all_kinds() -> dict[str, Kind]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {name: kind for module in modules for name, kind in module.KINDS.items()}


def possible_kinds() -> dict[str, Kind]:
    return {name: kind for name, kind in all_kinds().items() if kind.impossible() is None}


def root_of(node: SshdNode) -> Path:
    return node.home / "grid_workspace"
