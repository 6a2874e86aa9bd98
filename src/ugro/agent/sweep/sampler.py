"""The next point of a sweep. A grid and a random search need nothing else; Optuna decides for the other methods."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ugro.agent.sweep.optuna_study import ask
from ugro.core.sweep import Settings, Trial, TrialState
from ugro.policy.sweep.space import grid_settings, grid_size, place_of, random_place, settings
from ugro.policy.sweep.spec import SweepSpec

_TRIES = 20  # for a point that is new
_MOST_LISTED = 100_000  # points of a small space, among which a new one is searched

Asked = tuple[tuple[str, float], ...]


class UsedUp(Exception):
    """Every point of the space was tried."""


@dataclass(frozen=True, slots=True)
class Chosen:
    settings: Settings
    asked: Asked = ()  # as the sampler sees it
    memory: str = ""  # what the sampler wants to find again


class Chooser:
    """Chooses for one sweep; remembers how far its grid is used, so that a large one costs no more per trial."""

    def __init__(self, sweep: int, spec: SweepSpec, trials: Sequence[Trial]) -> None:
        self._sweep = sweep
        self._spec = spec
        self._tried = {trial.settings for trial in trials if trial.state is not TrialState.STOPPED}
        self._cursor = 0

    def note(self, trial: Trial) -> None:
        if trial.state is TrialState.STOPPED:
            self._tried.discard(trial.settings)
            self._cursor = 0
        else:
            self._tried.add(trial.settings)

    def choose(self, trials: Sequence[Trial], number: int) -> Chosen:
        """Raises UsedUp. The same trials and the same number give the same point."""
        space = self._spec.parameters
        if self._spec.method == "grid":
            return Chosen(self._next_of_grid())
        if self._spec.method == "study":  # its script chooses; this is one more worker
            return Chosen((("worker", str(number)),))
        memory = ""
        if self._spec.method != "random":
            proposal = ask(self._spec, trials, (seed_of(self._sweep, number), seed_of(self._sweep, 0)))
            found = settings(space, proposal.place)
            if found not in self._tried:
                return Chosen(found, tuple(proposal.place.items()), proposal.notes)
            memory = proposal.notes_without_point
        return self._any_new(Random(seed_of(self._sweep, number)), memory)

    def _next_of_grid(self) -> Settings:
        size = grid_size(self._spec.parameters) or 0
        for number in range(self._cursor, size):
            self._cursor = number
            if (found := grid_settings(self._spec.parameters, number)) not in self._tried:
                return found
        raise UsedUp

    def _any_new(self, chance: Random, memory: str) -> Chosen:
        space = self._spec.parameters
        for _ in range(_TRIES):
            place = random_place(space, chance)
            if (found := settings(space, place)) not in self._tried:
                return Chosen(found, tuple(place.items()), memory)
        size = grid_size(space)
        if size is None or size > _MOST_LISTED:  # so few are left that they are hard to find, or rounding hides them
            raise UsedUp
        left = [found for number in range(size) if (found := grid_settings(space, number)) not in self._tried]
        if not left:
            raise UsedUp
        found = chance.choice(left)
        return Chosen(found, tuple((place_of(space, found) or {}).items()), memory)


def seed_of(sweep: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{sweep}/{number}".encode()).digest()[:4])
