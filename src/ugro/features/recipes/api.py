"""The API's route for launches without a script."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ugro.features.recipes.service import RecipeRequest, RecipeService
from ugro.kernel.operations.responses import json_response


def add_recipe_routes(app: FastAPI, recipes: RecipeService) -> None:
    @app.post("/v1/recipes/launch")
    async def prepare(body: RecipeRequest) -> Response:
        """The fields of an ordinary job, which the client submits, and what to say before. It submits nothing."""
        return json_response({"launch": await recipes.prepare(body)})
