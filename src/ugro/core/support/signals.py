"""Signals in words."""

from __future__ import annotations

import signal

KNOWN = frozenset(int(one) for one in signal.Signals)


def signal_name(number: int) -> str:
    """Those between the first and the last real-time signal have no name."""
    return signal.Signals(number).name if number in KNOWN else f"signal {number}"
