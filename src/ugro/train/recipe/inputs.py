"""What recipes feed: labels, images as tensors (without torchvision), and a tiny text data set to try."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UsageError

# --- labels -----------------------------------------------------------------------------------------------------------
# The classes of a classification: their names, and the number of each label in the data.


class Labels:
    """Names in a fixed order: as the dataset says, else sorted; numbers by value."""

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self.names = names
        self._number = {value: number for number, value in enumerate(values)}

    @classmethod
    def of(cls, seen: Iterable[Any], names: list[str] | None) -> Labels:
        if names is not None:
            return cls(list(names), list(range(len(names))))
        values = set()
        for value in seen:
            if not isinstance(value, str | int):
                raise UsageError(f"{value!r} is no label", hint="labels are texts or whole numbers")
            values.add(value)
        ordered = sorted(values, key=_order)
        if len(ordered) < 2:
            raise UsageError(f"{len(ordered)} class in the data; a classification needs two or more")
        return cls([str(value) for value in ordered], ordered)

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any) -> int:
        try:
            return self._number[value]
        except (KeyError, TypeError):
            known = f"known: {', '.join(self.names[:10])}"
            raise UsageError(f"label {value!r} is not among those of the training data", hint=known) from None

    def configuration(self) -> dict[str, Any]:
        """As transformers' configurations have them."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by value, also those of a CSV file, where everything is text; then texts."""
    text = str(value)
    is_number = text.removeprefix("-").isdecimal()
    return not is_number, float(text) if is_number else 0.0, text


# --- pictures ---------------------------------------------------------------------------------------------------------


SUFFIXES = frozenset({".ppm", ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})

_PPM = re.compile(rb"P6(?:\s|#.*\n)+(\d+)\s+(\d+)\s+255\s")  # one space: the next byte is a pixel
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LEAST_CROP = 0.5  # of a side
_SIDE = 224
_SHOWN = 0.875  # of the shorter side, in evaluation


@dataclass(frozen=True, slots=True)
class Look:
    """What a model expects to see."""

    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, processor: Mapping[str, Any]) -> Look:
        """From preprocessor_config.json."""
        size = processor.get("crop_size") or processor.get("size") or {}
        side = size if isinstance(size, int) else next((size[name] for name in _SIDES if name in size), _SIDE)
        mean, deviation = processor.get("image_mean", _IMAGENET[0]), processor.get("image_std", _IMAGENET[1])
        return cls(int(side), tuple(mean), tuple(deviation))

    def seen(self, pixels: Any, chance: Any | None) -> Any:
        """A square of the image: its middle, or with ``chance``, a torch generator, a random part, perhaps mirrored."""
        import torch

        part = _middle(pixels) if chance is None else _random_part(pixels, chance)
        size = (self.side, self.side)
        part = torch.nn.functional.interpolate(part[None].float(), size, mode="bilinear", antialias=True)[0] / 255
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.deviation))
        return (part - mean) / deviation


_SIDES = ("height", "shortest_edge", "width")


def _middle(pixels: Any) -> Any:
    _, height, width = pixels.shape
    side = max(1, round(min(height, width) * _SHOWN))
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def _random_part(pixels: Any, chance: Any) -> Any:
    import torch

    _, height, width = pixels.shape
    size, across, down, mirrored = torch.rand(4, generator=chance).tolist()
    side = max(1, int(min(height, width) * (_LEAST_CROP + (1 - _LEAST_CROP) * size)))
    top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
    part = pixels[:, top : top + side, left : left + side]
    return part.flip(2) if mirrored < 0.5 else part


def read(path: Path) -> Any:
    """Colours, rows and columns of 8 bits. PPM is read directly, all other formats by Pillow."""
    if path.suffix.lower() == ".ppm":
        return _read_ppm(path)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(f"{path}: this format needs Pillow", hint="add pillow to the environment") from None
    try:
        with Image.open(path) as image:
            return of_pillow(image)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UsageError(f"{path}: not an image that can be read: {error}") from error


def of_pillow(image: Any) -> Any:
    """Also of palettes, grey values and transparency."""
    import torch

    width, height = image.size
    values = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1)


def _read_ppm(path: Path) -> Any:
    import torch

    content = path.read_bytes()
    header = _PPM.match(content)
    width, height = (int(header[1]), int(header[2])) if header else (0, 0)
    if header is None or not width * height or len(content) != header.end() + 3 * width * height:
        raise UsageError(f"{path}: not a binary PPM with 8 bits per colour")
    values = torch.frombuffer(bytearray(content[header.end() :]), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1)


def by_class(folder: Path) -> dict[str, list[Path]]:
    """The images of a folder with a folder for each class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {path.name: images(path) for path in classes}
    found = {name: paths for name, paths in found.items() if paths}
    if not found:
        raise UsageError(f"{folder}: no images in its folders", hint="a folder for each class, with its images")
    return found


def images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


# --- tiny -------------------------------------------------------------------------------------------------------------
# What --tiny trains on: sentences that can be learned, and a tokenizer made from them. Nothing is downloaded.


_PLACES = {"fox": "forest", "owl": "night", "whale": "sea", "camel": "desert", "mole": "garden"}
_VERBS = {"loves": "good", "enjoys": "good", "fears": "bad", "hates": "bad"}
_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def sentences(count: int) -> list[tuple[str, str]]:
    """Texts with labels that one word decides."""
    drawn = random.Random(7)
    found = []
    for _ in range(count):
        animal, verb = drawn.choice(sorted(_PLACES)), drawn.choice(sorted(_VERBS))
        found.append((f"the {animal} {verb} the {_PLACES[animal]} .", _VERBS[verb]))
    return found


def tokenizer(texts: Iterable[str], size: int = 512) -> Any:
    """Of bytes and frequent sequences of them, so that it can read any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **_SPECIAL)
