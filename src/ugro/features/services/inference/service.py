"""The model behind the API: being loaded, able to answer, draining, or broken."""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib
import io
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from ugro.features.services.inference.guard import Metrics, Refused, bad, model_failed, not_ready, queue_full
from ugro.features.services.inference.loading import CLASSIFY, GENERATE, Loaded, load, settle_threads
from ugro.features.services.inference.options import Limits, Options
from ugro.kernel.support.errors import UgroError

if TYPE_CHECKING:
    from ugro.features.services.inference.generation import Generator


# --- predictors -------------------------------------------------------------------------------------------------------
# Models that answer a whole batch in one go: classification of texts and images, embeddings, and a user's own.


_MOST_PIXELS = 64_000_000


class Predictor(Protocol):
    """One result for each item, in the same order. Called from a thread, one batch at a time."""

    def predict(self, items: list[Any]) -> list[Any]: ...


def predictor_of(loaded: Loaded) -> Predictor:
    if loaded.task == CLASSIFY:
        prepare = _images(loaded.processor) if loaded.is_for_images else _texts(loaded)
        return Classifier(loaded.model, prepare)
    return Embedder(loaded.model, _texts(loaded))


def sample_items(loaded: Loaded, count: int) -> list[Any]:
    """Items such as clients send, to try the model out before they come."""
    if not loaded.is_for_images:
        return ["a few words of text"] * count
    from PIL import Image

    return [Image.new("RGB", (256, 256))] * count


class Classifier:
    def __init__(self, model: Any, prepare: Callable[[list[Any]], Any]) -> None:
        self._model, self._prepare = model, prepare
        names = getattr(model.config, "id2label", None) or {}
        self.labels = [str(names.get(at, at)) for at in range(model.config.num_labels)]

    def predict(self, items: list[Any]) -> list[Any]:
        """For each item, the labels with their probabilities, the likeliest first."""
        import torch

        with torch.inference_mode():
            logits = self._model(**self._prepare(items).to(self._model.device)).logits.float()
            chances = logits.sigmoid() if self._is_multi_label else logits.softmax(dim=-1)
        rows = chances.tolist()
        return [sorted(zip(self.labels, row, strict=True), key=lambda one: -one[1]) for row in rows]

    @property
    def _is_multi_label(self) -> bool:
        return bool(getattr(self._model.config, "problem_type", None) == "multi_label_classification")


class Embedder:
    """The mean of the last layer over the real tokens, at length 1."""

    def __init__(self, model: Any, prepare: Callable[[list[Any]], Any]) -> None:
        self._model, self._prepare = model, prepare
        self.size = int(model.config.get_text_config().hidden_size)

    def predict(self, items: list[Any]) -> list[Any]:
        """For each text, its vector and how many tokens it has."""
        import torch

        with torch.inference_mode():
            inputs = self._prepare(items).to(self._model.device)
            mask = inputs["attention_mask"]
            states = self._model(**inputs).last_hidden_state.float()
            summed = (states * mask[..., None]).sum(dim=1)
            vectors = torch.nn.functional.normalize(summed / mask.sum(dim=1, keepdim=True).clamp(min=1), dim=-1)
        return list(zip(vectors.tolist(), mask.sum(dim=1).tolist(), strict=True))


def _texts(loaded: Loaded) -> Callable[[list[Any]], Any]:
    tokenizer, config = loaded.processor, loaded.model.config
    if tokenizer.pad_token is None:
        # Any token will do: the attention mask hides it. A classifier on a causal model looks for it by its id.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "right"  # on the left it would move a text's positions, by the length of its neighbours
    longest = text_limit(tokenizer, config)

    def prepare(texts: list[Any]) -> Any:
        return tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")

    return prepare


def text_limit(tokenizer: Any, config: Any) -> int:
    """Longer texts are cut there."""
    limits = [
        getattr(tokenizer, "model_max_length", 0),
        getattr(config.get_text_config(), "max_position_embeddings", 0),
    ]
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**9]
    # RoBERTa and its relatives number positions from the padding's id on, and so have two less than they say.
    is_offset = config.model_type in {"roberta", "xlm-roberta", "camembert", "longformer"}
    return min(known, default=512) - (2 if is_offset and len(known) == 1 else 0)


def _images(processor: Any) -> Callable[[list[Any]], Any]:
    def prepare(images: list[Any]) -> Any:
        return processor(images=images, return_tensors="pt")

    return prepare


def decoded_image(text: str, at: int) -> Any:
    """An image from base64, or from a data URL. Raises Refused."""
    from PIL import Image, UnidentifiedImageError

    where = f"images[{at}]"
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad("the image is not valid base64", where) from error
    try:
        image = Image.open(io.BytesIO(content))
        if image.width * image.height > _MOST_PIXELS:
            raise bad(f"the image has {image.width} × {image.height} pixels; the limit is {_MOST_PIXELS}", where)
        return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
        raise bad("the image cannot be decoded; PNG, JPEG, GIF, BMP and WebP can", where) from error


def made_by(factory: str, model: str | None) -> Predictor:
    """What ``module:function`` returns; it gets the model's path if one was given."""
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise UgroError(f"--factory {factory} is not of the form module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        hint = "the module must be in the working directory or on PYTHONPATH"
        raise UgroError(f"--factory {factory}: {error}", hint=hint) from error
    made = function(model) if model is not None else function()
    if not callable(getattr(made, "predict", None)):
        raise UgroError(f"--factory {factory} returned {type(made).__name__}, which has no predict(list)")
    found: Predictor = made
    return found


# --- threads ----------------------------------------------------------------------------------------------------------
# Work that blocks, in threads that do not keep the process alive: a hung model must not delay its end.


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Call = Callable[[], None]


class Worker:
    """One thread for all calls: what computes with several threads keeps a pool of them for each thread that calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_settling(done, function, args))
        return await done

    def _work(self) -> None:
        while True:
            self._calls.get()()


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """In a thread of its own, which ends with it."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    name = getattr(function, "__name__", "work")
    threading.Thread(target=_settling(done, function, args), name=name, daemon=True).start()
    return await done


def _settling(done: asyncio.Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> _Call:
    loop = done.get_loop()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # nobody waits for it any more
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001  # raised again in the loop that waits for it
            failure = error
        loop.call_soon_threadsafe(settle, result, failure)

    return work


# --- batcher ----------------------------------------------------------------------------------------------------------
# Items of requests that arrive together are computed together. The first one waits a few milliseconds for others.


log = logging.getLogger(__name__)


class _Request:
    """Items of one client. Its answer is complete when each has a result."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.results: list[Any] = [None] * len(items)
        self._missing = len(items)
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def put(self, at: int, result: Any) -> None:
        self.results[at] = result
        self._missing -= 1
        if not self._missing and not self.done.done():
            self.done.set_result(self.results)

    def fail(self, error: Refused) -> None:
        if not self.done.done():
            self.done.set_exception(error)


_Item = tuple[_Request, int, Any]  # whose, the how-manieth, what


class Batcher:
    def __init__(self, predictor: Predictor, limits: Limits, metrics: Metrics) -> None:
        self.predictor, self._limits, self._metrics = predictor, limits, metrics
        self._items: deque[_Item] = deque()
        self._requests: set[_Request] = set()
        self._arrived = asyncio.Event()
        self.worker = Worker("predict")
        self._computing = 0

    async def submit(self, items: Sequence[Any]) -> list[Any]:
        """The results, in the order of the items. When the caller is cancelled, what has not begun is dropped."""
        if len(self._requests) >= self._limits.queue:
            raise queue_full(len(self._requests), 1)
        if not items:
            return []
        request = _Request(items)
        self._requests.add(request)
        self._items.extend((request, at, item) for at, item in enumerate(items))
        self._arrived.set()
        try:
            return await request.done
        finally:
            self._requests.discard(request)

    def waiting(self) -> int:
        return len(self._items)

    def running(self) -> int:
        return self._computing

    async def run(self) -> None:
        while True:
            if not self._items:
                self._arrived.clear()
                await self._arrived.wait()
            await self._gather()
            if batch := self._taken():
                await self._compute(batch)

    async def _gather(self) -> None:
        """Lets others arrive, but only while the batch is not full."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._limits.batch_wait_ms / 1000
        while len(self._items) < self._limits.max_batch and (left := end - loop.time()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _taken(self) -> list[_Item]:
        batch: list[_Item] = []
        while self._items and len(batch) < self._limits.max_batch:
            item = self._items.popleft()
            if not item[0].done.done():  # its client is gone, or another item of it has failed
                batch.append(item)
        return batch

    async def _compute(self, batch: list[_Item]) -> None:
        self._metrics.batch(len(batch))
        self._computing = len(batch)
        try:
            results = await self.worker.call(self._predict, [item for _, _, item in batch])
        finally:
            self._computing = 0
        if isinstance(results, Refused) and len(batch) > 1:
            # One of them is to blame. The others must not suffer for it.
            for one in batch:
                await self._compute([one])
            return
        for at, (request, place, _) in enumerate(batch):
            if isinstance(results, Refused):
                request.fail(results)
            else:
                request.put(place, results[at])

    def _predict(self, items: list[Any]) -> list[Any] | Refused:
        try:
            results = list(self.predictor.predict(items))
        except Refused as error:
            return error
        except Exception as error:
            log.exception("the model failed with %d items", len(items))
            return model_failed(f"{type(error).__name__}: {error}")
        if len(results) != len(items):
            return model_failed(f"predict returned {len(results)} results for {len(items)} items")
        return results


# --- service ----------------------------------------------------------------------------------------------------------


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
        self.metrics = Metrics(lambda: self.stage is Stage.READY)
        self.created = int(time.time())
        self.stage = Stage.LOADING
        self.reason = ""
        self.task: str | None = None
        self.is_for_images = False
        self.broke = asyncio.Event()  # the model cannot answer any more
        self._began = time.monotonic()
        self._generator: Generator | None = None
        self._batcher: Batcher | None = None

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
        from ugro.features.services.inference.generation import Generator

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
