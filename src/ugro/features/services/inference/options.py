"""The options of the server, from its command line and from what UGRO puts into a replica's environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn

from ugro.kernel.support.errors import UsageError

TASKS = ("auto", "generate", "classify", "embed")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
_MOST_PORTS = 65535


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch: int = 8  # sequences, texts or images that are computed together
    batch_wait_ms: float = 5.0  # how long the first text of a batch waits for others; generation never waits
    max_tokens: int | None = None  # new tokens of one answer; None: what the model's context leaves
    queue: int = 64  # requests that wait


@dataclass(frozen=True, slots=True)
class Options:
    model: str | None
    base: str | None
    factory: str | None
    host: str
    port: int
    name: str
    task: str
    device: str
    dtype: str
    limits: Limits
    grace_s: float
    key_file: str | None
    trusts_remote_code: bool
    downloads: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    given = _parser(environ).parse_args(argv)
    if given.model is None and given.factory is None:
        raise UsageError("no model: neither --model nor --factory is given", hint="--model FOLDER")
    if given.port is None:
        raise UsageError("no port: neither --port nor the variable UGRO_PORT is set", hint="--port 8000")
    name = given.name or environ.get("UGRO_SERVICE") or _name_of(given.model or given.factory)
    return Options(
        model=given.model,
        base=given.base,
        factory=given.factory,
        host=given.host,
        port=given.port,
        name=name,
        task=given.task,
        device=given.device,
        dtype=given.dtype,
        limits=Limits(given.max_batch, given.batch_wait_ms, given.max_tokens, given.queue),
        grace_s=given.grace,
        key_file=environ.get("UGRO_SERVICE_KEY_FILE") or None,
        trusts_remote_code=given.trust_remote_code,
        downloads=given.download,
    )


def _name_of(source: str) -> str:
    """``results/7/model`` is called 7 by nobody: the last part of the path, or of ``module:function``."""
    return PurePath(source.rpartition(":")[2]).name or source


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="all options: python -m ugro.features.services.inference --help")


def _parser(environ: Mapping[str, str]) -> _Parser:
    about = "Serves a model over HTTP, as OpenAI's API does."
    parser = _Parser(prog="python -m ugro.features.services.inference", description=about)
    add = parser.add_argument
    model = environ.get("UGRO_MODEL") or environ.get("UGRO_FOLDER_MODEL") or None
    add("--model", default=model, help="folder of a model or a LoRA adapter, or its id on the hub ($UGRO_MODEL)")
    base = environ.get("UGRO_FOLDER_BASE") or None
    add("--base", default=base, help="folder of the base model of a LoRA adapter ($UGRO_FOLDER_BASE)")
    add("--factory", metavar="MODULE:FUNCTION", help="returns an object with predict(list) -> list, served at /predict")
    add("--host", default=environ.get("UGRO_HOST") or "127.0.0.1", help="address to listen on ($UGRO_HOST)")
    add("--port", type=_port, default=environ.get("UGRO_PORT") or None, help="port to listen on ($UGRO_PORT)")
    add("--name", help="name of the model in requests and answers ($UGRO_SERVICE, or the folder's name)")
    add("--task", choices=TASKS, default="auto", help="what the model does; auto reads it from the folder")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: a GPU if there is one")
    add("--dtype", choices=DTYPES, default="auto", help="auto: float32 on a CPU, the model's own or bfloat16 on a GPU")
    _add_limits(parser)
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    add("--download", action="store_true", help="get a model that is not on this machine from the Hugging Face hub")
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, Limits()
    add("--max-batch", type=_count, default=default.max_batch, help="how many are computed together (8)")
    add("--batch-wait-ms", type=_amount, default=default.batch_wait_ms, help="texts and images wait for others (5)")
    add("--max-tokens", type=_count, help="most new tokens of an answer; default: what the context leaves")
    add("--queue", type=_count, default=default.queue, help="requests that may wait; more are refused with 429 (64)")
    add("--grace", type=_amount, default=30.0, metavar="SECONDS", help="to finish requests after SIGTERM (30)")


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_PORTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to {_MOST_PORTS}, or 0 for any that is free)")
    return int(text)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number
