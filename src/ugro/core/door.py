"""The door of a service: one address in front of its replicas, as the agent uses it.

``workloads/door`` is the program behind it. What it shares out, and how, is in docs/serving-door.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MOST_WEIGHT = 256
EVEN_WEIGHT = 100


class Balance(StrEnum):
    LEASTCONN = "leastconn"  # fewest requests in relation to the weight
    FIRST = "first"  # the fastest replica that has a free slot; every replica needs a limit
    ROUNDROBIN = "roundrobin"


class ServerState(StrEnum):
    READY = "ready"
    DRAIN = "drain"  # finishes what it has and gets nothing new
    DOWN = "down"  # does not pass its health checks


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Fixed while the door runs. Times are in seconds."""

    name: str
    port: int
    state_folder: str  # its name below that of all services of its account, or a whole path; outlives attempts
    address: str = "127.0.0.1"
    balance: Balance = Balance.LEASTCONN
    needs_key: bool = False
    certificate: str | None = None  # files on its node
    certificate_key: str | None = None
    health_path: str | None = None  # None: a connection is enough
    health_interval_s: float = 2.0
    health_timeout_s: float = 3.0
    health_status: tuple[int, int] = (200, 399)  # the codes that are good
    wait_s: float = 300.0  # for a replica; 0: a request is refused at once when there is none
    most_waiting: int = 512
    answer_s: float = 600.0  # between two pieces of an answer
    most_body_bytes: int = 64 << 20  # 0: any
    most_connections: int = 2000
    retries_posts: bool = True  # those that a replica dropped without an answer; it may have begun
    drain_s: float = 20.0  # at its own end


@dataclass(frozen=True, slots=True)
class NewServer:
    name: str
    address: str
    port: int
    weight: int = EVEN_WEIGHT
    limit: int = 0  # requests at once; 0: any number
    canary: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    address: str
    port: int
    weight: int
    state: ServerState
    sessions: int
    queued: int
    limit: int = 0
    canary: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests of the last window, in seconds; zeros if there were none."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a replica's time depends on how much it has to do at once: sums over requests since the door started.

    With x the logarithm of the number of requests it had, and y that of the seconds one of them took there.
    """

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counts are those since the door started."""

    requests: int = 0
    errors: int = 0  # answers with a status of 500 and above, and what was not answered
    retries: int = 0  # requests that it dropped and another one was given
    sessions: int = 0
    queued: int = 0
    latency: Latency = Latency()
    pace: Pace = Pace()


@dataclass(frozen=True, slots=True)
class DoorStats:
    requests: int = 0
    errors: int = 0  # as above, with those that the door itself refused for want of a replica
    denied: int = 0  # wrong keys, and requests that are too large or malformed
    sessions: int = 0  # requests under way, also those that wait
    queued: int = 0  # wait for a replica
    held: int = 0  # of these: wait although no replica is ready at all
    latency: Latency = Latency()
    window_s: float = 60.0  # of all latencies
    sampled_share: float = 1.0  # of the window's requests, so many were measured
    started_at: float = 0.0  # of HAProxy, in seconds since 1970: counts begin there
    servers: Mapping[str, ServerStats] = field(default_factory=dict)


class Door(Protocol):
    """Every call may be made again. Raises UgroError."""

    async def servers(self) -> dict[str, Server]: ...

    async def add(self, server: NewServer) -> None:
        """It gets requests at once. One that is there takes the new weight and limit."""

    async def set_weight(self, name: str, weight: int) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def ready(self, name: str) -> None:
        """Ends a drain."""

    async def remove(self, name: str) -> None:
        """Raises NotAllowed while it has requests."""

    async def share_canary(self, share: float) -> None:
        """So many of all requests, from 0 to 1, go to the servers that are canaries."""

    async def set_keys(self, keys: Mapping[str, str]) -> None:
        """All that are let in: SHA-256 of the key in hexadecimal → its name."""

    async def stats(self) -> DoorStats: ...
