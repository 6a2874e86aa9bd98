"""Models that answer a whole batch in one go: classification of texts and images, embeddings, and a user's own."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
from collections.abc import Callable
from typing import Any, Protocol

from ugro.core.errors import UgroError
from ugro.inference.folder import CLASSIFY
from ugro.inference.loading import Loaded
from ugro.inference.refusals import bad

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
