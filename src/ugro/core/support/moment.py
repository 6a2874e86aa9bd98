"""Moments: as they are stored, RFC 3339, and as one counts with them, unix seconds."""

from __future__ import annotations

from datetime import datetime


def unix_seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
