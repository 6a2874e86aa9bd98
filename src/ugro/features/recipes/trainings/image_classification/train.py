"""Fine-tunes a model to classify images (ResNet, ViT, ConvNeXt, …), on unequal GPUs or CPUs.

    ugro launch --model resnet-50 --dataset ./pictures --nodes 3
    python train.py --model ./my-resnet --dataset pictures/       # a folder for each class
    python train.py --tiny                             # alone, in seconds, without a download
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

import ugro.train as ut
from ugro.kernel.support.errors import NotFound, UsageError
from ugro.train.recipe import command_line as flags
from ugro.train.recipe import dataset, output
from ugro.train.recipe import dataset as files
from ugro.train.recipe import inputs as pictures
from ugro.train.recipe import training as evaluation
from ugro.train.recipe.command_line import Named, Names, ends_clearly, say, size_of
from ugro.train.recipe.dataset import explained, together
from ugro.train.recipe.inputs import Labels, Look
from ugro.train.recipe.output import Facts, Hardware
from ugro.train.recipe.training import Precision, Updates, kept, trained_bytes

LR = 1e-4
PROCESSOR_FILE = "preprocessor_config.json"


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    precision = Precision.of(run, arguments.dtype)
    names = Names.of(__file__, arguments)
    data = together(run, lambda: load_data(names, arguments), "the data")
    count = f"{len(data.train):,} images, {len(data.labels)} classes; {len(data.evaluation):,} to evaluate on"
    say(run, f"{names.data}: {count}")
    processor, model = together(run, lambda: load_model(names, arguments, data.labels), "the model")

    norms = prepare_norms(model, arguments)
    wrapped = run.wrap(model, sync_batchnorm=norms == "sync")
    say(run, f"each step exchanges {size_of(trained_bytes(model))} of gradients; batch norms: {norms}")
    look = Look.of(processor)
    train = Pictures(data.train, look, lambda index: drawn(run, arguments.seed, index))
    held_out = Pictures(data.evaluation, look)
    loader = run.loader(train, global_batch=arguments.batch_size, num_workers=arguments.workers)
    updates = Updates(run, model, arguments, precision, len(loader), LR)
    results = evaluation.Results()
    run.keep(model=model if norms != "frozen" else kept(model), results=results, **updates.kept())

    for _ in run.epochs(updates.epochs):
        for batch in updates.batches(loader):
            updates.step(lambda part: loss_of(wrapped, part, run.device), batch)
        results.scores = evaluate(run, model, held_out, precision)
        run.checkpoint()
    save(run, model, processor, names, Outcome(arguments, data, updates, results))
    run.close()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return flags.parse(parser(), {"batch_size": 32, "epochs": 2, "lr": 1e-2}, argv)


def parser() -> argparse.ArgumentParser:
    made = flags.new(__doc__)
    made.add_argument("--image-column", help="column with the image (default: image, or img)")
    made.add_argument("--label-column", help="column with the label (default: label)")
    made.add_argument(
        "--batchnorm", choices=("auto", "frozen", "sync", "local"), default="auto",
        help="frozen: keep the pretrained statistics; sync: over the samples of all ranks; local: of each rank; "
        "auto takes frozen, and sync for a new model",
    )  # fmt: skip
    return made


# --- data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images that are read when they are needed, and the numbers of their classes."""

    read: Callable[[int], torch.Tensor]
    numbers: list[int]  # what ``read`` is called with
    labels: list[int]  # by the same numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, places: Sequence[int]) -> Images:
        return Images(self.read, [self.numbers[place] for place in places], self.labels)


@dataclass(frozen=True)
class Data:
    train: Images
    evaluation: Images
    labels: Labels


def load_data(names: Names, arguments: argparse.Namespace) -> Data:
    if names.dataset is None:
        labels = [number % 4 for number in range(320)]
        return divided(Images(stripes, list(range(320)), labels), Labels.of(labels, None), 0.1, arguments.seed)
    if names.dataset.is_local and not dataset.is_of_library(names.dataset.folder):
        return load_folder(names.dataset, arguments)
    found = dataset.tables(names.dataset, frozenset())
    chosen = dataset.chosen(found, names.dataset, arguments.eval_split)
    label = dataset.label_column(chosen.train, names.dataset, arguments.label_column)
    labels_ = Labels.of(chosen.train.column(label), chosen.train.label_names(label))
    train = of_table(chosen.train, image_column(chosen.train, names.dataset, arguments.image_column), label, labels_)
    if chosen.evaluation is None:
        return divided(train, labels_, chosen.held_out, arguments.seed)
    column = image_column(chosen.evaluation, names.dataset, arguments.image_column)
    return Data(train, of_table(chosen.evaluation, column, label, labels_), labels_)


def load_folder(named: Named, arguments: argparse.Namespace) -> Data:
    """A folder for each class; or folders train, and validation or test, with a folder for each class."""
    if not named.folder.is_dir():
        raise NotFound(f"no folder {named.place}", hint="a folder with a folder for each class")
    folders = [one for one in sorted(named.folder.iterdir()) if one.is_dir()]
    splits = {split: one for one in folders if (split := files.named_split(Path(one.name, "x"))) is not None}
    has_splits = "train" in splits and len(splits) > 1
    found = {name: pictures.by_class(folder) for name, folder in splits.items()} if has_splits else {}
    train = found.get("train") or pictures.by_class(named.folder)
    labels = Labels.of(train, None)
    other = found.get(arguments.eval_split) or found.get("validation") or found.get("test")
    if other is not None and arguments.eval_split in ("auto", *found):
        return Data(of_files(train, labels), of_files(other, labels), labels)
    part = 0.05 if arguments.eval_split == "auto" else dataset.fraction(arguments.eval_split, named, found)
    return divided(of_files(train, labels), labels, part, arguments.seed)


def of_files(found: dict[str, list[Path]], labels: Labels) -> Images:
    paths = [path for some in found.values() for path in some]
    numbers = [labels.number(name) for name, some in found.items() for _ in some]
    return Images(lambda number: pictures.read(paths[number]), list(range(len(paths))), numbers)


def of_table(table: Any, column: str, label: str, labels: Labels) -> Images:
    numbers = [labels.number(one) for one in table.column(label)]
    return Images(lambda number: pictures.of_pillow(table.dataset[number][column]), list(range(len(numbers))), numbers)


def image_column(table: dataset.Table, named: Named, wanted: str | None) -> str:
    wanted = wanted or named.about_text("image")
    usual = [name for name in ("image", "img", "picture", "pixel_values") if name in table.columns]
    if (wanted is not None and wanted not in table.columns) or not (wanted or usual):
        hint = f"name it: --image-column NAME; columns: {', '.join(table.columns)}"
        raise UsageError(f"{named.name}: no column {wanted or 'image'!r}", hint=hint)
    return wanted or usual[0]


def divided(images: Images, labels: Labels, part: float, seed: int) -> Data:
    train, held_out = dataset.held_out(len(images), part, seed)
    return Data(images.select(train), images.select(held_out), labels)


def stripes(number: int, side: int = 32) -> torch.Tensor:
    """Made for --tiny: the class is the width of the stripes; noise makes images differ."""
    chance = torch.Generator().manual_seed(number)
    columns = torch.arange(side) // (1 << number % 4) % 2
    return (columns * 160 + torch.randint(0, 64, (3, side, side), generator=chance)).to(torch.uint8)


class Pictures(Dataset):  # type: ignore[misc]
    def __init__(self, images: Images, look: Look, chance: Callable[[int], torch.Generator] | None = None) -> None:
        self.images, self.look, self.chance = images, look, chance

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = self.images.numbers[index]
        chance = self.chance(number) if self.chance else None
        return self.look.seen(self.images.read(number), chance), self.images.labels[number]


def drawn(run: ut.Run, seed: int, number: int) -> torch.Generator:
    """The same crop of an image in an epoch, whichever rank has it: shares do not change the training."""
    mixed = hash((seed, run.progress.epoch, number)) % 2**63  # of whole numbers: the same in every process
    return torch.Generator().manual_seed(mixed)


# --- model ------------------------------------------------------------------------------------------------------


def load_model(names: Names, arguments: argparse.Namespace, labels: Labels) -> tuple[dict[str, Any], Any]:
    """The image processor's configuration, and the model with a new head, from the cache, a folder or the hub."""
    from transformers import AutoModelForImageClassification
    from transformers.image_processing_base import ImageProcessingMixin

    torch.manual_seed(arguments.seed)  # the same new weights on every rank
    if names.model is None:
        return tiny_model(labels)
    options = {"use_safetensors": True, "trust_remote_code": arguments.trust_remote_code, "dtype": torch.float32}
    with explained("model", names.model):
        processor, _ = ImageProcessingMixin.get_image_processor_dict(names.model.place)
        model = AutoModelForImageClassification.from_pretrained(
            names.model.place, ignore_mismatched_sizes=True, **labels.configuration(), **options
        )
    return processor, model.train()


def tiny_model(labels: Labels) -> tuple[dict[str, Any], Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    size = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="bottleneck",
        **labels.configuration(),
    )  # fmt: skip
    shape = {"height": 32, "width": 32}
    processor = {"image_processor_type": "ViTImageProcessor", "size": shape, "image_mean": [0.5] * 3}
    return {**processor, "image_std": [0.5] * 3}, ResNetForImageClassification(size)


def prepare_norms(model: Any, arguments: argparse.Namespace) -> str:
    """What happens to BatchNorm layers. Frozen ones compute the same however a batch is shared."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return "none"
    wanted = str(arguments.batchnorm)
    if wanted == "auto":
        wanted = "frozen" if arguments.model else "sync"
    if wanted == "frozen":
        for norm in norms:
            norm.eval().requires_grad_(False)
    return wanted


def loss_of(model: Any, part: Any, device: Any) -> Any:
    images, labels = (one.to(device, non_blocking=True) for one in part)
    return torch.nn.functional.cross_entropy(model(pixel_values=images).logits, labels)


# --- evaluation and results -------------------------------------------------------------------------------------


def evaluate(run: ut.Run, model: Any, held_out: Pictures, precision: Precision) -> dict[str, float]:
    if not len(held_out):
        return {}
    counts = evaluation.Counts(model.config.num_labels)
    with evaluation.evaluating(model), precision.autocast():
        for images, labels in evaluation.own_batches(run, held_out, None):
            counts.add(model(pixel_values=images.to(run.device)).logits, labels)
    scores = counts.scores(run)
    evaluation.report(run, scores)
    return scores


@dataclass(frozen=True)
class Outcome:
    arguments: argparse.Namespace
    data: Data
    updates: Updates
    results: evaluation.Results


def save(run: ut.Run, model: Any, processor: dict[str, Any], names: Names, outcome: Outcome) -> None:
    labels = outcome.data.labels.names
    facts = Facts(
        task=names.task, kind="full", name=f"{names.base or 'tiny-resnet'} trained with UGRO",
        base=names.model, dataset=names.dataset,
        data={
            "training": f"{len(outcome.data.train):,} images",
            "evaluation": f"{len(outcome.data.evaluation):,} images",
            "classes": ", ".join(labels),
        },
        arguments=outcome.arguments, hardware=Hardware.of(run), training=outcome.updates.facts(),
        scores=outcome.results.scores,
        usage='from transformers import pipeline\n\nprint(pipeline("image-classification", "model")("picture.jpg"))',
    )  # fmt: skip

    def save_model(folder: Path) -> None:
        model.save_pretrained(folder)
        (folder / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n")

    path = output.write(run, facts, save_model, labels)
    say(run, f"saved {path}")


if __name__ == "__main__":
    ends_clearly(main)
