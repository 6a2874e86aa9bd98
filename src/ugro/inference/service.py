"""The model behind the API: being loaded, able to answer, draining, or broken."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from ugro.core.errors import UgroError
from ugro.inference.batcher import Batcher
from ugro.inference.cores import settle_threads
from ugro.inference.folder import GENERATE
from ugro.inference.loading import Loaded, load
from ugro.inference.metrics import Metrics
from ugro.inference.options import Options
from ugro.inference.predictors import Predictor, made_by, predictor_of, sample_items
from ugro.inference.refusals import Refused, not_ready
from ugro.inference.threads import in_thread

if TYPE_CHECKING:
    from ugro.inference.generation.generator import Generator

log = logging.getLogger(__name__)
PREDICT = "predict"
_ROUTES = {
    GENERATE: "/v1/chat/completions, /v1/completions and /generate",
    "classify": "/classify",
    "embed": "/v1/embeddings and /embed",
    PREDICT: "/predict",
}


class Stage(StrEnum):
    LOADING = "loading"
    READY = "ok"
    DRAINING = "draining"
    FAILED = "failed"


class Service:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.metrics = Metrics()
        self.created = int(time.time())
        self.stage = Stage.LOADING
        self.reason = ""
        self.task: str | None = None
        self.is_for_images = False
        self.broke = asyncio.Event()  # the model cannot answer any more
        self._began = time.monotonic()
        self._generator: Generator | None = None
        self._batcher: Batcher | None = None
        self.metrics.is_ready = lambda: self.stage is Stage.READY

    async def run(self) -> None:
        """Loads the model, then keeps its batches going, until cancelled. Raises UgroError if it cannot be loaded."""
        if self.options.factory is not None:
            predictor = await in_thread(made_by, self.options.factory, self.options.model)
            await self._serve_batches(PREDICT, predictor)
            return
        loaded = await in_thread(load, self.options)
        self.is_for_images = loaded.is_for_images
        if loaded.task == GENERATE:
            await self._serve_generator(loaded)
        else:
            await self._serve_batches(loaded.task, predictor_of(loaded), loaded)

    def drain(self) -> None:
        self.stage, self.reason = Stage.DRAINING, "the server is stopping"

    def health(self) -> tuple[bool, dict[str, str | None]]:
        """Whether it can answer, and what a person wants to know."""
        seconds = f"the model has been loading for {time.monotonic() - self._began:.0f} s"
        reason = seconds if self.stage is Stage.LOADING else self.reason
        found = {"status": str(self.stage), "model": self.options.name, "task": self.task}
        return self.stage is Stage.READY, {**found, **({"reason": reason} if reason else {})}

    def check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted != self.options.name:
            text = f"the model {wanted!r} is not served here; this is {self.options.name!r}"
            raise Refused(404, text, param="model", code="model_not_found")

    def generator(self) -> Generator:
        self._check(GENERATE)
        assert self._generator is not None
        return self._generator

    def batcher(self, task: str) -> Batcher:
        self._check(task)
        assert self._batcher is not None
        return self._batcher

    def close(self) -> None:
        if self._generator is not None:
            self._generator.close()

    def _check(self, task: str) -> None:
        if self.stage in (Stage.LOADING, Stage.FAILED):
            raise not_ready(self.health()[1].get("reason") or str(self.stage))
        if task != self.task:
            served = _ROUTES[self.task or PREDICT]
            raise Refused(404, f"this model does not {task}; it is served at {served}", code="wrong_task")

    async def _serve_generator(self, loaded: Loaded) -> None:
        generator = await in_thread(self._generator_of, loaded)
        generator.start(self._failed)
        try:
            await generator.try_out()
        except Refused as error:
            raise UgroError(error.message) from error
        self._generator = generator
        self.metrics.waiting, self.metrics.running = generator.waiting, generator.running
        prompts = generator.prompts
        if not prompts.has_template:
            self.reason = "the tokenizer has no chat template: messages are joined as 'role: content' lines"
        log.info("context of %d tokens%s", prompts.context, f"; {self.reason}" if self.reason else "")
        self._ready(GENERATE)

    def _generator_of(self, loaded: Loaded) -> Generator:
        # Not before the server listens: torch takes seconds to import.
        from ugro.inference.generation.generator import Generator

        return Generator(loaded.model, loaded.processor, self.options.limits, self.metrics)

    async def _serve_batches(self, task: str, predictor: Predictor, loaded: Loaded | None = None) -> None:
        batcher = self._batcher = Batcher(predictor, self.options.limits, self.metrics)
        if loaded is not None:
            samples = sample_items(loaded, min(4, self.options.limits.max_batch))
            await batcher.worker.call(settle_threads, lambda: predictor.predict(samples), loaded.model.device)
        self.metrics.waiting, self.metrics.running = batcher.waiting, batcher.running
        self._ready(task)
        await batcher.run()

    def _ready(self, task: str) -> None:
        self.task = task
        if self.stage is Stage.LOADING:
            self.stage = Stage.READY
        log.info("%s is ready after %.1f s: %s", self.options.name, time.monotonic() - self._began, _ROUTES[task])

    def _failed(self, reason: str) -> None:
        self.stage, self.reason = Stage.FAILED, f"the model failed: {reason}"
        self.broke.set()
