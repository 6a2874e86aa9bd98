"""What the scheduler knows about users: their quotas, their weights, and what they have used. Times as in its view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ugro.core.quota import HOUR_S, NO_QUOTAS, Quotas
from ugro.policy.quotas.fair_share import FairShare


class HourUse(NamedTuple):
    """GPU-seconds of attempts that have ended, within an hour."""

    end: float  # of the hour
    gpu_s: float


@dataclass(frozen=True, slots=True)
class Accounts:
    quotas: Quotas = NO_QUOTAS
    fair: FairShare = field(default_factory=FairShare)
    hours: Mapping[str, tuple[HourUse, ...]] = field(default_factory=dict)  # by user, of the last week
    averages: Mapping[str, float] = field(default_factory=dict)  # by user, in devices, of ended attempts

    def with_use(self, user: str, end: float, gpu_s: float) -> Accounts:
        """The same after another attempt has ended. All of its use counts as of its last hour: a cautious forecast."""
        if not self.quotas or not gpu_s:
            return self
        new = HourUse(end + HOUR_S, gpu_s)
        return replace(self, hours={**self.hours, user: (*self.hours.get(user, ()), new)})


NO_ACCOUNTS = Accounts()
