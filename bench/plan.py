"""Predictions before a launch against what happens: three unequal nodes, three models, all seven sets of nodes.

    python -m bench plan --steps 40

Each node of the lab has a CPU quota of its own. A round makes a plan with fresh trials, then the training runs for real
on each set; its speed is the wall clock's, after the shares have settled. A set's error is the median over the rounds:
single runs of one set differ by up to 20 % on this machine, whose own speed changes from minute to minute.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bench.balance import ROOT, SPEEDS
from bench.bars import Bar
from ugro.client.client import Client
from ugro.client.job_logs import LogChoice
from ugro.features.planning.client import PlanWish
from ugro.features.planning.model import LaunchPlan, Prediction
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.state_dir import StateDir
from ugro.lab.lab import Lab
from ugro.lab.nodes import Wish

CASES = {"gpt": 48, "conv": 96, "mlp": 384}  # global batches
_TIMES = {"gpt": 1, "conv": 3, "mlp": 3}  # as many steps: theirs are shorter
_SPEED = re.compile(rb"speed ([0-9.]+)")
_LIMIT_S = 900.0
_MEDIAN, _WORST, _FOLLOWED = 0.10, 0.25, 1.05


@dataclass(frozen=True, slots=True)
class Round:
    """One plan, and what each set of nodes did after it."""

    plan: LaunchPlan
    speeds: dict[tuple[str, ...], float]

    def predicted(self, nodes: tuple[str, ...]) -> float:
        return self._of(nodes).samples_per_s

    def error(self, nodes: tuple[str, ...]) -> float:
        return self.predicted(nodes) / self.speeds[nodes] - 1

    def is_within(self, nodes: tuple[str, ...]) -> bool:
        """Whether the speed is as near to the prediction as that says."""
        return abs(self.speeds[nodes] / self.predicted(nodes) - 1) <= self._of(nodes).error

    def _of(self, nodes: tuple[str, ...]) -> Prediction:
        return next(one for one in self.plan.predictions if set(one.nodes) == set(nodes))

    @property
    def best(self) -> tuple[str, ...]:
        return tuple(sorted(self.plan.best.nodes))


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    rounds: list[Round]

    @property
    def sets(self) -> list[tuple[str, ...]]:
        return list(self.rounds[0].speeds)

    def speed(self, nodes: tuple[str, ...]) -> float:
        return statistics.median(one.speeds[nodes] for one in self.rounds)

    def error(self, nodes: tuple[str, ...]) -> float:
        return statistics.median(one.error(nodes) for one in self.rounds)

    @property
    def chosen(self) -> float:
        """What following the worst of the plans gives."""
        return min(self.speed(one.best) for one in self.rounds)


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
    case = Case(model, [_round(client, model, steps) for _ in range(rounds)])
    _print(case)
    return case


def _round(client: Client, model: str, steps: int) -> Round:
    plan = client.planning.plan(None, PlanWish({**_fields(model, steps)}, is_fresh=True, limit_s=30.0))
    nodes = sorted(node.node for node in plan.nodes)
    sets = [some for count in range(1, len(nodes) + 1) for some in combinations(nodes, count)]
    return Round(plan, {some: _run(client, model, steps, some) for some in sets})


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
    print(f"{'':<24}{'measured':>10}{'error':>9}   each round: predicted / measured; * is the plan's choice")
    for nodes in sorted(case.sets, key=case.speed, reverse=True):
        rounds = "   ".join(_pair(one, nodes) for one in case.rounds)
        print(f"{' + '.join(nodes):<24}{case.speed(nodes):>10.1f}{case.error(nodes):>+9.1%}   {rounds}")
    print(flush=True)


def _pair(one: Round, nodes: tuple[str, ...]) -> str:
    sign = "*" if nodes == one.best else " "
    return f"{one.predicted(nodes):7.0f} /{one.speeds[nodes]:5.0f}{sign}"


def _print_single(cases: list[Case]) -> None:
    """Of each plan by itself: what one user of it sees. No bar: it says as much of the machine as of the plan."""
    found = [(one, nodes) for case in cases for one in case.rounds for nodes in case.sets]
    worst = max(abs(one.error(nodes)) for one, nodes in found)
    within = sum(one.is_within(nodes) for one, nodes in found)
    print(f"single plans: worst error {worst:.0%}; {within} of {len(found)} speeds within the stated ±", flush=True)


def _bars(cases: list[Case]) -> list[Bar]:
    _print_single(cases)
    errors = [abs(case.error(nodes)) for case in cases for nodes in case.sets]
    bars = [
        Bar("predictions: median error", statistics.median(errors), 1.0, "the speed", _MEDIAN),
        Bar("predictions: worst error", max(errors), 1.0, "the speed", _WORST),
    ]
    for case in cases:
        best = max(map(case.speed, case.sets))
        bars.append(Bar(f"{case.model}: following the plan", 1 / case.chosen, 1 / best, "the best set", _FOLLOWED))
    return bars
