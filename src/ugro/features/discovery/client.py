"""Machines that were found and need not be nodes: what there is, and what each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ugro.client.http import lines
from ugro.features.discovery.model import Discovered
from ugro.kernel.agent.model import ClusterFacts, ClusterWish
from ugro.kernel.links.model import NodeReport
from ugro.kernel.support.codec import decode

# --- cluster files ----------------------------------------------------------------------------------------------------
# ``client.cluster_files``: the part of the Python API that reads and writes cluster files, of which one is in use.


class ClusterFiles:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def read(self, path: Path) -> ClusterFacts:
        return decode(ClusterFacts, self._ask("GET", "/v1/cluster/file?" + urlencode({"path": str(path.absolute())})))

    def write(self, path: Path, wish: ClusterWish) -> None:
        """An agent that serves this file applies it at once."""
        self._ask("PUT", "/v1/cluster/file", {"path": str(path.absolute()), "wish": asdict(wish)})


# --- discovery --------------------------------------------------------------------------------------------------------


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
