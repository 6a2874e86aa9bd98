"""How much of the cluster each user has had lately: in devices, averaged with weights that halve every half-life.

A user who held 2 devices for ever has an average of 2; one who held them for a half-life and then nothing, for another
half-life, has 0.5. So what was used and what is held now are in the same unit, and can be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

WEEK_S = 7 * 86400.0
# A job that none of its user's older jobs has overtaken for this part of a half-life is not put behind for past use.
_FADES_WITHIN = 1 / 7
_STEP = 0.05  # averages that differ by less than this part of a device are equal: then the older job is first


@dataclass(frozen=True, slots=True)
class FairShare:
    half_life_s: float = WEEK_S
    weights: Mapping[str, float] = field(default_factory=dict)  # by user; others have 1

    def weight(self, user: str) -> float:
        return self.weights.get(user, 1.0)

    def decayed(self, device_s: float, age_s: float) -> float:
        """The part of an average that use of so long ago has; ``age_s``: of the middle of that time."""
        return device_s * math.exp2(-max(0.0, age_s) / self.half_life_s) * math.log(2) / self.half_life_s

    def running(self, devices: float, lasts_s: float) -> float:
        """The same of use that lasts until now."""
        return devices * -math.expm1(-math.log(2) * max(0.0, lasts_s) / self.half_life_s)

    def standing(self, average: float, waited_s: float) -> float:
        """What counts of an average for a job that has waited so long for its turn."""
        left = max(0.0, 1 - waited_s / (self.half_life_s * _FADES_WITHIN))
        return math.floor(average * left / _STEP) * _STEP
