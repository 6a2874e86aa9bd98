"""Measured hardware for pages: bars of devices, a matrix of links, and a node's earlier measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from ugro.features.hardware.model import AllReduceFigures, BestFigure, LinkFigures, NodeFigures
from ugro.features.hardware.rules import Series, all_series
from ugro.kernel.links.model import by_name
from ugro.kernel.support.quantities import format_duration, format_size
from ugro.web.site import Site

MOST_NODES = 40  # in a matrix
LEVELS = 5
SHOWN_RUNS = 10


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    text: str
    ratio: float  # to the highest of its kind
    best: str = ""  # that highest value, in words


@dataclass(frozen=True, slots=True)
class NodeBars:
    figures: NodeFigures
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class LinkCell:
    text: str
    title: str
    level: int  # of speed, relative to the fastest link; 0: no figure


@dataclass(frozen=True, slots=True)
class Matrix:
    names: list[str]
    rows: list[tuple[str, list[LinkCell | None]]]  # None: a node and itself, or a pair that was not measured
    left_out: int = 0


def bars(nodes: Mapping[str, NodeFigures]) -> list[NodeBars]:
    """By node; a bar is full for the best of the cluster in that figure."""
    series = {name: list(all_series([figures])) for name, figures in nodes.items()}
    highest: dict[str, float] = {}
    for one in (one for many in series.values() for one in many):
        highest[_kind(one)] = max(one.values[0], highest.get(_kind(one), 0.0))
    return [
        NodeBars(nodes[name], tuple(_bar(one, highest[_kind(one)]) for one in series[name]))
        for name in sorted(nodes, key=by_name)
    ]


def own_bars(figures: NodeFigures, best: Sequence[BestFigure]) -> list[Bar]:
    """A bar is full for the best that was ever measured on this node."""
    known = {one.what: one.value for one in best}
    return [_bar(one, max(known.get(one.key, 0.0), one.values[0])) for one in all_series([figures])]


def matrix(members: Sequence[str], links: Sequence[LinkFigures]) -> Matrix:
    measured = {name for link in links for name in (link.source, link.target)}
    names = sorted(measured & set(members), key=by_name)
    shown, known = names[:MOST_NODES], {(link.source, link.target): link for link in links}
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=0.0)
    rows = [(one, [_cell(known.get((one, other)), fastest) for other in shown]) for one in shown]
    return Matrix(shown, rows, len(names) - len(shown))


@dataclass(frozen=True, slots=True)
class Run:
    """An earlier measurement of a node: its figures in the columns of ``columns``."""

    figures: NodeFigures
    cells: tuple[str, ...]


def runs(history: Sequence[NodeFigures]) -> tuple[list[str], list[Run]]:
    """The columns that any of them has, and the newest measurements."""
    some = history[:SHOWN_RUNS]
    by_run = [{one.what: one.shown(one.values[0]) for one in all_series([figures])} for figures in some]
    columns = list(dict.fromkeys(what for one in by_run for what in one))
    return columns, [
        Run(figures, tuple(one.get(what, "") for what in columns)) for figures, one in zip(some, by_run, strict=True)
    ]


def allreduce_text(one: AllReduceFigures) -> str:
    return f"{one.size_bytes // 10**6} MB in {format_duration(one.seconds)}, {format_size(one.bytes_per_s)}/s per rank"


def _kind(series: Series) -> str:
    """What can be compared between nodes: the number of a GPU does not matter."""
    return series.what if series.kind != "gpu" else f"GPU {series.what.split(' ', 2)[2]}"


def _bar(series: Series, highest: float) -> Bar:
    ratio = series.values[0] / highest if highest else 0.0
    return Bar(series.what, series.shown(series.values[0]), ratio, series.shown(highest))


def _cell(link: LinkFigures | None, fastest: float) -> LinkCell | None:
    if link is None:
        return None
    if link.error or link.bytes_per_s is None:
        return LinkCell("✕", link.error or "not measured", 0)
    latency = f", {format_duration(link.latency_s)} there and back" if link.latency_s is not None else ""
    jitter = f", jitter {format_duration(link.jitter_s)}" if link.jitter_s is not None else ""
    speed = f"{format_size(link.bytes_per_s)}/s"
    level = 1 + min(LEVELS - 1, int(LEVELS * link.bytes_per_s / fastest)) if fastest else 1
    return LinkCell(speed, f"{link.source} to {link.target}: {speed}{latency}{jitter}", level)


# --- hardware ---------------------------------------------------------------------------------------------------------
# ``/hardware``: what was measured of all nodes, and the links between them.


def add_pages(app: FastAPI, site: Site) -> None:
    @app.get("/hardware")
    async def page(request: Request) -> Response:
        agent = site.agent
        members = [node.spec.name for node in agent.cluster.inventory]
        latest = {name: figures for name, figures in agent.measured.latest.items() if name in members}
        store = agent.store.hardware
        return await site.render(
            request,
            "hardware.html",
            cli="ugro node bench --quick",
            nodes=bars(latest),
            missing=[name for name in members if name not in latest],
            findings=[finding for name in members for finding in agent.measured.findings(name)],
            matrix=matrix(members, await store.links(set(members))),
            allreduces=[one for one in await store.allreduces() if set(one.nodes) <= set(members)],
            allreduce_text=allreduce_text,
        )
