"""``client.sweeps``: searches for the best settings of a training."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ugro.client.http import AgentGone, lines
from ugro.client.jobs import Ask, body_of, new_key, trying_again
from ugro.core.errors import ConfigError, NotAllowed
from ugro.core.job import Job
from ugro.core.support.codec import decode
from ugro.core.sweep import Budget, Importance, SweepReport

_LARGEST_FILE = 1 << 20


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


class Sweeps:
    """Created by ``Client``."""

    def __init__(self, ask: Ask, stream: Ask) -> None:
        self._ask_once = ask
        self._stream = stream

    def start(
        self,
        file: Path | None = None,
        wish: SweepWish | None = None,
        *,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> SweepReport:
        """Starts a sweep from a file, from ranges, or both. The same key is the same sweep."""
        wish = wish or SweepWish()
        submit = {**body_of(None, wish.fields, key), "force": wish.force}
        body: dict[str, Any] = {"submit": submit, "budget": asdict(wish.budget)}
        named = {"method": wish.method, "metric": wish.metric, "goal": wish.goal}
        body |= {**named, "target": wish.target, "prune": wish.prune}
        if file is not None:
            body |= {"text": _text(file), "file": str(file)}
        answer = self._ask("POST", "/v1/sweeps", body)
        if "needs" in answer:
            known = os.environ if env is None else env
            submit["env"] = {name: known[name] for name in answer["needs"] if name in known}
            answer = self._ask("POST", "/v1/sweeps", body)
        return decode(SweepReport, answer["sweep"])

    def newest(self, limit: int = 50) -> list[SweepReport]:
        """The newest first."""
        return [decode(SweepReport, one) for one in self._ask("GET", f"/v1/sweeps?limit={limit}")["sweeps"]]

    def get(self, sweep: str | int, *, history: bool = False) -> SweepReport:
        """By name (the newest of that name), by number, or ``last``; with the values of its trials if asked for."""
        return decode(SweepReport, self._ask("GET", f"{_path(sweep)}?history={str(history).lower()}")["sweep"])

    def watch(self, sweep: str | int) -> Iterator[SweepReport]:
        """Yields the sweep now and after changes, until it is over; survives the end of the agent."""
        for again in trying_again():
            try:
                for document in lines(self._stream("GET", f"{_path(sweep)}/watch", timeout_s=None)):
                    found = decode(SweepReport, document)
                    sweep = found.id
                    again()
                    yield found
                    if found.is_over:
                        return
            except AgentGone:
                continue

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Asks again if the agent ends meanwhile: all these requests can be repeated safely."""
        for _ in trying_again():
            with contextlib.suppress(AgentGone):
                return self._ask_once(method, path, body)
        return None

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
            sweep, trials = found.id, max(len(found.trials), found.budget.trials or 0) + more_trials
        body = {"trials": trials, "parallel": parallel}
        return decode(SweepReport, self._ask("POST", f"{_path(sweep)}/resume", body)["sweep"])

    def importance(self, sweep: str | int) -> list[Importance]:
        """How much of the differences between trials each parameter explains, the most first."""
        return [decode(Importance, one) for one in self._ask("GET", f"{_path(sweep)}/importance")["importance"]]

    def html(self, sweep: str | int) -> tuple[SweepReport, str]:
        """The sweep, and as one HTML file that needs no server; without importances if they cannot be computed."""
        from ugro.policy.sweep.page import page

        found = self.get(sweep)
        importances: list[Importance] = []
        with contextlib.suppress(NotAllowed):  # too few trials, or no Optuna
            importances = self.importance(found.id)
        return found, page(found, importances)

    def launch_best(self, sweep: str | int, *, key: str | None = None) -> Job:
        """Submits the settings of the best trial as a job."""
        body = {"user": getpass.getuser(), "key": key or new_key()}
        return decode(Job, self._ask("POST", f"{_path(sweep)}/launch", body)["job"])


def _text(file: Path) -> str:
    try:
        content = file.read_bytes()
        if len(content) > _LARGEST_FILE:
            raise ConfigError(f"{file}: too large for a sweep file")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}", hint="name a sweep file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text in UTF-8", hint="name a sweep file") from None


def _path(sweep: str | int) -> str:
    return f"/v1/sweeps/{quote(str(sweep), safe='')}"
