"""``client.sweeps``: searches for the best settings of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ugro.client.http import account, path_of, text_of
from ugro.client.jobs import Asking, body_of, new_key
from ugro.features.sweeps.model import Budget, Importance, SweepPlan, SweepReport, TrialState
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotAllowed


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

    def newest(self, limit: int = 50) -> list[SweepReport]:
        """The newest first."""
        return [decode(SweepReport, one) for one in self._ask("GET", f"/v1/sweeps?limit={limit}")["sweeps"]]

    def get(self, sweep: str | int, *, history: bool = False) -> SweepReport:
        """By name (the newest of that name), by number, or ``last``; with the values of its trials if asked for."""
        return decode(SweepReport, self._ask("GET", f"{_path(sweep)}?history={str(history).lower()}")["sweep"])

    def document(self, sweep: str | int) -> dict[str, Any]:
        """What it searches, as its file has it."""
        found: dict[str, Any] = self._ask("GET", f"{_path(sweep)}/document")["document"]
        return found

    def watch(self, sweep: str | int) -> Iterator[SweepReport]:
        """Yields the sweep now and after changes, until it is over; survives the end of the agent."""
        # By its number from then on: a newer one may get the same name.
        return self._watched(SweepReport, f"{_path(sweep)}/watch", lambda found: f"{_path(found.id)}/watch")

    def stop(self, sweep: str | int) -> SweepReport:
        """Ends its trials and starts no more."""
        return decode(SweepReport, self._ask("POST", f"{_path(sweep)}/stop", {})["sweep"])

    def resume(
        self,
        sweep: str | int,
        *,
        trials: int | None = None,
        more_trials: int | None = None,
        parallel: int | None = None,
    ) -> SweepReport:
        """Continues it. ``trials``: the most in all; ``more_trials``: beyond those that were made or allowed."""
        if more_trials is not None:  # as a sum, so that the request can be repeated
            found = self.get(sweep)
            made = sum(trial.state is not TrialState.STOPPED for trial in found.trials)  # those are made again
            sweep, trials = found.id, max(made, found.budget.trials or 0) + more_trials
        body = {"trials": trials, "parallel": parallel}
        return decode(SweepReport, self._ask("POST", f"{_path(sweep)}/resume", body)["sweep"])

    def importance(self, sweep: str | int) -> list[Importance]:
        """How much of the differences between trials each parameter explains, the most first."""
        return [decode(Importance, one) for one in self._ask("GET", f"{_path(sweep)}/importance")["importance"]]

    def html(self, sweep: str | int) -> tuple[SweepReport, str]:
        """The sweep, and as one HTML file that needs no server; without importances if they cannot be computed."""
        from ugro.features.sweeps.rules.page import Explained, page
        from ugro.web.report_assets import assets

        found = self.get(sweep)
        try:
            explained = Explained(self.importance(found.id))
        except NotAllowed as error:  # too few trials, or no Optuna
            explained = Explained(problem=str(error))
        return found, page(found, explained, assets())

    def launch_best(self, sweep: str | int, *, key: str | None = None) -> Job:
        """Submits the settings of the best trial as a job."""
        body = {"user": account(), "key": key or new_key()}
        return decode(Job, self._ask("POST", f"{_path(sweep)}/launch", body)["job"])


def _path(sweep: str | int) -> str:
    return path_of("sweeps", sweep)
