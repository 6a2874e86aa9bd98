"""What a chaos run will do and when: drawn from a seed before anything happens, so that it can be done again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from tests.proof.faults import Kind, Step
from tests.rig.judge import Task

# How often each is drawn, against the others.
JOBS = {"quick": 7, "gang": 5, "long": 7, "flaky": 3, "failing": 2, "restless": 2}
_SHORTEST_S = 1.0
_FIRST_JOBS_S = 1.0
_EVERYTHING = ("rank_failed", "killed", "oom", "disk_full", "nccl_timeout", "setup_failed", "mismatch")
_RETRIES = 50
LEASE_S = 10  # of restless jobs


@dataclass(frozen=True)
class Size:
    nodes: int
    seconds: float
    job_every_s: float = 1.0
    fault_every_s: float = 1.2
    cancel_every_s: float = 4.0


def draw(seed: int, size: Size, faults: Mapping[str, Kind]) -> list[Step]:
    dice = random.Random(seed)
    weights = {name: kind.weight for name, kind in faults.items()}
    steps = [
        Step(at_s, "submit", pick=dice.random(), job=_one_of(dice, JOBS)) for at_s in _times(dice, size, "job_every_s")
    ]
    steps += [Step(at_s, "cancel", pick=dice.random()) for at_s in _times(dice, size, "cancel_every_s")]
    for at_s in _times(dice, size, "fault_every_s"):
        kind = _one_of(dice, weights)
        length_s = round(dice.uniform(_SHORTEST_S, min(faults[kind].longest_s, size.seconds / 2)), 2)
        steps.append(Step(_FIRST_JOBS_S + at_s, kind, dice.randrange(size.nodes), dice.random(), length_s))
    return sorted(steps, key=lambda step: step.at_s)


def task(step: Step, number: int, nodes: int) -> tuple[Task, dict[str, object]]:
    """What a submit hands in: the ranks' behaviour, and the job's other fields."""
    token = f"{step.job}-{number}"
    has_child, has_hidden = step.pick < 0.3, 0.3 <= step.pick < 0.5
    patient: dict[str, object] = {"retries": str(_RETRIES), "retry_on": list(_EVERYTHING)}
    leased = {**patient, "lost_after": f"{LEASE_S}s", "on_lost": "restart"}
    lines = int(step.pick * 60)
    ranks = min(nodes, 2 + int(step.pick * 2))
    made = {
        "quick": (Task(token, 1, lines, 0.0, leaves_child=has_child, hides_child=has_hidden), patient),
        "gang": (Task(token, ranks, lines, 0.05, leaves_child=has_child, makes_file=True), patient),
        "long": (
            Task(token, 1, 100, 0.05, leaves_child=has_child, hides_child=has_hidden, makes_file=True),
            {**patient, "time_limit": "1h"},
        ),
        "flaky": (Task(token, 1, lines, 0.02, codes=(3, 0), makes_file=True), patient),
        "failing": (Task(token, 1, lines, 0.0, codes=(5,)), {}),
        # Some live for longer than it takes to be started elsewhere.
        "restless": (Task(token, 1, 60 if step.pick < 0.5 else 600, 0.05, hides_child=has_hidden), leased),
    }
    return made[step.job]


def write(steps: Iterable[Step]) -> str:
    return "".join(f"{json.dumps({'step': asdict(step)})}\n" for step in steps)


def read(text: str) -> list[Step]:
    """A schedule that was written down, perhaps with some of its lines taken out; what it hit then is passed over."""
    found = [json.loads(line) for line in text.splitlines()]
    return [Step(**entry["step"]) for entry in found if "event" not in entry]


def _times(dice: random.Random, size: Size, name: str) -> list[float]:
    mean_s: float = getattr(size, name)
    found = []
    at_s = dice.expovariate(1 / mean_s)
    while at_s < size.seconds:
        found.append(round(at_s, 3))
        at_s += dice.expovariate(1 / mean_s)
    return found


def _one_of(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]
