"""Times: stored as RFC 3339, computed with as unix seconds."""

from __future__ import annotations

from datetime import datetime


def unix_seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
