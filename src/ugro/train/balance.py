"""Turns the measurements of all ranks into plans, and records plans, profiles and advice."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UgroError, Unsatisfiable
from ugro.train.reporting import Metrics
from ugro.train.rules.balance import Balancer, Observation, Plan
from ugro.train.rules.shares import Advice, advise
from ugro.train.samples import Schedule
from ugro.train.telemetry import Word

_ADVICE_EVERY = 64  # steps
_FIRST_ADVICE = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do next, in the same step."""

    stops: bool
    repeats: bool
    trace_steps: int = 0
    regroups: bool = False


class Balance:
    def __init__(self, names: Sequence[str], metrics: Metrics | None) -> None:
        """``metrics`` is given on the main rank only."""
        self.names = tuple(names)
        self.balancer: Balancer | None = None
        self.schedule: Schedule | None = None
        self.holds_from = 0  # the first step of the current plan
        self._metrics = metrics
        self._last: list[Word] = []
        self._begun_at = 0  # the step from which on these ranks train

    def begin(self, balancer: Balancer, schedule: Schedule) -> None:
        self.balancer, self.schedule = balancer, schedule
        self._record_plan(balancer.plan, self._begun_at, self._begun_at)

    def regroup(self, names: Sequence[str], metrics: Metrics | None, step: int) -> None:
        """Other ranks from here on; ``begin`` follows, if there is a batch to share."""
        self._last = []
        self.names, self._metrics, self._begun_at = tuple(names), metrics, step

    def digest(self, words: list[Word], step: int, epoch: int) -> Verdict:
        """``step`` was just synchronised."""
        is_short_of_memory = any(word.is_out_of_memory for word in words)
        verdict = Verdict(
            any(word.stops for word in words),
            is_short_of_memory,
            words[0].trace_steps,
            any(word.regroups for word in words),
        )
        self._replan(words, step)
        if not verdict.repeats:
            self._record_step(words, epoch)
            self._last = words
        return verdict

    def advice(self) -> Advice | None:
        balancer = self.balancer
        if balancer is None or not balancer.is_informed:
            return None
        try:
            return advise(balancer.costs(), balancer.batch.total, balancer.communication_s, self.names)
        except Unsatisfiable:
            return None

    def close(self) -> None:
        """Records the last step too, as far as it is known."""
        if self._last:
            self._record_step([Word() for _ in self._last], 0)
            self._last = []

    # --- plans --------------------------------------------------------------------------------------------------

    def _replan(self, words: list[Word], step: int) -> None:
        balancer, schedule = self.balancer, self.schedule
        if balancer is None or schedule is None or len(words) != balancer.batch.ranks:
            return
        caps, estimated = [word.cap for word in words], [word.is_cap_estimated for word in words]
        plan = balancer.limit(caps, [word.part for word in words], estimated)
        observation = self._observation(words)
        if plan is None and observation is not None:
            plan = balancer.observe(observation)
        if plan is not None:
            self.holds_from = schedule.change(plan, step)
            self._record_plan(plan, step, self.holds_from)

    def _observation(self, words: list[Word]) -> Observation | None:
        assert self.balancer is not None
        if any(word.step < 0 or not word.is_clean for word in words):
            return None
        shares = tuple(word.share for word in words)
        if sum(shares) > self.balancer.batch.total:
            # Continuing would train on shares other than the recorded ones.
            raise UgroError(
                f"the ranks disagree about their shares: {list(shares)}",
                hint="check that all ranks run the same script",
            )
        if min(shares) < 1:
            return None
        return Observation(
            shares,
            tuple(word.own_s for word in words),
            tuple(word.optimizer_s for word in words) if self._last else (),
            self._tail_s(words),
            tuple(word.micro_batches for word in words),
        )

    def _tail_s(self, words: list[Word]) -> float:
        """The duration of the exchange itself in the previous step: the rank that was ready last waited for nobody."""
        if not self._last:
            return 0.0
        last = max(range(len(words)), key=lambda rank: self._last[rank].own_s)
        return words[last].tail_s

    # --- records ------------------------------------------------------------------------------------------------

    def _record_plan(self, plan: Plan, step: int, holds_from: int) -> None:
        assert self.balancer is not None
        self.put(
            {
                "kind": "plan",
                "step": step,
                "holds_from": holds_from,
                "mode": str(self.balancer.mode),
                "shares": list(plan.shares),
                "micro_batches": list(plan.micro_batches),
                "caps": list(self.balancer.caps),
                "predicted_s": plan.predicted_s,
                "reason": plan.reason,
            }
        )

    def _record_step(self, words: list[Word], epoch: int) -> None:
        """Records the previous step, whose end is known only now."""
        if self._metrics is None or not self._last or self._last[0].step < 0:
            return
        slowest_s = max(word.own_s for word in self._last)
        waiting = [slowest_s - word.own_s for word in self._last]
        communication = [max(0.0, now.tail_s - wait) for now, wait in zip(words, waiting, strict=True)]
        step = self._last[0].step
        self.put(
            {
                "kind": "profile",
                "step": step,
                "epoch": epoch,
                "samples": sum(word.share for word in self._last),
                "loss": _mean_loss(self._last),
                "step_s": _rounded(slowest_s + min(communication)),
                "imbalance": _rounded(slowest_s * len(waiting) / max(1e-12, sum(word.own_s for word in self._last))),
                "shares": [word.share for word in self._last],
                "own_s": [_rounded(word.own_s) for word in self._last],
                "data_s": [_rounded(word.data_s) for word in self._last],
                "forward_s": [_rounded(word.forward_s) for word in self._last],
                "backward_s": [_rounded(word.backward_s) for word in self._last],
                "waiting_s": [_rounded(wait) for wait in waiting],
                "communication_s": [_rounded(one) for one in communication],
                "optimizer_s": [_rounded(word.optimizer_s) for word in words],
            }
        )
        if step == _FIRST_ADVICE or (step and step % _ADVICE_EVERY == 0):
            self._record_advice(step)

    def _record_advice(self, step: int) -> None:
        advice = self.advice()
        if advice is None:
            return
        self.put(
            {
                "kind": "advice",
                "step": step,
                "words": advice.words,
                "predicted_s": advice.all_ranks.seconds,
                "best_s": advice.best.seconds,
                "best_ranks": list(advice.best.ranks),
                "without_s": [None if one is None else one.seconds for one in advice.without],
            }
        )

    def put(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.put(record)


def _mean_loss(words: list[Word]) -> float:
    """The mean over the samples of all ranks."""
    samples = sum(word.share for word in words)
    if not samples:
        return math.nan
    return math.fsum(word.loss * word.share for word in words if word.share) / samples


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


# --- part -------------------------------------------------------------------------------------------------------------
# How much of an equal share this rank is to take: less while the owner of its machine uses it.
#
# The agent writes it to a file in the run's folder on the node. Each rank looks at most once per second, and sends what
# it found with its measurements, so that all ranks know it in the same step.


_LOOK_S = 1.0
_FILE = "part.json"
_MOST_BYTES = 4096


class PartOfShare:
    def __init__(self, run_folder: Path | None, run_name: str) -> None:
        """Without a folder, as outside UGRO, nobody can ask for less."""
        self._path = None if run_folder is None else run_folder / _FILE
        self._run_name = run_name
        self._next_look = 0.0
        self._part = 1.0

    def asked(self) -> float:
        now = time.monotonic()
        if self._path is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._part = self._read(self._path)
        return self._part

    def _read(self, path: Path) -> float:
        try:
            with path.open("rb") as file:
                word = json.loads(file.read(_MOST_BYTES))
            part = float(word["part"])
            if word["run"] != self._run_name:  # of an earlier run in the same folder
                return 1.0
            return part if 0 < part <= 1 else self._part
        except FileNotFoundError:
            return 1.0
        except (OSError, ValueError, KeyError, TypeError):
            return self._part
