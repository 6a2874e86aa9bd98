"""Routes about hooks and their deliveries."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.features.hooks.model import HookName
from ugro.features.hooks.service import HookService
from ugro.kernel.operations.responses import json_response
from ugro.kernel.support.errors import NotFound

Limit = Annotated[int, Query(ge=0, le=10_000)]


def add_hook_routes(app: FastAPI, hooks: HookService) -> None:
    @app.get("/v1/hooks")
    async def listed() -> Response:
        return json_response({"hooks": await hooks.listed()})

    @app.get("/v1/hooks/deliveries")
    async def deliveries(limit: Limit = 20, hook: str | None = None) -> Response:
        found = await hooks.deliveries(limit, _name(hook) if hook is not None else None)
        return json_response({"deliveries": found})

    @app.post("/v1/hooks/{name}/test")
    async def test(name: str) -> Response:
        return json_response({"id": await hooks.test(_name(name))})


def _name(word: str) -> HookName:
    try:
        return HookName(word)
    except ValueError:
        raise NotFound(f"there is no hook {word!r:.60}", hint=f"hooks: {', '.join(HookName)}") from None
