"""How long to wait before trying again. It does not count tries and does not wait: the caller does."""

from __future__ import annotations

# Far past any cap, and small enough that the power never overflows a float.
_MOST_DOUBLINGS = 60
_DENIED_S = 60.0
_LONGEST_DENIED_S = 3600.0


def delay_s(attempt: int, random_ratio: float, *, base_s: float = 0.5, cap_s: float = 30.0) -> float:
    """The wait after failure number ``attempt``, counted from 1; ``random_ratio`` is drawn from 0..1.

    It lies between half and the whole of the doubled delay: nodes that failed together are not all tried
    again in the same moment, and none at once.
    """
    doublings = min(max(attempt - 1, 0), _MOST_DOUBLINGS)
    whole_s = min(cap_s, base_s * 2.0**doublings)
    return whole_s * (1 + random_ratio) / 2


def denied_pause_s(denials: int, random_ratio: float) -> float:
    """How long a person's login is left alone after it was denied so many times in a row.

    There may be one for each person on a node, and servers ban an address for the failures of all of them.
    """
    doublings = min(max(denials - 1, 0), _MOST_DOUBLINGS)
    return min(_LONGEST_DENIED_S, _DENIED_S * 2.0**doublings) * (1 + random_ratio / 5)
