"""How the next token of a text is chosen: its client's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0: always the likeliest
    top_p: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """A division by less would leave the range of floating point numbers."""
        return self.temperature < 1e-4

    @property
    def is_plain(self) -> bool:
        return not (self.frequency_penalty or self.presence_penalty or self.logit_bias)
