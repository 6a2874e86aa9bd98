"""Loads a model with transformers: safetensors only, from this machine only unless a download was asked for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.features.services.inference.options import Options
from ugro.kernel.support.errors import UgroError
from ugro.node import foreign

# --- cores ------------------------------------------------------------------------------------------------------------
# How many threads a model on a CPU computes with: tried out, because more are often slower.
#
# Threads wait for each other many times for each token. For a small model, or beside other programs, that costs more
# than it brings: two threads on two busy cores took ten times as long as one.


log = logging.getLogger(__name__)
_REPEATS = 3
_LIMIT_S = 5.0  # a large model is not tried with few threads


def settle_threads(work: Callable[[], object], device: Any) -> None:
    """Called in the thread that computes. What the environment allows (``OMP_NUM_THREADS``) is the most."""
    import torch

    most = torch.get_num_threads()
    if device.type != "cpu" or most == 1:
        return
    began = time.monotonic()
    taken: dict[int, float] = {}
    for count in halves(most):
        torch.set_num_threads(count)
        work()
        taken[count] = min(_seconds(work) for _ in range(_REPEATS))
        if time.monotonic() - began > _LIMIT_S:
            break
    best = min(taken, key=lambda count: (taken[count], count))
    torch.set_num_threads(best)
    figures = ", ".join(f"{seconds * 1000:.1f} ms with {count}" for count, seconds in taken.items())
    log.info("computes with %d of %d threads: a small batch takes %s", best, most, figures)


def halves(most: int) -> list[int]:
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# --- folder -----------------------------------------------------------------------------------------------------------
# What a model's folder says about itself: its task, whether it is an adapter, on which base, with which labels.
#
# It reads small JSON files only; weights are ``loading``'s. A recipe describes its model in ``ugro.json``; of any other
# model, ``config.json`` or ``adapter_config.json`` says enough.


GENERATE, CLASSIFY, EMBED = "generate", "classify", "embed"
_MOST_HEADER = 100_000_000  # as the library has it
_TASKS = {
    "causal-lm": GENERATE,
    "text-classification": CLASSIFY,
    "image-classification": CLASSIFY,
    "CAUSAL_LM": GENERATE,
    "SEQ_CLS": CLASSIFY,
    "FEATURE_EXTRACTION": EMBED,
}
_ENDINGS = {
    "ForCausalLM": GENERATE,
    "LMHeadModel": GENERATE,
    "ForSequenceClassification": CLASSIFY,
    "ForImageClassification": CLASSIFY,
    "ForMaskedLM": EMBED,
    "ForPreTraining": EMBED,
    "Model": EMBED,
}
_FORMAT = 1
_MOST_BYTES = 16 << 20  # of a file about a model


class NoRoom(UgroError):
    """The memory does not suffice now; it may at the next start."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    task: str | None  # None: the folder does not say
    is_adapter: bool
    is_for_images: bool
    base: str | None  # a path or an id on the hub, of an adapter
    labels: tuple[str, ...]


def read_folder(path: Path) -> ModelFolder:
    own, config, adapter = (_read(path / name) for name in ("ugro.json", "config.json", "adapter_config.json"))
    if config is None and adapter is None:
        what = "it has neither config.json nor adapter_config.json"
        raise UgroError(f"{path} is not the folder of a model: {what}", hint="--model results/model, or use --factory")
    own = own or {}
    if own.get("format", _FORMAT) != _FORMAT:
        raise UgroError(f"{path}/ugro.json has the format {own['format']!r}", hint="use a newer UGRO")
    is_adapter = adapter is not None
    _check_weights(path, is_adapter)
    return ModelFolder(
        path=path,
        task=_task(own, config or {}, adapter or {}),
        is_adapter=is_adapter,
        is_for_images=own.get("task") == "image-classification"
        or _architecture(config or {}, "ForImageClassification"),
        base=_base(own, adapter or {}) if is_adapter else None,
        labels=_labels(own.get("labels")),
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            found = foreign.read(file, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UgroError(f"{path.parent} is a file; a model is a folder") from None
    except (OSError, ValueError) as error:
        raise UgroError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UgroError(f"{path} is not a JSON object")
    return found


def _check_weights(path: Path, is_adapter: bool) -> None:
    """Only safetensors: other formats run code when they are loaded."""
    if files := sorted(path.glob("*.safetensors")):
        for file in files:
            _check_length(file)
        return
    others = sorted(found.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for found in path.glob(pattern))
    what = f"its weights are in {others[0]}" if others else "it has no weights"
    if others and others[0].endswith(".gguf"):
        raise UgroError(f"{path}: {what}", hint="GGUF files are for llama.cpp: engine: llama.cpp")
    kind = "adapter" if is_adapter else "model"
    hint = f"save the {kind} with save_pretrained(…), which writes safetensors"
    raise UgroError(f"{path}: {what}; UGRO loads .safetensors only", hint=hint)


def _check_length(file: Path) -> None:
    """A copy that was interrupted: the library says neither which file it is, nor where it ends."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, _MOST_HEADER):
                return  # none of its files: the library says so
            ends = {name: 8 + length + int(one["data_offsets"][1]) for name, one in _tensors(opened.read(length))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return
    if cut := [name for name, end in ends.items() if end > size]:
        first = min(cut, key=lambda name: ends[name])
        there = f"{size} of {max(ends.values())} bytes are there"
        raise UgroError(f"{file} is cut off in the tensor {first}: {there}", hint="copy it again")


def _tensors(header: bytes) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in foreign.parsed(header, _MOST_HEADER).items() if name != "__metadata__"]


def _task(own: dict[str, Any], config: dict[str, Any], adapter: dict[str, Any]) -> str | None:
    for name in (own.get("task"), adapter.get("task_type")):
        if isinstance(name, str) and name in _TASKS:
            return _TASKS[name]
    return next((task for ending, task in _ENDINGS.items() if _architecture(config, ending)), None)


def _architecture(config: dict[str, Any], ending: str) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and name.endswith(ending) for name in named)


def _base(own: dict[str, Any], adapter: dict[str, Any]) -> str | None:
    """The first that is on this machine; else what the adapter itself names."""
    named = [own.get("base_path"), own.get("base"), adapter.get("base_model_name_or_path")]
    texts = [name for name in named if isinstance(name, str) and name]
    return next((name for name in texts if Path(name).is_dir()), texts[-1] if texts else None)


def _labels(found: Any) -> tuple[str, ...]:
    """A list of names, or names by number as in a configuration."""
    if isinstance(found, dict):
        found = [found[key] for key in sorted(found, key=lambda key: int(key) if str(key).isdecimal() else 0)]
    return tuple(str(one) for one in found) if isinstance(found, list) else ()


# --- loading ----------------------------------------------------------------------------------------------------------


_WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py")
_ERRORS = (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError, MemoryError)
_OPTIONAL = ("pillow", "peft", "sentencepiece", "protobuf", "tiktoken", "accelerate", "torchvision", "einops")
# Layers whose state is one key and one value per token; others cannot be batched by appending columns.
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any
    processor: Any  # a tokenizer, or what prepares images
    task: str
    is_for_images: bool


def load(options: Options) -> Loaded:
    """Blocks for as long as the disk takes. Raises UgroError with one sentence."""
    assert options.model is not None
    folder = read_folder(locate(options.model, options.downloads))
    task = _chosen_task(folder, options.task)
    base = _base_folder(folder, options) if folder.is_adapter else None
    from safetensors import SafetensorError

    try:
        loaded = _load(folder, base, task, options)
    except (*_ERRORS, SafetensorError) as error:
        raise _not_loaded(folder.path, error) from error
    if task == GENERATE:
        _check_layers(loaded.model)
    return loaded


def locate(source: str, downloads: bool) -> Path:
    """A folder, or the snapshot of a hub id in the cache of this machine."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise UgroError(f"there is no folder {source}", hint="--model FOLDER, with the model's config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=not downloads, allow_patterns=list(_WEIGHTS)))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        hint = "give its folder, or add --download if this machine reaches huggingface.co"
        raise UgroError(f"{source} is neither a folder nor in the Hugging Face cache", hint=hint) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UgroError(f"{source} could not be downloaded: {reason}") from error


def _chosen_task(folder: ModelFolder, wanted: str) -> str:
    task = folder.task if wanted == "auto" else wanted
    if task is None:
        raise UgroError(f"{folder.path} does not say what the model does", hint="--task generate, classify or embed")
    return task


def _base_folder(folder: ModelFolder, options: Options) -> ModelFolder:
    base = options.base or folder.base
    if base is None:
        raise UgroError(f"{folder.path} is a LoRA adapter and names no base model", hint="--base FOLDER")
    try:
        found = read_folder(locate(base, options.downloads))
    except UgroError as error:
        raise UgroError(f"the base model of the LoRA adapter: {error.message}", hint="--base FOLDER") from error
    if found.is_adapter:
        raise UgroError(f"{found.path} is an adapter itself; the base must be a whole model")
    return found


def _load(folder: ModelFolder, base: ModelFolder | None, task: str, options: Options) -> Loaded:
    import torch
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()
    device = _device(torch, options.device)
    whole = base or folder
    common = {"local_files_only": True, "trust_remote_code": options.trusts_remote_code}
    config = transformers.AutoConfig.from_pretrained(whole.path, **common)
    labels = {"num_labels": len(folder.labels)} if folder.labels and folder.is_adapter else {}
    kind = _auto_class(transformers, task, folder.is_for_images)
    dtype = _dtype(torch, options.dtype, device, config)
    how = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(whole.path, dtype=dtype, **how, **common, **labels)
    _check_shapes(whole.path, found["mismatched_keys"])
    if base is None:
        _check_complete(folder.path, found["missing_keys"])
    else:
        model = _with_adapter(model, folder.path)
    _name_labels(model, folder.labels)
    model = model.to(device).eval().requires_grad_(False)
    return Loaded(model, _processor(transformers, folder, whole, common), task, folder.is_for_images)


def _check_shapes(path: Path, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """transformers makes these up, too; asked to refuse them, it does not say which they are."""
    for name, given, wanted in sorted(mismatched):
        stored, needed = (" x ".join(map(str, shape)) or "a single number" for shape in (given, wanted))
        text = f"{path}: the tensor {name} is {stored} in its weights, and {needed} by its config.json"
        raise UgroError(text, hint="take both from the same training")


def _check_complete(path: Path, missing: Collection[str]) -> None:
    """transformers makes up what is missing, at random. Nothing here uses a pooler, which many models lack."""
    lacking = sorted(name for name in missing if "pooler" not in name)
    if lacking:
        text = f"{path}: its weights lack {lacking[0]}" + (f" and {len(lacking) - 1} more" if lacking[1:] else "")
        raise UgroError(text, hint="is it the right --task for this model?")


def _auto_class(transformers: Any, task: str, is_for_images: bool) -> Any:
    if task == CLASSIFY:
        images, texts = transformers.AutoModelForImageClassification, transformers.AutoModelForSequenceClassification
        return images if is_for_images else texts
    return transformers.AutoModelForCausalLM if task == GENERATE else transformers.AutoModel


def _with_adapter(model: Any, path: Path) -> Any:
    """Merged into the weights: from here on it is a model like any other, and as fast."""
    import peft

    return peft.PeftModel.from_pretrained(model, str(path), is_trainable=False).merge_and_unload()


def _processor(transformers: Any, folder: ModelFolder, whole: ModelFolder, common: dict[str, Any]) -> Any:
    if folder.is_for_images:
        return transformers.AutoImageProcessor.from_pretrained(whole.path, **common)
    own = any((folder.path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    return transformers.AutoTokenizer.from_pretrained(folder.path if own else whole.path, **common)


def _name_labels(model: Any, labels: tuple[str, ...]) -> None:
    if labels and getattr(model.config, "num_labels", None) == len(labels):
        model.config.id2label = dict(enumerate(labels))


def _device(torch: Any, wanted: str) -> Any:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UgroError(f"the device {wanted} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _dtype(torch: Any, wanted: str, device: Any, config: Any) -> Any:
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cpu":
        return torch.float32  # what every CPU computes quickly
    own = getattr(config, "dtype", None)
    return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16


def _check_layers(model: Any) -> None:
    text = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    is_other = getattr(model, "_is_stateful", False) or getattr(model.config, "is_encoder_decoder", False)
    if kinds or is_other:
        what = ", ".join(sorted(kinds)) or model.config.model_type
        hint = "use an engine that has it, such as engine: vllm"
        raise UgroError(f"this server cannot generate with models of the kind {what}", hint=hint)


def _not_loaded(path: Path, error: BaseException) -> UgroError:
    if isinstance(error, UgroError):
        return error
    first, *more = (str(error) or type(error).__name__).strip().splitlines()
    text = f"{first} {more[0].strip()}"[:500] if more and first.endswith(":") else first[:500]
    if "trust_remote_code" in str(error):
        return UgroError(f"{path} comes with Python code of its own", hint="read it, then add --trust-remote-code")
    if isinstance(error, ImportError):
        # transformers says which one below a headline and an empty line.
        named = next((name for name in _OPTIONAL if name in str(error).lower()), None)
        hint = f"install it on the node, or with the job: --package {named}" if named else None
        return UgroError(f"{path} needs {named or 'a package'}, which this Python lacks: {text}", hint=hint)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return NoRoom(
            f"{path} does not fit into the memory that is free: {text}",
            hint="end what uses the device, or give the replica a larger one",
        )
    return UgroError(f"{path} cannot be loaded: {text}")
