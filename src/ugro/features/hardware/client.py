"""``client.hardware``: measures nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ugro.features.hardware.model import Measurement, Mode, Part, Progress
from ugro.features.hardware.operations import Measured, MeasureHardware

if TYPE_CHECKING:
    from ugro.client.client import Client


class HardwareCalls:
    """Created by ``Client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def measure(
        self,
        nodes: Sequence[str] = (),
        *,
        mode: Mode = Mode.FULL,
        parts: Sequence[Part] = tuple(Part),
        force: bool = False,
    ) -> Iterator[Progress | Measurement]:
        """Progress as it goes on, then the measurement. Closing the iterator ends what runs on the nodes."""
        for said in self._client.follow(MeasureHardware(tuple(nodes), mode, tuple(parts), force), timeout_s=None):
            yield said.measurement if isinstance(said, Measured) else said.progress
