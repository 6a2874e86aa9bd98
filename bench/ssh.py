"""Links and health checks against other ways to run a small command on many nodes by SSH."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.rig.sshd import SshdFarm

from bench.bars import Bar
from bench.peers_ssh import Measurement, measure_cold, measure_warm
from bench.ugro_ssh import measure_health, measure_link


def measure(nodes: Sequence[int], *, warm_repeats: int, cold_repeats: int) -> list[Bar]:
    counts = sorted(set(nodes))
    with (
        tempfile.TemporaryDirectory(prefix="bench") as folder,
        SshdFarm(Path(folder), counts[-1], wrapped=False) as farm,
    ):
        results = measure_link(farm, 1000)
        for count in counts:
            results += measure_health(farm, count, warm_repeats=warm_repeats, cold_repeats=cold_repeats)
            results += measure_warm(farm, count, warm_repeats)
            results += measure_cold(farm, count, cold_repeats)
    _print_tables(results, counts)
    return _bars(results, counts[-1])


def _bars(results: Sequence[Measurement], most: int) -> list[Bar]:
    def ours(name: str, nodes: int, kind: str) -> Measurement:
        return next(m for m in results if (m.name, m.nodes, m.kind) == (name, nodes, kind))

    def peers(nodes: int, kind: str) -> list[Measurement]:
        return [m for m in results if (m.nodes, m.kind) == (nodes, kind) and not m.name.startswith("ugro")]

    bars = []
    if warm_one := peers(1, "warm"):
        quickest = min(warm_one, key=lambda m: m.median_s)
        bars.append(_bar("a warm call over the link", ours("ugro call", 1, "warm"), quickest, 1 / 20))
        bars.append(_bar("a full warm probe", ours("ugro full probe", 1, "warm"), quickest, 1 / 4))
    quickest = min(peers(most, "warm"), key=lambda m: m.median_s)
    bars.append(_bar(f"a warm health check of {most} nodes", ours("ugro", most, "warm"), quickest, 1 / 5))
    cold = {m.name: m for m in peers(most, "cold")}
    for name, share in (("pdsh", 1.0), ("ssh, one after the other", 1 / 8)):
        if peer := next((m for key, m in cold.items() if key.startswith(name)), None):
            bars.append(_bar(f"a cold health check of {most} nodes", ours("ugro", most, "cold"), peer, share))
    return bars


def _bar(claim: str, ours: Measurement, peer: Measurement, share: float) -> Bar:
    return Bar(claim, ours.median_s, peer.median_s, peer.name, share)


def _print_tables(results: Sequence[Measurement], counts: Sequence[int]) -> None:
    for kind in ("warm", "cold"):
        chosen = [m for m in results if m.kind == kind]
        print(f"{kind}, ms, fastest – median" + "".join(f"{nodes:>20}" for nodes in counts))
        for name in dict.fromkeys(m.name for m in chosen):
            cells = {m.nodes: f"{m.min_s * 1e3:.2f} – {m.median_s * 1e3:.2f}" for m in chosen if m.name == name}
            print(f"{name:<27}" + "".join(f"{cells.get(nodes, ''):>20}" for nodes in counts))
        print()
