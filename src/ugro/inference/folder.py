"""What a model's folder says about itself: its task, whether it is an adapter, on which base, with which labels.

It reads small JSON files only; weights are ``loading``'s. A recipe describes its model in ``ugro.json``; of any other
model, ``config.json`` or ``adapter_config.json`` says enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.core.errors import UgroError
from ugro.remote import foreign

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
