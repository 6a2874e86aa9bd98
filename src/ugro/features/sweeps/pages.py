"""``/sweeps``: searches for the best settings, and one of them with its charts and its trials."""

from __future__ import annotations

import csv
import io

from fastapi import FastAPI, Request, Response

from ugro.features.sweeps.model import SweepReport, Trial
from ugro.features.sweeps.rules.page import document, rows, shown_value
from ugro.kernel.operations.app import http_status
from ugro.kernel.operations.responses import json_response
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed
from ugro.web.pages.outputs import attachment
from ugro.web.site import Site

_LISTED = 100
_COMPARED = 20  # the best trials, whose curves one page can show
_MOST_ROWS = 1000


def add_pages(app: FastAPI, site: Site) -> None:
    @app.get("/sweeps")
    async def sweeps(request: Request) -> Response:
        found = await site.agent.sweeps.newest(_LISTED)
        return await site.render(request, "sweeps.html", cli="ugro sweep ls", sweeps=found)

    @app.get("/sweeps/{word}")
    async def sweep(request: Request, word: str) -> Response:
        found = await site.agent.sweeps.report(word)
        header, *shown = rows(found)
        charts, best = document(found, has_jobs=True), found.best_trial
        return await site.render(
            request,
            "sweep.html",
            cli=f"ugro sweep status {found.name}",
            sweep=found,
            header=header,
            rows=shown[-_MOST_ROWS:],
            left_out=max(0, len(shown) - _MOST_ROWS),
            document=charts,
            best_values=_varying(found, best) if best else {},
            compared=_best(found),
        )

    _add_documents(app, site)


def _add_documents(app: FastAPI, site: Site) -> None:
    @app.get("/sweeps/{word}/importance")
    async def importance(word: str) -> Response:
        """Apart from the page, which need not wait for it."""
        try:
            return json_response({"importance": await site.agent.sweeps.importance(word)})
        except NotAllowed as error:  # too few trials, or no Optuna: it says what to do
            return Response(dumps({"error": error.to_wire()}), http_status(error), media_type="application/json")

    @app.get("/sweeps/{word}/trials.csv")
    async def trials(word: str) -> Response:
        found = await site.agent.sweeps.report(word)
        text = io.StringIO()
        csv.writer(text).writerows(rows(found))
        name = {"content-disposition": attachment(f"{found.name}.csv")}
        return Response(text.getvalue(), media_type="text/csv", headers=name)


def _varying(found: SweepReport, trial: Trial) -> dict[str, str]:
    """A trial of a study need not have all parameters."""
    values = trial.values
    return {name: shown_value(values[name]) for name in found.parameters if name in values}


def _best(found: SweepReport) -> list[int]:
    """The jobs of the best trials."""
    sign = -1 if found.goal == "maximize" else 1
    measured = [trial for trial in found.trials if trial.best is not None]
    measured.sort(key=lambda trial: sign * (trial.best or 0.0))
    return [trial.job for trial in measured[:_COMPARED] if trial.job is not None]
