"""Machines that were found and need not be nodes: what there is, and what each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

from ugro.client.http import lines
from ugro.core.discovery import Discovered
from ugro.core.node import NodeReport
from ugro.core.support.codec import decode


class DiscoveryCalls:
    def __init__(self, ask: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._ask = ask
        self._stream = stream

    def look(self) -> Discovered:
        """Looks at all sources of the cluster file, which may take some seconds."""
        return decode(Discovered, self._ask("GET", "/v1/discovery"))

    def reports(self, names: Sequence[str]) -> Iterator[NodeReport]:
        """Probes machines that are no nodes yet. One whose host key is not known is not logged in to."""
        query = urlencode([("node", name) for name in names])
        for document in lines(self._stream("GET", f"/v1/discovery/reports?{query}")):
            yield decode(NodeReport, document)
