"""Unequal ranks on one machine: equal shares, shares by their speeds alone, and shares that follow what is measured.

    python -m bench balance --steps 40

Each rank has a CPU quota of its own. The ideal is the sum of what the ranks do alone, without any exchange. All of it
is measured in one run, and the load of others on this machine is stated beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bars import Bar
from ugro.lab import lab as cgroups

ROOT = Path(__file__).parents[1]
SPEEDS = (0.64, 0.32, 0.16)  # of a core; together they leave some CPU time to others
_PERIOD_US = 10_000  # longer periods make steps uneven
_SHARES = "65536"  # against other programs on this machine
_LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    global_batch: int
    is_large: bool = False
    is_halved: bool = False
    is_worth_sharing: bool = True  # else the ranks exchange more than they compute


CASES = (
    Case("gpt", 48, is_halved=True),
    Case("gpt", 192, is_large=True),
    Case("conv", 96, is_halved=True),
    Case("mlp", 384, is_worth_sharing=False),
)


def measure(steps: int, rounds: int, cases: tuple[Case, ...] = CASES) -> list[Bar]:
    hierarchy = cgroups.cpu_hierarchy()
    if hierarchy is None:
        print("no CPU control groups on this machine; nothing measured\n")
        return []
    bars: list[Bar] = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            others = OtherLoad()
            result = _run(case, hierarchy, Path(folder), max(12, steps // 3 if case.is_large else steps), rounds)
            _print(case, result, others.cores())
            bars += _bars(case, result)
    return bars


# --- ranks ------------------------------------------------------------------------------------------------------


def _run(case: Case, hierarchy: cgroups.Hierarchy, folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    argv = ["bench.balance_rank", case.model, str(case.global_batch), str(steps), str(rounds)]
    return run_ranks(argv, hierarchy, folder, {"HALVED": "1" if case.is_halved else ""})


def run_ranks(
    module: list[str], hierarchy: cgroups.Hierarchy, folder: Path, variables: dict[str, str]
) -> dict[str, Any]:
    """A rank for each speed, with a CPU quota of its own; what the first one leaves as its result."""
    names = [f"rank{rank}" for rank in range(len(SPEEDS))]
    with groups(hierarchy, names) as places:
        port = free_port()
        envs = [{**environment(hierarchy.version, rank, group, port), **variables} for rank, group in enumerate(places)]
        return together([[sys.executable, "-m", *module]] * len(envs), envs, folder)


def together(commands: list[list[str]], envs: list[dict[str, str]], folder: Path) -> dict[str, Any]:
    """Starts a rank for each command; returns what the first one leaves as its result."""
    processes = []
    places = {"RESULT": f"{folder}/result", "UGRO_OUTPUT": str(folder / "output")}
    for rank, (argv, env) in enumerate(zip(commands, envs, strict=True)):
        with (folder / f"rank_{rank}.log").open("wb") as log:
            out = None if rank == 0 else log
            given = {**os.environ, **env, **places}
            processes.append(subprocess.Popen(argv, env=given, cwd=ROOT, stdout=out, stderr=log))
    try:
        codes = [process.wait(_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit("\n".join(path.read_text()[-2000:] for path in folder.glob("rank_*.log")))
    return dict(json.loads((folder / "result").read_text()))


def environment(version: int, rank: int, group: Path, port: int) -> dict[str, str]:
    quota_us = round(_PERIOD_US * SPEEDS[rank])
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(SPEEDS)), "SPEED": str(SPEEDS[rank])},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        **{"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        **{
            "QUOTA_US": str(quota_us),
            "QUOTA_FILE": str(group / _QUOTA[version][0]),
            "QUOTA_FORMAT": _QUOTA[version][1],
        },
        **{"UGRO_NODE": f"rank{rank}", "GROUP": str(group)},
    }


_QUOTA = {1: ("cpu.cfs_quota_us", "{quota}"), 2: ("cpu.max", f"{{quota}} {_PERIOD_US}")}


@contextlib.contextmanager
def groups(hierarchy: cgroups.Hierarchy, names: list[str]) -> Iterator[list[Path]]:
    group = cgroups.create(hierarchy, f"ugro-bench-{os.getpid()}", dict(zip(names, SPEEDS, strict=True)))
    if group is None:
        raise SystemExit("this user may not make control groups: nothing can be measured")
    try:
        for name, speed in zip(names, SPEEDS, strict=True):
            _shorten(hierarchy.version, group / name, round(_PERIOD_US * speed))
        if hierarchy.version == 1:
            _write(group / "cpu.shares", _SHARES)
        yield [group / name for name in names]
    finally:
        cgroups.remove(group)


def _shorten(version: int, group: Path, quota_us: int) -> None:
    if version == 1:
        _write(group / "cpu.cfs_quota_us", "-1")
        _write(group / "cpu.cfs_period_us", str(_PERIOD_US))
    file, text = _QUOTA[version]
    _write(group / file, text.format(quota=quota_us))


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class OtherLoad:
    """How many cores other programs used meanwhile."""

    def __init__(self) -> None:
        self._begun = (time.monotonic(), self._busy_s(), self._own_s())

    def cores(self) -> float:
        seconds = time.monotonic() - self._begun[0]
        return max(0.0, (self._busy_s() - self._begun[1]) - (self._own_s() - self._begun[2])) / seconds

    @staticmethod
    def _busy_s() -> float:
        user, nice, system, _, _, irq, softirq = (int(part) for part in Path("/proc/stat").read_text().split()[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _own_s() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


# --- figures ----------------------------------------------------------------------------------------------------


def _sample_s(result: dict[str, Any], mode: str) -> float:
    found: list[float] = [one["sample_s"] for one in result[mode]]
    return statistics.median(found)


def _ideal_s(result: dict[str, Any]) -> float:
    alone: list[float] = result["solo"]["share_s"]
    return 1 / sum(1 / one for one in alone)


def _print(case: Case, result: dict[str, Any], others: float) -> None:
    ideal = _ideal_s(result)
    print(f"\n{case.model}, global batch {case.global_batch}, speeds {SPEEDS}; others used {others:.1f} cores")
    print(f"{'':<34}{'samples/s':>12}{'of ideal':>10}  shares")
    rows = [("uniform", "off"), ("static, by speeds alone", "static"), ("adaptive", "adaptive")]
    for title, mode in rows:
        seconds = _sample_s(result, mode)
        print(f"{title:<34}{1 / seconds:>12.1f}{ideal / seconds:>10.0%}  {result[mode][-1]['shares']}")
    print(f"{'ideal: the sum of all alone':<34}{1 / ideal:>12.1f}{1:>10.0%}")
    print(f"{'the fastest alone':<34}{1 / result['solo']['first_s']:>12.1f}{ideal / result['solo']['first_s']:>10.0%}")
    for mode in ("static", "adaptive"):
        if found := result.get(f"halved_{mode}"):
            print(f"{mode + ', fastest rank halved':<34}{1 / found['sample_s']:>12.1f}{'':>10}  {found['shares']}")
    print(
        f"advice: {result['adaptive'][-1]['advice']}; our own CPU time: {result['overhead']:.2%} of a step\n",
        flush=True,
    )


def _bars(case: Case, result: dict[str, Any]) -> list[Bar]:
    name = f"{case.model} {case.global_batch}"
    adaptive, ideal, first = _sample_s(result, "adaptive"), _ideal_s(result), result["solo"]["first_s"]
    best = result["adaptive"][-1]["best"]
    followed = first if best == [0] else adaptive
    bars = [
        Bar(f"{name}: following the advice", followed, first, "the fastest alone", 1.05),
        Bar(f"{name}: our own CPU time", result["overhead"], 1.0, "a step", 0.01),
    ]
    if not case.is_worth_sharing:
        return bars
    bars += [
        Bar(f"{name}: adaptive", adaptive, _sample_s(result, "off"), "uniform", 0.5),
        Bar(f"{name}: adaptive", adaptive, _sample_s(result, "static"), "static", 1 / 0.95),
        Bar(f"{name}: adaptive", adaptive, ideal, "the ideal", 1 / (0.92 if case.is_large else 0.8)),
    ]
    if case.is_halved:
        bars += _halved_bars(name, result)
    return bars


def _halved_bars(name: str, result: dict[str, Any]) -> list[Bar]:
    static, adaptive = result["halved_static"], result["halved_adaptive"]
    half = len(adaptive["losses"]) // 2
    after = [number - half + 1 for number in adaptive["changes"] if number >= half]
    return [
        Bar(f"{name}, fastest halved: adaptive", adaptive["sample_s"], static["sample_s"], "static", 0.8),
        Bar(f"{name}, fastest halved: steps until re-planned", min(after, default=99), 3, "three steps", 1.0),
    ]
