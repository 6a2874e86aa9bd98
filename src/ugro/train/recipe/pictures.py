"""Images as tensors: read, cut to a square and normalised, as a model's image processor says. Without torchvision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.core.errors import UsageError

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
