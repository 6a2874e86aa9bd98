"""A training in one line: how far it is, how long it still takes, its loss, its speed, the use of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.energy import JobEnergy


@dataclass(frozen=True, slots=True)
class JobProgress:
    words: str  # "step 450 of 1,000"
    left_words: str  # "1m15s left", or why that is not known
    done: float | None = None  # steps, or epochs
    total: float | None = None
    left_s: float | None = None
    source: str = ""  # what told the total
    stalled_s: float | None = None  # since the last step, if that is unusually long

    @property
    def share(self) -> float | None:
        if self.done is None or not self.total:
            return None
        return min(1.0, max(0.0, self.done / self.total))


@dataclass(frozen=True, slots=True)
class LossLine:
    name: str
    last: float | None
    best: float | None
    values: tuple[float | None, ...] = ()  # for a small curve, oldest first


@dataclass(frozen=True, slots=True)
class Speed:
    value: float
    name: str  # "samples/s", "tokens/s", "steps/s"


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Shares from 0 to 1. ``gpus`` counts the job's GPUs; without any, ``computing`` is the share of time."""

    gpus: int = 0
    use: float | None = None
    memory: float | None = None
    computing: float | None = None


@dataclass(frozen=True, slots=True)
class Headline:
    job: int
    attempt: int
    is_final: bool
    duration_s: float | None
    words: str  # all of it, for one line of a terminal
    progress: JobProgress | None = None
    loss: LossLine | None = None
    speed: Speed | None = None
    devices: DeviceUse | None = None
    energy: JobEnergy | None = None
