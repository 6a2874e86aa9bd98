"""Where ranks agree on who belongs to the next group: keys in a store that lives outside the ranks.

Groups are numbered. A rank that notices that a group is broken calls the next one. Every process that lives answers the
call from a thread, also while its script computes; its script comes when it notices itself. The list of members that
is published first holds for all, so that there are never two groups that train.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ugro.kernel.support.errors import UgroError, UsageError
from ugro.train.rules.failures import GRACE_S, Forming, TooFew, Wait, decide

# --- errors -----------------------------------------------------------------------------------------------------------
# What is raised when a rank is lost, and how torch says it.


# Gloo raises plain RuntimeErrors, most of which name its own source files; NCCL's and the store's have classes.
_GLOO = (
    "gloo/", "Gloo ", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "pair closure",
    "error when running the callback",  # of DDP's exchange
)  # fmt: skip


LEFT_BEHIND = 75  # the exit code of such a rank: a temporary failure, by convention


class LeftBehind(UgroError):
    """The others have gone on without this rank; a process that is started again can join them."""

    exit_code = LEFT_BEHIND


class PeerLost(RuntimeError):
    """Some rank of the group is gone, and this one has learnt it before it noticed itself."""


def is_lost(error: BaseException | None) -> bool:
    """Whether it says that another rank does not answer, as opposed to an error of this rank's own."""
    if isinstance(error, PeerLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch import distributed

    return isinstance(error, distributed.DistError) or any(part in str(error) for part in _GLOO)


# --- meeting ----------------------------------------------------------------------------------------------------------


log = logging.getLogger("ugro.train")

_LOOK_S = 0.02  # at what others have written, while waiting for them
_LISTEN_S = 0.1  # for a call, while computing
_ASK_AGAIN_S = 10.0
_SAY_S = 30.0
_STORE_S = 60.0  # the longest that the store may take to be there, or to answer
_CALLED, _JOINS = "called", "joins"
_PREFIX = "ugro"


@dataclass(frozen=True, slots=True)
class Member:
    rank: int
    token: str  # of the process: one that is started again has another
    joins: bool  # it has no state yet
    takes: bool = True  # others may join where it is


@dataclass(frozen=True, slots=True)
class Formed:
    number: int
    members: tuple[Member, ...]
    asked: int = 0  # how many requests to join were there

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)


@dataclass(frozen=True, slots=True)
class Rules:
    min_ranks: int
    timeout_s: float
    grace_s: float = GRACE_S


class Meeting:
    def __init__(self, address: str, port: int, rank: int, rules: Rules) -> None:
        self.rank = rank
        self.rules = rules
        self.number = 0  # of the group that this rank belongs to
        self.members: frozenset[int] = frozenset()
        self._seen_to = 0  # requests to join
        self._heard = self._requests = 0  # by the thread that listens: the newest group called, requests to join
        self._takes = True
        self._token = os.urandom(8).hex()
        self._where = (address, port)
        self._store = self.connected(_PREFIX)
        self._spoke_at = time.monotonic()
        first = self._store.compare_set(f"first/{rank}", "", self._token).decode()
        self.joins = first != self._token
        self._store.compare_set(_CALLED, "", "0")
        self._listener: threading.Thread | None = None
        self._is_closed = threading.Event()

    def connected(self, prefix: str) -> Any:
        """A connection of its own: one that waits keeps others waiting."""
        from torch import distributed

        limit = timedelta(seconds=_STORE_S)
        store = distributed.TCPStore(*self._where, is_master=False, wait_for_workers=False, timeout=limit)
        return distributed.PrefixStore(prefix, store)

    def spoke(self) -> None:
        """The script has come to some point: it does not hang."""
        self._spoke_at = time.monotonic()

    def listen(self) -> None:
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, name="ugro elastic", daemon=True)
            self._listener.start()
            atexit.register(self.close)  # a thread inside torch aborts a process that ends meanwhile

    def close(self) -> None:
        self._is_closed.set()
        if self._listener is not None:
            self._listener.join(_STORE_S)

    def joined(self, formed: Formed) -> None:
        self.number, self.members, self.joins = formed.number, frozenset(formed.ranks), False
        self._seen_to = formed.asked
        self.spoke()

    @property
    def is_called(self) -> bool:
        """Some rank has noticed that the group is broken."""
        return self._heard > self.number

    @property
    def has_joiners(self) -> bool:
        return self._requests > self._seen_to

    # --- a new group --------------------------------------------------------------------------------------------

    def form(self, at_least: int, *, takes: bool) -> Formed:
        """Waits for the next group, whose number is at least this one. Raises ``LeftBehind`` if it has no place.

        ``takes``: others may join where this rank is.
        """
        self._takes = takes
        number = self._call(at_least)
        begun = time.monotonic()
        while True:
            if (formed := self._published(number)) is not None:
                return self._checked(formed)
            if (called := self._called()) > number:
                number, begun = called, time.monotonic()
                self._come(number)
            self._decide(number, time.monotonic() - begun)
            time.sleep(_LOOK_S)

    def join(self, at_least: int = 1) -> Formed:
        """Waits until the others take this rank in. They decide when: this one has no state that could go on.

        ``at_least``: the number of the group; those before it are broken.
        """
        seen, asked_at = at_least - 1, float("-inf")
        begun, said_s = time.monotonic(), 0.0
        while True:
            if (waited_s := time.monotonic() - begun) > said_s + _SAY_S:
                said_s = waited_s
                log.warning(
                    "rank %d waits to join: the others let it in between two steps (%.0f s)", self.rank, waited_s
                )
            if time.monotonic() - asked_at > _ASK_AGAIN_S:
                asked_at = time.monotonic()
                self._store.set(f"join/{self._store.add(_JOINS, 1)}", str(self.rank))
            if (called := self._called()) > seen:
                seen = called
                self._come(seen)
            formed = self._published(seen) if seen >= at_least else None
            if formed is not None and self._place(formed) is not None:
                return formed
            time.sleep(_LOOK_S)

    def _call(self, at_least: int) -> int:
        while (called := self._called()) < at_least:
            self._store.compare_set(_CALLED, str(called), str(at_least))
        self._come(called)
        return called

    def _called(self) -> int:
        return int(self._store.get(_CALLED))

    def _come(self, number: int) -> None:
        words = json.dumps({"token": self._token, "joins": self.joins, "takes": self._takes})
        self._store.set(f"{number}/ready/{self.rank}", words)

    def _decide(self, number: int, waited_s: float) -> None:
        asked = int(self._store.add(_JOINS, 0))
        requests = range(self._seen_to + 1, asked + 1)
        expected = frozenset(int(self._store.get(key)) for _, key in self._there("join", requests))
        ready = {one.rank: one for one in self._ready(number, self.members | expected)}
        if not all(one.takes for one in ready.values()):  # those who want to join ask again
            expected = frozenset()
            ready = {rank: one for rank, one in ready.items() if not one.joins}
        here = {rank: float(self._store.get(key)) for rank, key in self._there(f"{number}/here", self.members)}
        joining = frozenset(rank for rank, one in ready.items() if one.joins)
        rules = self.rules
        found = decide(
            Forming(
                self.members, here, frozenset(ready), joining, expected,
                waited_s, rules.timeout_s, rules.min_ranks, rules.grace_s,
            )
        )  # fmt: skip
        if isinstance(found, TooFew):
            raise UgroError(
                f"of the ranks {len(found.ranks)} are left, fewer than the {rules.min_ranks} that this job needs",
                hint="elastic.min_ranks in the job file; the job is tried again from its last checkpoint",
            )
        if not isinstance(found, Wait):
            members = [[rank, ready[rank].token, ready[rank].joins] for rank in sorted(found)]
            self._store.compare_set(f"{number}/members", "", json.dumps({"members": members, "asked": asked}))

    def _ready(self, number: int, ranks: Iterable[int]) -> list[Member]:
        found = []
        for rank, key in self._there(f"{number}/ready", ranks):
            words = json.loads(self._store.get(key))
            found.append(Member(rank, str(words["token"]), bool(words["joins"]), bool(words["takes"])))
        return found

    def _there(self, prefix: str, numbers: Iterable[int]) -> list[tuple[int, str]]:
        keys = [(number, f"{prefix}/{number}") for number in numbers]
        return [(number, key) for number, key in keys if self._store.check([key])]

    def _published(self, number: int) -> Formed | None:
        key = f"{number}/members"
        if not self._store.check([key]):
            return None
        found = json.loads(self._store.get(key))
        return Formed(number, tuple(Member(*one) for one in found["members"]), int(found["asked"]))

    def _place(self, formed: Formed) -> Member | None:
        return next((one for one in formed.members if (one.rank, one.token) == (self.rank, self._token)), None)

    def _checked(self, formed: Formed) -> Formed:
        if self._place(formed) is None:
            raise LeftBehind(f"the others have gone on without rank {self.rank}: it did not answer in time")
        return formed

    # --- while the script computes ------------------------------------------------------------------------------

    def _listen(self) -> None:
        heard_at = reported_s = 0.0
        try:
            store = self.connected(_PREFIX)
            while not self._is_closed.wait(_LISTEN_S):
                called = int(store.get(_CALLED))
                if called > max(self._heard, self.number):
                    heard_at, reported_s = time.monotonic(), math.inf
                # What it does since then counts, too: one that goes on working is never silent for long.
                silent_s = round(heard_at - self._spoke_at, 3)
                if called > self.number and silent_s < reported_s:
                    reported_s = silent_s
                    store.set(f"{called}/here/{self.rank}", str(silent_s))
                self._heard, self._requests = called, int(store.add(_JOINS, 0))
        except RuntimeError:  # the store is gone: this rank trains on, and says so when it needs it
            return


# --- store ------------------------------------------------------------------------------------------------------------
# Holds the store in which ranks meet, in a process that outlives each of them: ``python -m
# ugro.train.elastic_meeting``.
#
# It listens on MASTER_PORT until it is ended, or until the process that started it is gone.


_STORE_LOOK_S = 2.0


def main() -> None:
    import torch

    port = os.environ.get("MASTER_PORT", "")
    if not port.isdigit():
        raise UsageError("MASTER_PORT is not set", hint="the ranks connect to the same port, at MASTER_ADDR")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    parent = os.getppid()
    torch.set_num_threads(1)
    host = torch.distributed.TCPStore("0.0.0.0", int(port), is_master=True, wait_for_workers=False)
    while host is not None and os.getppid() == parent:
        if ended.wait(_STORE_LOOK_S):
            break


if __name__ == "__main__":
    main()
