"""``client.cluster_files``: the part of the Python API that reads and writes cluster files, of which one is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ugro.core.cluster_file import ClusterFacts, ClusterWish
from ugro.core.support.codec import decode


class ClusterFiles:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def read(self, path: Path) -> ClusterFacts:
        return decode(ClusterFacts, self._ask("GET", "/v1/cluster/file?" + urlencode({"path": str(path.absolute())})))

    def write(self, path: Path, wish: ClusterWish) -> None:
        """An agent that serves this file applies it at once."""
        self._ask("PUT", "/v1/cluster/file", {"path": str(path.absolute()), "wish": asdict(wish)})
