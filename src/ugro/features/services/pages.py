"""``/services``: models behind an API, and one of them with its replicas."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ugro.web.site import Site


def add_pages(app: FastAPI, site: Site) -> None:
    @app.get("/services")
    async def services(request: Request) -> Response:
        found = await site.agent.services.listed(everything=True)
        found.sort(key=lambda one: one.ended_at is not None)  # the newest first within each
        return await site.render(request, "services.html", cli="ugro serve ls", services=found)

    @app.get("/services/{word}")
    async def service(request: Request, word: str) -> Response:
        found = await site.agent.services.report(word)
        return await site.render(
            request,
            "service.html",
            cli=f"ugro serve status {found.name}",
            service=found,
            has_tokens=any(one.figures.generated_tokens is not None for one in found.replicas),
        )
