"""``/settings``: the configuration in force and the channels; ``/about``: what this is and what it stands on."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ugro.web.site import Site


def add_settings_pages(app: FastAPI, site: Site) -> None:
    @app.get("/settings")
    async def settings(request: Request) -> Response:
        return await site.render(request, "settings.html", cli="ugro agent status")

    @app.get("/about")
    async def about(request: Request) -> Response:
        return await site.render(request, "about.html", cli="ugro --version")
