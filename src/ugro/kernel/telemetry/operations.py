"""What can be asked about metrics, and how a client learns what changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired

from typing_extensions import TypedDict

from ugro.kernel.agent.model import Event
from ugro.kernel.links.model import NodeReport
from ugro.kernel.operations.request import Between, Lines, Request
from ugro.kernel.telemetry.model import MOST_BINS, KeySummary

_MOST_JOBS = 2000
_MOST_STEP = (1 << 53) - 1
Column = Literal["steps", "times", "lows", "highs", "means", "counts", "odd"]
_Bins = Annotated[int, Between(1, MOST_BINS)]
_Count = Annotated[int, Between(0, _MOST_STEP)]
_Step = Annotated[int, Between(-_MOST_STEP, _MOST_STEP)]
_Jobs = Annotated[tuple[str, ...], Between(1, _MOST_JOBS)]


class CurveColumns(TypedDict):
    """A metric of a rank in bins of steps, as columns of equal length: those that were asked for, or all."""

    owner: str
    attempt: int
    rank: int
    key: str
    count: int
    width: int
    steps: NotRequired[list[int]]
    times: NotRequired[list[float]]
    lows: NotRequired[list[float | None]]
    highs: NotRequired[list[float | None]]
    means: NotRequired[list[float | None]]
    counts: NotRequired[list[int]]
    odd: NotRequired[list[int]]


@dataclass(frozen=True, slots=True)
class Curves:
    curves: tuple[CurveColumns, ...]


@dataclass(frozen=True, slots=True)
class GetMetrics(Request[Curves], route="GET /v1/metrics"):
    """Returns metrics of jobs in at most ``bins`` bins. ``column`` and ``digits`` make a smaller answer."""

    job: _Jobs
    key: tuple[str, ...] = ()
    attempt: _Count | None = None
    rank: _Count | None = None
    first: _Step | None = None
    last: _Step | None = None
    bins: _Bins = 300
    # A thousand curves are megabytes, and a chart of that many draws only their means.
    column: tuple[Column, ...] = ()  # none: all
    digits: Annotated[int, Between(1, 17)] | None = None


@dataclass(frozen=True, slots=True)
class MetricKeys:
    keys: tuple[KeySummary, ...]
    names: tuple[str, ...]  # those to choose from, in order
    loss: str | None  # the one to show first


@dataclass(frozen=True, slots=True)
class ListMetricKeys(Request[MetricKeys], route="GET /v1/metrics/keys"):
    """Lists the metrics that jobs have."""

    job: _Jobs


@dataclass(frozen=True, slots=True)
class GetNodeHistory(Request[Curves], route="GET /v1/nodes/{name:path}/history"):
    """Returns a node's metrics between two times, in seconds since the epoch."""

    name: str
    key: tuple[str, ...] = ()
    first: _Step | None = None  # default: a day ago
    last: _Step | None = None
    bins: _Bins = 300


class Change(TypedDict):
    """What happened, or which nodes and metrics have changed."""

    cursor: int  # the number of the last event before
    event: NotRequired[Event]
    nodes: NotRequired[list[NodeReport]]
    gone_nodes: NotRequired[list[str]]
    metrics: NotRequired[list[int]]  # jobs


@dataclass(frozen=True, slots=True)
class FollowChanges(Request[Lines[Change]], route="GET /v1/changes"):
    """Tells events after that number, or from now on, and changed reports of nodes, until the client leaves."""

    after: _Count | None = None
