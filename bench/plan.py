"""Predictions before a launch against what happens: three unequal nodes, three models, all seven sets of nodes.

    python -m bench plan --steps 40

Each node of the lab has a CPU quota of its own. For every model the plan is made once, then the training runs for real
on each set; its speed is the wall clock's, after the shares have settled. The sets between which the plan had to choose
run again, in turn, and their medians count: this machine's own speed changes by more than the sets differ.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from bench.balance import ROOT, SPEEDS
from bench.bars import Bar
from ugro.client.client import Client
from ugro.client.jobs import LogChoice
from ugro.client.planning import PlanWish
from ugro.core.job import JobState
from ugro.core.planning import LaunchPlan
from ugro.core.support.state_dir import StateDir
from ugro.lab.lab import Lab
from ugro.lab.shape import Wish

CASES = {"gpt": 48, "conv": 96, "mlp": 384}  # global batches
_TIMES = {"gpt": 1, "conv": 3, "mlp": 3}  # as many steps: theirs are shorter
_SPEED = re.compile(rb"speed ([0-9.]+)")
_LIMIT_S = 900.0
_CLOSE = 0.8
_MEDIAN, _WORST, _FOLLOWED = 0.10, 0.25, 1.05


@dataclass(slots=True)
class Case:
    model: str
    plan: LaunchPlan
    runs: dict[tuple[str, ...], list[float]] = field(default_factory=dict)

    @property
    def measured(self) -> dict[tuple[str, ...], float]:
        return {nodes: statistics.median(speeds) for nodes, speeds in self.runs.items()}

    @property
    def contenders(self) -> list[tuple[str, ...]]:
        """The plan's choice, and what came close to the best or above it."""
        best, chosen = max(self.measured.values()), set(self.plan.best.nodes)
        return [nodes for nodes, speed in self.measured.items() if speed > _CLOSE * best or set(nodes) == chosen]

    def error(self, nodes: tuple[str, ...]) -> float:
        predicted = next(one for one in self.plan.predictions if set(one.nodes) == set(nodes))
        return predicted.samples_per_s / self.measured[nodes] - 1

    @property
    def chosen(self) -> float:
        """What following the plan gives."""
        return next(speed for nodes, speed in self.measured.items() if set(nodes) == set(self.plan.best.nodes))


def measure(steps: int, rounds: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "code")
        code.mkdir()
        shutil.copy(Path(__file__).with_name("plan_train.py"), code / "train.py")
        lab = Lab(StateDir(Path(folder, "home")))
        lab.up(Wish(speeds=SPEEDS, takes_precedence=True))
        before = os.getcwd()
        os.chdir(code)
        try:
            with lab.client() as client:
                return _bars([_case(client, model, steps, rounds) for model in CASES])
        finally:
            os.chdir(before)
            lab.down(with_agent=True)


def _case(client: Client, model: str, steps: int, rounds: int) -> Case:
    wish = PlanWish({**_fields(model, steps)}, limit_s=30.0)
    case = Case(model, client.planning.plan(None, wish))
    nodes = sorted(node.node for node in case.plan.nodes)
    for count in range(1, len(nodes) + 1):
        for some in combinations(nodes, count):
            case.runs[some] = [_run(client, model, steps, some)]
    contenders = case.contenders
    for _ in range(rounds - 1):
        for some in contenders:
            case.runs[some].append(_run(client, model, steps, some))
    _print(case)
    return case


def _fields(model: str, steps: int) -> dict[str, object]:
    args = [model, str(CASES[model]), str(_TIMES[model] * steps)]
    variables = [f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore"]
    return {"script": "train.py", "args": args, "env": variables}


def _run(client: Client, model: str, steps: int, nodes: tuple[str, ...]) -> float:
    fields = {**_fields(model, steps), "only": list(nodes), "nodes": str(len(nodes))}
    job = client.jobs.wait(client.jobs.submit(fields=fields).id, timeout_s=_LIMIT_S)
    text = b"".join(piece.content for piece in client.jobs.logs(job.id, LogChoice(ranks=(0,))))
    found = _SPEED.search(text)
    if job.state is not JobState.SUCCEEDED or found is None:
        raise SystemExit(f"{model} on {nodes}: {job.state}: {job.reason}\n{text.decode(errors='replace')[-2000:]}")
    return float(found[1])


def _print(case: Case) -> None:
    print(f"\n{case.model}, global batch {CASES[case.model]}, speeds {SPEEDS}")
    print(f"{'':<24}{'predicted':>12}{'measured':>12}{'error':>9}{'':>8}all runs")
    for one in case.plan.predictions:
        nodes = tuple(sorted(one.nodes))
        sign = "*" if one is case.plan.best else " "
        figures = f"{one.samples_per_s:>12.1f}{case.measured[nodes]:>12.1f}{case.error(nodes):>+9.1%}"
        runs = ", ".join(f"{speed:.0f}" for speed in case.runs[nodes])
        print(f"{sign} {' + '.join(nodes):<22}{figures}  ± {one.error:<4.0%}  {runs}")
    print(flush=True)


def _bars(cases: list[Case]) -> list[Bar]:
    errors = [abs(case.error(nodes)) for case in cases for nodes in case.measured]
    bars = [
        Bar("predictions: median error", statistics.median(errors), 1.0, "the speed", _MEDIAN),
        Bar("predictions: worst error", max(errors), 1.0, "the speed", _WORST),
    ]
    for case in cases:
        best = max(case.measured.values())
        bars.append(Bar(f"{case.model}: following the plan", 1 / case.chosen, 1 / best, "the best set", _FOLLOWED))
    return bars
