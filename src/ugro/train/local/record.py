"""The records of a round: what each rank did in it, and a profile in the words of a synchronous step.

A round has many global batches. Its profile is that of one of them on average, so that speeds, shares and losses can be
compared with those of other trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ugro.policy.balance.split import in_proportion
from ugro.policy.local.rounds import RoundPlan
from ugro.policy.local.staleness import Verdict
from ugro.train.local.exchange import Flight
from ugro.train.local.meeting import Reports
from ugro.train.local.report import Report
from ugro.train.sampler import Order, Progress


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    number: int
    reports: Reports
    plan: RoundPlan
    verdict: Verdict
    rejected: int  # samples so far
    flight: Flight | None

    @property
    def filled(self) -> list[Report]:
        return [Report() if report is None else report for report in self.reports]


class Recorder:
    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put

    def record(self, numbers: RoundNumbers, progress: Progress, order: Order | None) -> None:
        self._put(_round(numbers, progress))
        if order is not None and any(report.used for report in numbers.filled):
            self._put(_profile(numbers.filled, progress, order.global_batch))


def _round(numbers: RoundNumbers, progress: Progress) -> dict[str, Any]:
    reports, flight = numbers.filled, numbers.flight
    return {
        "kind": "round",
        "round": numbers.number,
        "step": progress.step,
        "epoch": progress.epoch,
        "steps": [report.steps for report in reports],
        "samples": [report.used for report in reports],
        "own_s": [round(report.own_s, 6) for report in reports],
        "planned_s": numbers.plan.seconds,
        "reason": numbers.plan.reason,
        "exchange_bytes": 0 if flight is None else flight.bytes,
        "full_precision": 0 if flight is None else len(flight.format.exact),
        # Of the exchange before this round: its whole duration, and the part that a rank waited for.
        "exchange_s": round(max(report.exchange_s for report in reports), 6),
        "exposed_s": [round(report.exposed_s, 6) for report in reports],
        "absent": [rank for rank, report in enumerate(numbers.reports) if report is None],
        "late": list(numbers.verdict.late),
        "rejected": list(numbers.verdict.rejected),
        "rejected_samples": numbers.rejected,
    }


def _profile(reports: list[Report], progress: Progress, global_batch: int) -> dict[str, Any]:
    samples = sum(report.used for report in reports)
    batches = samples / global_batch
    slowest_s = max(report.own_s for report in reports)
    communication_s = max(report.exposed_s for report in reports)
    own = [report.own_s for report in reports]

    def each(name: str) -> list[float]:
        return [round(getattr(report, name) / batches, 6) for report in reports]

    return {
        "kind": "profile",
        "step": max(0, progress.step - 1),
        "epoch": progress.epoch,
        "samples": global_batch,
        "loss": _mean_loss(reports, samples),
        "step_s": round((slowest_s + communication_s) / batches, 6),
        "imbalance": round(slowest_s * len(own) / max(1e-12, sum(own)), 6),
        "shares": list(in_proportion(global_batch, [float(report.used) for report in reports])),
        "own_s": each("own_s"),
        "data_s": each("data_s"),
        "forward_s": each("forward_s"),
        "backward_s": each("backward_s"),
        "waiting_s": [round((slowest_s - one) / batches, 6) for one in own],
        "communication_s": each("exposed_s"),
        "optimizer_s": each("optimizer_s"),
    }


def _mean_loss(reports: list[Report], samples: int) -> float:
    known = [report for report in reports if report.used]
    return math.fsum(report.loss * report.used for report in known) / samples
