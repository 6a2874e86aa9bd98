"""Names of signals."""

from __future__ import annotations

import signal

KNOWN = frozenset(int(one) for one in signal.Signals)


def signal_name(number: int) -> str:
    """Also for real-time signals between the first and the last, which have no name."""
    return signal.Signals(number).name if number in KNOWN else f"signal {number}"
