"""``client.hardware``: the part of the Python API that measures nodes and shows what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.client.http import lines, path_of
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
from ugro.kernel.agent.model import Finding
from ugro.kernel.support.codec import decode


@dataclass(frozen=True, slots=True)
class Hardware:
    """The newest figures of all nodes."""

    nodes: tuple[NodeFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    allreduces: tuple[AllReduceFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """What was measured of one node."""

    figures: NodeFigures | None = None
    history: tuple[NodeFigures, ...] = ()  # the newest first
    best: tuple[BestFigure, ...] = ()
    links: tuple[LinkFigures, ...] = ()  # to other nodes
    allreduces: tuple[AllReduceFigures, ...] = ()  # that it took part in
    findings: tuple[Finding, ...] = ()  # what has become worse


class HardwareCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._ask = ask
        self._stream = stream

    def measure(
        self,
        nodes: Sequence[str] = (),
        *,
        mode: Mode = Mode.FULL,
        parts: Sequence[Part] = tuple(Part),
        force: bool = False,
    ) -> Iterator[Progress | Measurement]:
        """Progress as it goes on, then the measurement. Closing the iterator ends what runs on the nodes."""
        body = {"nodes": list(nodes), "mode": mode, "parts": list(parts), "force": force}
        for document in lines(self._stream("POST", "/v1/bench", body, timeout_s=None)):
            if "progress" in document:
                yield decode(Progress, document["progress"])
            else:
                yield decode(Measurement, document["measurement"])

    def all(self) -> Hardware:
        return decode(Hardware, self._ask("GET", "/v1/hardware"))

    def of(self, node: str) -> NodeHardware:

        return decode(NodeHardware, self._ask("GET", f"{path_of('nodes', node)}/hardware"))
