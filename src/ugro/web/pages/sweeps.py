"""``/sweeps``: searches for the best settings, and one of them with its history and its trials."""

from __future__ import annotations

import csv
import io

from fastapi import FastAPI, Request, Response
from markupsafe import Markup

from ugro.core.sweep import SweepReport
from ugro.policy.sweep.page import coordinates, history, rows
from ugro.web.site import Site

_LISTED = 100
_COMPARED = 20  # the best trials, whose curves one page can show
_MOST_ROWS = 1000


def add_sweep_pages(app: FastAPI, site: Site) -> None:
    @app.get("/sweeps")
    async def sweeps(request: Request) -> Response:
        found = await site.agent.sweeps.newest(_LISTED)
        return await site.render(request, "sweeps.html", cli="ugro sweep ls", sweeps=found)

    @app.get("/sweeps/{word}")
    async def sweep(request: Request, word: str) -> Response:
        found = await site.agent.sweeps.report(word)
        header, *shown = rows(found)
        return await site.render(
            request,
            "sweep.html",
            cli=f"ugro sweep status {found.name}",
            sweep=found,
            header=header,
            rows=shown[-_MOST_ROWS:],
            left_out=max(0, len(shown) - _MOST_ROWS),
            # Made of numbers and of escaped texts.
            history=Markup(history(found)),
            coordinates=Markup(coordinates(found)),
            compared=_best(found),
        )

    @app.get("/sweeps/{word}/trials.csv")
    async def trials(word: str) -> Response:
        found = await site.agent.sweeps.report(word)
        text = io.StringIO()
        csv.writer(text).writerows(rows(found))
        name = {"content-disposition": f'attachment; filename="{found.name}.csv"'}
        return Response(text.getvalue(), media_type="text/csv", headers=name)


def _best(found: SweepReport) -> list[int]:
    """The jobs of the best trials."""
    sign = -1 if found.goal == "maximize" else 1
    measured = [trial for trial in found.trials if trial.best is not None]
    measured.sort(key=lambda trial: sign * (trial.best or 0.0))
    return [trial.job for trial in measured[:_COMPARED] if trial.job is not None]
