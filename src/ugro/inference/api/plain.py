"""Plain routes: a text in, a text, labels or a vector out; and ``/predict`` for a model of the user's own."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, Response

from ugro.inference.api.bodies import ClassifyBody, EmbedBody, GenerateBody, PredictBody
from ugro.inference.api.replies import Reply, unless_gone, whole
from ugro.inference.generation.sampling import Sampling
from ugro.inference.predictors import decoded_image
from ugro.inference.refusals import bad, model_failed
from ugro.inference.service import PREDICT, Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["plain"])
    metrics = service.metrics

    @routes.post("/generate", summary="How a text goes on; the likeliest words unless a temperature is given")
    async def generate(body: GenerateBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        generator = service.generator()
        prompt = await asyncio.to_thread(generator.prompts.text, body.text)
        wish = generator.wish(prompt, Sampling(body.temperature, seed=body.seed), body.max_tokens)
        answer = generator.ask([wish], 1, body.stop)
        try:
            reply = Reply(False, service.options.name, len(prompt))
            found = await unless_gone(request, whole(reply, answer, 1), metrics)
        finally:
            answer.close()
        choice = found["choices"][0]
        return {"text": choice["text"], "finish_reason": choice["finish_reason"], "tokens": reply.generated}

    @routes.post("/classify", summary="Labels with probabilities, of texts or of images in base64")
    async def classify(body: ClassifyBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        batcher = service.batcher("classify")
        items = await asyncio.to_thread(_items, service, body)
        found = await unless_gone(request, batcher.submit(items), metrics)
        return {"results": [_labels(row[: body.top]) for row in found]}

    @routes.post("/embed", summary="Vectors of texts")
    async def embed(body: EmbedBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        found = await unless_gone(request, service.batcher("embed").submit(body.texts), metrics)
        return {"vectors": [vector for vector, _ in found]}

    @routes.post("/predict", summary="What the model of --factory makes of the inputs")
    async def predict(body: PredictBody, request: Request) -> Response:
        found = await unless_gone(request, service.batcher(PREDICT).submit(body.inputs), metrics)
        try:
            return JSONResponse({"outputs": jsonable_encoder(found)})
        except (ValueError, TypeError, RecursionError) as error:
            raise model_failed(f"its result cannot be written as JSON: {error}") from error

    return routes


def _items(service: Service, body: ClassifyBody) -> list[Any]:
    wanted, other = ("images", "texts") if service.is_for_images else ("texts", "images")
    items = body.images if service.is_for_images else body.texts
    if items is None or getattr(body, other) is not None:
        raise bad(f"this model classifies {wanted}: send {wanted}, and no {other}", wanted)
    return [decoded_image(one, at) for at, one in enumerate(items)] if service.is_for_images else items


def _labels(row: list[tuple[str, float]]) -> dict[str, Any]:
    scores = [{"label": label, "score": score} for label, score in row]
    return {"label": row[0][0], "score": row[0][1], "scores": scores}
