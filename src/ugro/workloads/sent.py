"""Programs of ours that travel with a job as text: any Python on a node runs them, and nothing is installed there."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from functools import cache
from importlib import resources

PROGRAM = "UGRO_PROGRAM"
# Makes modules of the texts that it finds, in their order, and runs the last one.
_BOOT = f"""import base64, json, os, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(os.environ.pop("{PROGRAM}")))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.main())"""


def program_argv(python: str, *words: str) -> tuple[str, ...]:
    """``words`` are for people who list processes."""
    return (python, "-u", "-c", _BOOT, *words)


def program_env(modules: tuple[str, ...], env: Mapping[str, str]) -> dict[str, str]:
    """``modules``: whole names, each after those that it imports; the last one has the program's ``main``."""
    return {**env, PROGRAM: _program(modules)}


@cache
def _program(modules: tuple[str, ...]) -> str:
    texts = [(name, _text(name)) for name in modules]
    parents = sorted({".".join(name.split(".")[:end]) for name in modules for end in range(1, name.count(".") + 1)})
    found = [*((name, "") for name in parents), *texts]
    return base64.b64encode(zlib.compress(json.dumps(found).encode(), 9)).decode()


def _text(module: str) -> str:
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
