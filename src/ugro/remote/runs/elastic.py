"""A run of a training that goes on without ranks that are lost: it lives as long as its agent wants it to.

A rank of it that dies does not end the others. It can be started again, once for each order: an order names how often
it was started before, and one that comes twice finds another number. Ranks write to a file who trains on.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.remote import foreign
from ugro.remote.process import terminate
from ugro.remote.runs.ownership import Ownership
from ugro.remote.runs.ranks import Rank
from ugro.remote.state.rundir import RunDir
from ugro.remote.state.runspec import MOST_RANKS

_MEMBERS_FILE = "members.json"
_MOST_BYTES = 64 * 1024
_MOST_MEMBERS = 4096


class Members(NamedTuple):
    """The ranks of the newest group that this node has heard of, and its number."""

    number: int
    ranks: List[int]


def read_members(run: RunDir) -> Optional[Members]:
    """None if there is no such file, or none that could be."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = foreign.parsed(run.note(_MEMBERS_FILE, _MOST_BYTES) or b"")
        ranks = [int(rank) for rank in found["ranks"]]
        if 0 < len(ranks) <= _MOST_MEMBERS and int(found["number"]) >= 0:
            return Members(int(found["number"]), ranks)
    return None


def lost(ranks: List[Rank]) -> List[Dict[str, Any]]:
    """Those that have ended and not with 0, and how often each was started."""
    return [{**rank.record(), "starts": rank.starts} for rank in ranks if rank.has_failed][:MOST_RANKS]


def may_start_again(rank: Rank, starts: int, ownership: Ownership) -> bool:
    """Never two processes for one rank: it has ended, and so has all that it left in its session."""
    if rank.starts != starts or rank.is_running or not rank.has_failed:
        return False
    ownership.forget_look()
    left = [pid for pid in ownership.orphans() if terminate.place(pid).session == rank.pid]
    for pid in left:
        terminate.kill_child(pid)
    return not left
