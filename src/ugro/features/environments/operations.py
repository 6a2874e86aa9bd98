"""What can be asked about the Python environments on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ugro.features.environments.model import EnvListing, EnvRemoval, KeptEnvironment, Setup, SetupStep
from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Between, Lines, Needs, Request


@dataclass(frozen=True, slots=True)
class SettingUp:
    step: SetupStep


@dataclass(frozen=True, slots=True)
class SetUp:
    setup: Setup


@dataclass(frozen=True, slots=True)
class PrepareEnvironment(
    Request[Lines[SettingUp | SetUp | Needs]],
    route="POST /v1/setup",
    role=Role.OPERATOR,
    audit="set up nodes {nodes} {file}",
):
    """Makes an environment on nodes, and compares versions: says how far each node is, then what all of them have."""

    nodes: tuple[str, ...] = ()
    file: str | None = None  # a job file
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a job
    here: str = "/"
    env: Mapping[str, str] | None = None  # None: the client has not been asked for variables yet


@dataclass(frozen=True, slots=True)
class ListEnvironments(Request[EnvListing], route="GET /v1/environments", role=Role.VIEWER):
    """Asks nodes for the environments that they keep."""

    node: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OneEnvironment:
    environment: KeptEnvironment


@dataclass(frozen=True, slots=True)
class GetEnvironment(Request[OneEnvironment], route="GET /v1/environments/{word}", role=Role.VIEWER):
    """Shows an environment, by the first letters of its name, and the nodes that have it."""

    word: str


@dataclass(frozen=True, slots=True)
class EnvRemovals:
    nodes: tuple[EnvRemoval, ...]


@dataclass(frozen=True, slots=True)
class RemoveEnvironment(
    Request[EnvRemovals],
    route="DELETE /v1/environments/{word}",
    role=Role.OPERATOR,
    audit="remove environment {word}",
):
    """Removes an environment from those nodes that have it; nodes that cannot be asked are in the answer too."""

    word: str
    node: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveUnusedEnvironments(
    Request[EnvRemovals],
    route="POST /v1/environments/gc",
    role=Role.OPERATOR,
    audit="remove unused environments {nodes}",
):
    """Removes unused environments above the size limit, and those that were not used for ``unused_s``."""

    nodes: tuple[str, ...] = ()
    unused_s: Annotated[float, Between(0, 1e10)] | None = None
    everything: bool = False  # also those that were used just now, and not by a job that runs
