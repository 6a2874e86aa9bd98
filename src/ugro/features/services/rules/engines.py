"""Engines that serve a model: the command of each, how it says that it is ready, and how it gets a key. Pure.

A word of a command may contain ``{model}`` (a folder; for llama.cpp a file), ``{base}`` (of a LoRA adapter),
``{host}``, ``{port}``, ``{name}``, ``{python}`` and ``{key_file}``. A key is never a word of a command: every user of a
machine can read those.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ugro.kernel.support.errors import ConfigError

PLACEHOLDERS = ("model", "base", "host", "port", "name", "python", "key_file")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    command: tuple[str, ...]
    adapter_command: tuple[str, ...] = ()  # for a LoRA adapter on {base}; empty: the engine needs a whole model
    health: str = "/health"  # 200 when it can answer
    concurrency: int = 0  # requests that it computes together with these options; 0: it decides by itself
    is_keyed: bool = False  # refuses requests without the service's key
    key_variable: str = ""  # the environment variable that its key is put into
    key_words: tuple[str, ...] = ()  # the words that name the file with its key
    packages: tuple[str, ...] = ()  # for the job's environment; empty: no package of Python
    note: str = ""


_ADDRESS = ("--host", "{host}", "--port", "{port}")
_SERVED = ("--served-model-name", "{name}")
_UGRO = ("{python}", "-m", "ugro.features.services.inference", "--model", "{model}")
_SGLANG = ("{python}", "-m", "sglang.launch_server", "--model-path")

DEFAULT = "ugro"
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name=DEFAULT,
            command=(*_UGRO, *_ADDRESS, "--name", "{name}"),
            adapter_command=(*_UGRO, "--base", "{base}", *_ADDRESS, "--name", "{name}"),
            concurrency=8,
            is_keyed=True,
            packages=("torch", "transformers>=5", "safetensors", "peft", "fastapi", "uvicorn", "jinja2", "pillow"),
            note="finds the file with its key by itself: UGRO_SERVICE_KEY_FILE",
        ),
        Engine(
            name="vllm",
            command=("vllm", "serve", "{model}", *_ADDRESS, *_SERVED),
            adapter_command=(
                *("vllm", "serve", "{base}", *_ADDRESS, "--enable-lora"),
                *("--lora-modules", "{name}={model}"),
            ),
            is_keyed=True,
            key_variable="VLLM_API_KEY",
            packages=("vllm",),
            note="its key protects /v1 only",
        ),
        Engine(
            name="sglang",
            command=(*_SGLANG, "{model}", *_ADDRESS, *_SERVED),
            adapter_command=(*_SGLANG, "{base}", *_ADDRESS, "--enable-lora", "--lora-paths", "{name}={model}"),
            packages=("sglang",),
            note="takes its key from the command line or its own --config file only, so UGRO gives it none",
        ),
        Engine(
            name="llama.cpp",
            command=("llama-server", "--model", "{model}", "--alias", "{name}", *_ADDRESS, "--parallel", "4"),
            concurrency=4,
            is_keyed=True,
            key_words=("--api-key-file", "{key_file}"),
            note="a program of its own, not a package; {model} is a GGUF file",
        ),
        Engine(
            name="tgi",
            command=("text-generation-launcher", "--model-id", "{model}", "--hostname", "{host}", "--port", "{port}"),
            concurrency=128,
            is_keyed=True,
            key_variable="API_KEY",
            note="in maintenance; usually run from its container image; answers to any model name",
        ),
    )
}


def engine_named(name: str) -> Engine:
    """Raises ConfigError with the nearest name."""
    if name in ENGINES:
        return ENGINES[name]
    near = difflib.get_close_matches(name, ENGINES, 1)
    raise ConfigError(f"unknown engine {name!r}", hint=f"did you mean {near[0]}?" if near else _choices())


def command_of(engine: Engine, *, is_adapter: bool, has_key: bool) -> tuple[str, ...]:
    """The words, with places to fill in. Raises ConfigError for an adapter that the engine cannot serve as it is."""
    if is_adapter and not engine.adapter_command:
        hint = "merge the adapter into its base (peft: merge_and_unload), or use engine: ugro or vllm"
        raise ConfigError(f"the engine {engine.name} needs a whole model, and this is a LoRA adapter", hint=hint)
    words = engine.adapter_command if is_adapter else engine.command
    return (*words, *(engine.key_words if has_key else ()))


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError for a place that nobody fills in. Other braces, as of JSON, stay as they are."""
    for name in (name for word in words for name in _PLACEHOLDER.findall(word)):
        if name not in PLACEHOLDERS:
            near = difflib.get_close_matches(name, PLACEHOLDERS, 1)
            known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
            hint = f"did you mean {{{near[0]}}}?" if near else f"there is: {known}"
            raise ConfigError(f"command: unknown {{{name}}}", hint=hint)


def _choices() -> str:
    return f"there is: {', '.join(ENGINES)}; or give a command"
