"""Routes that put nodes to sleep and wake them."""

from __future__ import annotations

from fastapi import FastAPI

from ugro.features.power.model import Act
from ugro.features.power.service import PowerService


def add_power_routes(app: FastAPI, power: PowerService) -> None:
    @app.post("/v1/nodes/{name:path}/sleep", status_code=204)
    async def sleep(name: str) -> None:
        await power.request(name, Act.SUSPEND)

    @app.post("/v1/nodes/{name:path}/wake", status_code=204)
    async def wake(name: str) -> None:
        await power.request(name, Act.RESUME)
