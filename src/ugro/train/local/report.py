"""What a rank says at the end of its round. All ranks read the same reports and draw the same conclusions."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Report:
    used: int = 0  # samples of its share that it has computed, from the first on
    mass: float = 0.0  # the same, or the sum of their weights
    steps: int = 0
    loss: float = math.nan  # the mean over these samples
    own_s: float = 0.0  # the round without waiting for others
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    exposed_s: float = 0.0  # before this round: waiting for the exchange of models
    exchange_s: float = 0.0  # the same exchange, from its beginning to its end
    largest: float = 0.0  # change of a value in this round
    exact: tuple[int, ...] = ()  # tensors whose changes lose too much in half precision
    part: float = 1.0  # of an equal share, the most that this rank is to take
    trace_steps: int = 0
    stops: bool = False
    saves: bool = False  # the script has asked for a checkpoint
    leaves: bool = False  # the script has left its loop
    is_finite: bool = True  # its change
    stops_for: str = ""  # what was not finite on this rank, if the run is to end for it

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Report:
        values = json.loads(text)
        return cls(**{**values, "exact": tuple(values["exact"])})
