"""``client.sweeps``: searches for the best settings of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.client.http import text_of
from ugro.client.jobs import Asking, body_of
from ugro.features.sweeps.model import Budget, SweepPlan, SweepReport, TrialState
from ugro.features.sweeps.operations import GetImportance, GetSweep, ResumeSweep, WatchSweep
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotAllowed

if TYPE_CHECKING:
    from ugro.client.client import Client


@dataclass(frozen=True, slots=True)
class SweepWish:
    """What to search. The fields of its jobs are named like the command line's options; ``args`` has the ranges."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None
    metric: str | None = None
    goal: str | None = None
    target: float | None = None
    prune: str | None = None
    budget: Budget = field(default_factory=Budget)
    force: bool = False  # even if its code is very large
    study: bool = False  # the script has an Optuna study of its own: its jobs are workers of that


@dataclass(frozen=True, slots=True)
class SweepText:
    """A sweep file that is not on disk."""

    text: str
    name: str


class Sweeps(Asking):
    """Created by ``Client``."""

    def start(
        self,
        file: Path | SweepText | None = None,
        wish: SweepWish | None = None,
        *,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> SweepReport:
        """Starts a sweep from a file, from ranges, or both. The same key is the same sweep."""
        return decode(SweepReport, self._asked("/v1/sweeps", file, wish, env, key)["sweep"])

    def plan(
        self,
        file: Path | SweepText | None = None,
        wish: SweepWish | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> SweepPlan:
        """What such a sweep would do; starts nothing."""
        return decode(SweepPlan, self._asked("/v1/sweeps/plan", file, wish, env, None)["plan"])

    def _asked(
        self,
        path: str,
        file: Path | SweepText | None,
        wish: SweepWish | None,
        env: Mapping[str, str] | None,
        key: str | None,
    ) -> Any:
        wish = wish or SweepWish()
        submit = {**body_of(None, wish.fields, key), "force": wish.force}
        body: dict[str, Any] = {"submit": submit, "budget": asdict(wish.budget)}
        named = {"method": wish.method, "metric": wish.metric, "goal": wish.goal}
        body |= {**named, "target": wish.target, "prune": wish.prune, "study": wish.study}
        if file is not None:
            given = SweepText(text_of(file, "a sweep file"), str(file)) if isinstance(file, Path) else file
            body |= {"text": given.text, "file": given.name}
        return self._submitted(path, body, env)

    def watch(self, sweep: str | int) -> Iterator[SweepReport]:
        """Yields the sweep now and after changes, until it is over; survives the end of the agent."""
        # By its number from then on: a newer one may get the same name.
        return self._watched(SweepReport, _watch(sweep), lambda found: _watch(found.id))


def extended(client: Client, sweep: str | int, *, more_trials: int, parallel: int | None = None) -> ResumeSweep:
    """Returns how to continue it with so many trials more than were made or allowed: a sum, which can be repeated."""
    found = client.ask(GetSweep(str(sweep))).sweep
    made = sum(trial.state is not TrialState.STOPPED for trial in found.trials)  # those are made again
    return ResumeSweep(str(found.id), max(made, found.budget.trials or 0) + more_trials, parallel)


def html(client: Client, sweep: str | int) -> tuple[SweepReport, str]:
    """Returns the sweep, and one HTML file that needs no server; without importances if they cannot be computed."""
    from ugro.features.sweeps.rules.page import Explained, page
    from ugro.web.report_assets import assets

    found = client.ask(GetSweep(str(sweep))).sweep
    try:
        explained = Explained(client.ask(GetImportance(str(found.id))).importance)
    except NotAllowed as error:  # too few trials, or no Optuna
        explained = Explained(problem=str(error))
    return found, page(found, explained, assets())


def _watch(sweep: str | int) -> str:
    return WatchSweep(str(sweep)).to_wire()[1]
