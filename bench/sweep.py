"""Sweeps: the best value after the same device time, against random search and against Ray Tune.

Ray Tune gets its ASHA and Optuna's TPE with the settings that UGRO gives it. First both are driven over simulated
devices of unequal speed, by the code that they run with otherwise, for many seeds: only what they decide counts. Then
both run for real on this machine, and their overhead counts, too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Bar
from bench.sweep_simulated import RayTune, Search, Ugro, best_after
from ugro.client.client import Client
from ugro.features.sweeps.client import SweepWish
from ugro.features.sweeps.model import Budget, SweepState
from ugro.kernel.agent.model import Event

_SEEDS = 30
_SPEEDS = (1.0, 0.5, 0.25)
_BUDGET = 400.0  # steps of the fastest device
_SLOTS = 2
_RUN_S = 60.0
_TRAINING = Path(__file__).with_name("sweep_train.py")
_ROOT = Path(__file__).resolve().parents[1]
_FILE = """\
method: bayes
metric: {name: loss}
parameters:
  lr: {distribution: log_uniform_values, min: 1.0e-5, max: 1.0}
  width: {distribution: int_uniform, min: 2, max: 64}
"""
_SLACK = 1.05  # of a loss, which is noisy


def measure(rounds: int) -> list[Bar]:
    return [*_simulated(), *_real("steps that sleep", "--sleep", rounds), *_real("a small network", "--train", rounds)]


def _simulated() -> list[Bar]:
    ways: dict[str, Callable[[int], Search]] = {
        "UGRO, random": lambda seed: Ugro(seed, method="random", prune=None),
        "UGRO, bayes": lambda seed: Ugro(seed, method="bayes", prune=None),
        "UGRO, bayes + asha": lambda seed: Ugro(seed, method="bayes", prune={"type": "asha", "max_iter": 81}),
        "UGRO, bayes + asha, steps unknown": lambda seed: Ugro(seed, method="bayes", prune={"type": "asha"}),
        "Ray Tune, OptunaSearch + ASHA": RayTune,
    }
    found = {name: [best_after(way(seed), _SPEEDS, _BUDGET) for seed in range(_SEEDS)] for name, way in ways.items()}
    print(f"{_SEEDS} seeds, devices of speed {_SPEEDS}, {_BUDGET:g} steps of the fastest")
    print(f"{'':<40}{'median loss':>12}{'quarter':>10}{'three q.':>10}{'trials':>8}")
    for name, runs in found.items():
        losses = sorted(run.loss for run in runs)
        low, middle, high = statistics.quantiles(losses, n=4)
        print(f"{name:<40}{middle:>12.4f}{low:>10.4f}{high:>10.4f}{statistics.mean(r.trials for r in runs):>8.0f}")
    print()
    medians = {name: statistics.median(run.loss for run in runs) for name, runs in found.items()}
    ours, peer = medians["UGRO, bayes + asha"], medians["Ray Tune, OptunaSearch + ASHA"]
    return [
        Bar("simulated: loss after the same device time", ours, peer, "Ray Tune's ASHA", _SLACK),
        Bar("simulated: loss after the same device time", ours, medians["UGRO, random"], "a random search", 1.0),
    ]


Steps = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class RanSweep:
    began: float  # Unix time
    trials: dict[str, Steps]  # by the names of their files, which begin with their jobs
    events: list[Event]


@dataclass(frozen=True, slots=True)
class RealRun:
    loss: float  # the best within the time
    trials: int  # that were begun
    overhead_s: float  # of a device, per trial


def _real(title: str, kind: str, rounds: int) -> list[Bar]:
    """For so long on so many slots; what was logged later does not count."""
    ours: list[RealRun] = []
    random: list[RealRun] = []
    peers: list[RealRun] = []
    for number in range(rounds):
        ours.append(_ugro(kind, number, "bayes", prunes=True))
        random.append(_ugro(kind, number, "random", prunes=False))
        peers.append(_tune(kind, number))
    print(f"{title}: {_RUN_S:g} s on {_SLOTS} slots, {rounds} rounds")
    print(f"{'':<40}{'median loss':>12}{'trials':>8}{'overhead per trial, s':>24}")
    for name, runs in (("UGRO, bayes + asha", ours), ("UGRO, random", random), ("Ray Tune", peers)):
        print(f"{name:<40}{_median(runs):>12.4f}{statistics.mean(r.trials for r in runs):>8.1f}"
              f"{statistics.median(r.overhead_s for r in runs):>24.2f}")  # fmt: skip
    print()
    return [Bar(f"{title}: loss after the same time", _median(ours), _median(peers), "Ray Tune's ASHA", _SLACK)]


def _median(runs: Sequence[RealRun]) -> float:
    return statistics.median(run.loss for run in runs)


def _ugro(kind: str, seed: int, method: str, *, prunes: bool) -> RealRun:
    ran = run_sweep([kind, "--seed", str(seed)], method, prunes=prunes)
    return _judged(ran.trials.values(), ran.began)


def run_sweep(words: Sequence[str], method: str, *, prunes: bool, seconds: float = _RUN_S) -> RanSweep:
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        logs, code = Path(folder) / "logs", Path(folder) / "code"
        logs.mkdir()
        code.mkdir()
        (code / "train.py").write_text(_TRAINING.read_text())
        file = Path(folder) / "sweep.yaml"
        file.write_text(_FILE + ("early_terminate: {type: asha, max_iter: 27}\n" if prunes else ""))
        args = [*words, "--logs", str(logs)]
        fields = {"script": "train.py", "args": args, "cpus": 1, "gpus_per_node": 0, "cwd": str(code)}
        fields["existing_environment"] = sys.prefix
        wish = SweepWish(fields, method=method, budget=Budget(parallel=_SLOTS, time_s=seconds))
        with Client(home=Path(folder) / "home") as client:
            try:
                client.health()
                began = time.time()
                sweep = client.sweeps.start(file, wish)
                for found in client.sweeps.watch(sweep.id):
                    sweep = found
                events = list(client.jobs.events())
            finally:
                client.stop_agent()
        if sweep.state is not SweepState.DONE:
            raise RuntimeError(f"the sweep is {sweep.state}: {sweep.reason}")
        return RanSweep(began, _written(logs), events)


def _tune(kind: str, seed: int) -> RealRun:
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        words = [kind, "--logs", str(logs), "--seed", str(seed)]
        settings = {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
        settings["RAY_raylet_start_wait_time_s"] = "180"  # on a busy machine
        settings["PYTHONPATH"] = str(_ROOT)  # of Ray's workers, too
        command = [sys.executable, "-m", "bench.sweep_tune", folder, str(_SLOTS), str(_RUN_S), *words]
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=10 * _RUN_S
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return _judged(_written(logs).values(), float((Path(folder) / "began").read_text()))


def _written(logs: Path) -> dict[str, Steps]:
    """What the trials wrote themselves: a line for each step, with its time and how long it took."""
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in logs.iterdir()}


def _judged(written: Iterable[Steps], began: float) -> RealRun:
    trials = [[step for step in steps if step["at"] <= began + _RUN_S] for steps in written]
    trials = [steps for steps in trials if steps]
    worked_s = sum(step["took_s"] for steps in trials for step in steps)
    loss = min(step["loss"] for steps in trials for step in steps)
    return RealRun(loss, len(trials), (_SLOTS * _RUN_S - worked_s) / len(trials))
