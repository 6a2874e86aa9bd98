"""What can be asked about measured hardware."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.features.hardware.model import (
    AllReduceFigures,
    BestFigure,
    LinkFigures,
    Measurement,
    Mode,
    NodeFigures,
    Part,
    Progress,
)
from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import Finding
from ugro.kernel.operations.request import Lines, Request


@dataclass(frozen=True, slots=True)
class MeasuringProgress:
    progress: Progress


@dataclass(frozen=True, slots=True)
class Measured:
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class MeasureHardware(
    Request[Lines[MeasuringProgress | Measured]],
    route="POST /v1/bench",
    role=Role.OPERATOR,
    audit="bench {nodes}",
):
    """Measures nodes: says how far it is, then sends the measurement. Closing the stream ends what runs there."""

    nodes: tuple[str, ...] = ()
    mode: Mode = Mode.FULL
    parts: tuple[Part, ...] = tuple(Part)
    force: bool = False


@dataclass(frozen=True, slots=True)
class Hardware:
    nodes: tuple[NodeFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    allreduces: tuple[AllReduceFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class GetHardware(Request[Hardware], route="GET /v1/hardware", role=Role.VIEWER):
    """Returns the newest figures of all nodes, links and all-reduces."""


@dataclass(frozen=True, slots=True)
class NodeHardware:
    figures: NodeFigures | None = None
    history: tuple[NodeFigures, ...] = ()  # the newest first
    best: tuple[BestFigure, ...] = ()
    links: tuple[LinkFigures, ...] = ()  # to other nodes
    allreduces: tuple[AllReduceFigures, ...] = ()  # that it took part in
    findings: tuple[Finding, ...] = ()  # what has become worse


@dataclass(frozen=True, slots=True)
class GetNodeHardware(Request[NodeHardware], route="GET /v1/nodes/{name:path}/hardware", role=Role.VIEWER):
    """Returns what was measured of one node."""

    name: str
