"""Trains ResNet-50 to classify images, on any number of unequal GPUs or CPUs.

    ugro launch examples/train_resnet50.py --nodes 3 -- --data pictures/
    python examples/train_resnet50.py --tiny           # alone, in seconds

--data is a folder with a folder for each class. PPM files are read directly, all others by Pillow (pip install pillow).
Without --data the script generates images; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ugro.train as ut

PPM_HEADER = re.compile(rb"P6(?:\s|#.*\n)+(\d+)\s+(\d+)\s+255\s")  # one space: the next byte is a pixel
SUFFIXES = {".ppm", ".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    made_up = MadeUp(arguments.size, arguments.samples)
    dataset: Any = Pictures(arguments.data, arguments.size) if arguments.data else made_up
    compression = {} if arguments.compress == "none" else {"compress": arguments.compress}
    model = ResNet(len(dataset.classes), arguments)
    model = run.wrap(model, sync_batchnorm=arguments.sync_batchnorm, **compression)
    mixed = torch.autocast(run.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    run.keep(model=model, optimizer=optimizer, schedule=schedule)
    loader = run.loader(dataset, global_batch=arguments.global_batch, drop_last=True, num_workers=arguments.workers)
    for epoch in run.epochs(arguments.epochs):
        for number, (pictures, classes) in enumerate(loader):
            pictures, classes = pictures.to(run.device), classes.to(run.device)
            with run.step() as step:
                for some, wanted in step.micro_batches((pictures, classes), arguments.accumulate):
                    with mixed:
                        loss = functional.cross_entropy(model(some), wanted)
                    step.backward(step.loss(loss))
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
            if run.is_main and number % 20 == 0:
                print(f"epoch {epoch} step {number} of {len(loader)} loss {loss.item():.4f}", flush=True)
        schedule.step()
        run.checkpoint()
    run.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a folder with a folder of images for each class")
    parser.add_argument("--blocks", type=int, nargs=4, default=[3, 4, 6, 3], help="3 4 6 3 is ResNet-50")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--global-batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--sync-batchnorm", action="store_true", help="normalise over the samples of all ranks")
    parser.add_argument("--samples", type=int, default=640, help="generated images")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of samples")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: mixed precision")
    parser.add_argument("--accumulate", type=int, default=1, help="parts in which a rank computes its share")
    parser.add_argument("--compress", default="none", help="how gradients are compressed: fp16, powersgd, auto")
    parser.add_argument("--tiny", action="store_true", help="small sizes for a test")
    if parser.parse_args().tiny:  # other flags still apply
        parser.set_defaults(blocks=[1, 1, 1, 1], width=8, size=32, global_batch=32, epochs=1, lr=0.05)
    return parser.parse_args()


# --- model ------------------------------------------------------------------------------------------------------


class ResNet(nn.Module):  # type: ignore[misc]
    def __init__(self, classes: int, size: argparse.Namespace) -> None:
        super().__init__()
        width = size.width
        stages: list[nn.Module] = []
        channels = width
        for number, blocks in enumerate(size.blocks):
            for block in range(blocks):
                stride = 2 if number > 0 and block == 0 else 1
                stages.append(Bottleneck(channels, width << number, stride))
                channels = (width << number) * Bottleneck.expansion
        self.stem = nn.Sequential(*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(pictures)).mean((2, 3)))


class Bottleneck(nn.Module):  # type: ignore[misc]
    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.body = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, wide, 1),
        )
        is_same = stride == 1 and channels == wide
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*convolution(channels, wide, 1, stride))
        nn.init.zeros_(self.body[-1].weight)  # a block starts as its shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def convolution(channels: int, wanted: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, wanted, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(wanted)


# --- data -------------------------------------------------------------------------------------------------------


class Pictures(Dataset):  # type: ignore[misc]
    def __init__(self, folder: Path, size: int) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.size = size
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise SystemExit(f"no images in the folders of {folder}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, number = self.files[index]
        pixels = (read_ppm(path) if path.suffix.lower() == ".ppm" else read_by_pillow(path)) / 255
        return cut_square(pixels, self.size), number


def read_ppm(path: Path) -> torch.Tensor:
    content = path.read_bytes()
    header = PPM_HEADER.match(content)
    width, height = (int(header[1]), int(header[2])) if header else (0, 0)
    if header is None or len(content) != header.end() + 3 * width * height:
        raise SystemExit(f"{path}: not a binary PPM with 8 bits per colour")
    values = torch.frombuffer(bytearray(content[header.end() :]), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1).float()


def read_by_pillow(path: Path) -> torch.Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit(f"{path}: this format needs Pillow: pip install pillow") from None
    with Image.open(path) as image:
        width, height = image.size
        values = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1).float()


def cut_square(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """A random crop, perhaps mirrored, so that epochs differ."""
    _, height, width = pixels.shape
    side = int(min(height, width) * (0.7 + 0.3 * torch.rand(()).item()))
    top, left = (int(torch.randint(0, room - side + 1, ())) for room in (height, width))
    part = pixels[None, :, top : top + side, left : left + side]
    part = functional.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
    return (part.flip(2) if torch.rand(()) < 0.5 else part) * 2 - 1


class MadeUp(Dataset):  # type: ignore[misc]
    """Stripes in ten directions with noise."""

    classes = tuple(range(10))

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        number = index % len(self.classes)
        angle = torch.tensor(torch.pi * number / len(self.classes))
        x, y = torch.meshgrid(*[torch.linspace(-6, 6, self.size)] * 2, indexing="xy")
        stripes = torch.sin(2 * (x * angle.cos() + y * angle.sin()) + 6 * torch.rand((), generator=drawn))
        return stripes + 0.3 * torch.randn(3, self.size, self.size, generator=drawn), number


if __name__ == "__main__":
    main()
