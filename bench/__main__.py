"""``make bench``: every claim as a ratio against a peer measured in the same run. Exit code 1 if a bar is missed."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rig.sshd import SshdFarm

from bench.peers_ssh import Measurement, measure_cold, measure_warm
from bench.ugro_ssh import measure_health, measure_link


@dataclass(frozen=True, slots=True)
class Bar:
    """A claim: ours takes at most ``share`` of the peer's time."""

    claim: str
    ours: Measurement
    peer: Measurement
    share: float

    @property
    def ratio(self) -> float:
        return self.ours.median_s / self.peer.median_s

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.share


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 50, 100])
    parser.add_argument("--warm-repeats", type=int, default=30)
    parser.add_argument("--cold-repeats", type=int, default=3)
    arguments = parser.parse_args()
    counts = sorted(set(arguments.nodes))
    with tempfile.TemporaryDirectory(prefix="bench") as folder, SshdFarm(
        Path(folder), counts[-1], wrapped=False
    ) as farm:
        results = _measure(farm, counts, arguments.warm_repeats, arguments.cold_repeats)
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, all on loopback\n")
    _print_tables(results, counts)
    bars = _bars(results, counts[-1])
    for bar in bars:
        verdict = "ok    " if bar.is_met else "MISSED"
        print(f"{verdict} {bar.claim}: {bar.ratio:.3f} of {bar.peer.name} (bar {bar.share:.3f})")
    sys.exit(0 if all(bar.is_met for bar in bars) else 1)


def _measure(farm: SshdFarm, counts: Sequence[int], warm_repeats: int, cold_repeats: int) -> list[Measurement]:
    results = measure_link(farm, 1000)
    for nodes in counts:
        results += measure_health(farm, nodes, warm_repeats=warm_repeats, cold_repeats=cold_repeats)
        results += measure_warm(farm, nodes, warm_repeats)
        results += measure_cold(farm, nodes, cold_repeats)
    return results


def _bars(results: Sequence[Measurement], most: int) -> list[Bar]:
    def ours(name: str, nodes: int, kind: str) -> Measurement:
        return next(m for m in results if (m.name, m.nodes, m.kind) == (name, nodes, kind))

    def peers(nodes: int, kind: str) -> list[Measurement]:
        return [m for m in results if (m.nodes, m.kind) == (nodes, kind) and not m.name.startswith("ugro")]

    bars = []
    if warm_one := peers(1, "warm"):
        fastest = min(warm_one, key=lambda m: m.median_s)
        bars.append(Bar("a warm call over the link", ours("ugro call", 1, "warm"), fastest, 1 / 20))
        bars.append(Bar("a full warm probe", ours("ugro full probe", 1, "warm"), fastest, 1 / 4))
    fastest = min(peers(most, "warm"), key=lambda m: m.median_s)
    bars.append(Bar(f"a warm health check of {most} nodes", ours("ugro", most, "warm"), fastest, 1 / 5))
    cold = {m.name: m for m in peers(most, "cold")}
    for name, share in (("pdsh", 1.0), ("ssh, one after the other", 1 / 8)):
        if peer := next((m for key, m in cold.items() if key.startswith(name)), None):
            bars.append(Bar(f"a cold health check of {most} nodes", ours("ugro", most, "cold"), peer, share))
    return bars


def _print_tables(results: Sequence[Measurement], counts: Sequence[int]) -> None:
    for kind in ("warm", "cold"):
        chosen = [m for m in results if m.kind == kind]
        print(f"{kind}, ms, fastest – median" + "".join(f"{nodes:>20}" for nodes in counts))
        for name in dict.fromkeys(m.name for m in chosen):
            cells = {m.nodes: f"{m.min_s * 1e3:.2f} – {m.median_s * 1e3:.2f}" for m in chosen if m.name == name}
            print(f"{name:<27}" + "".join(f"{cells.get(nodes, ''):>20}" for nodes in counts))
        print()


if __name__ == "__main__":
    main()
