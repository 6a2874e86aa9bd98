"""A service as its page shows it."""

from __future__ import annotations

from urllib.parse import urlsplit

from ugro.core.service import ServiceReport
from ugro.web.node_http import Place


def door_place(found: ServiceReport) -> Place:
    """Where its door listens: the port of its address, on the door's node."""
    return Place(found.door.node, urlsplit(found.url).port or 80)
