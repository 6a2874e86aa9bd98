"""Finds the script that a job runs among the files of this machine, and the folder that has to go with it.

A script outside of the current folder would not be on the nodes: its own folder is sent instead. A path that only the
nodes have is left as it is, and so is what belongs to the system, such as a program in /usr.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources

from ugro.kernel.support.errors import ConfigError

_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|k|z)?sh")
_WITH_VALUE = frozenset({"-W", "-X", "-o", "--check-hash-based-pycs"})
_ENDINGS = (".py", ".sh", ".R", ".jl")
_SHELL = re.compile(r"(?:ba|da|k|z)?sh")
_FLAG = re.compile(r"-[a-z]+")
_PLAIN = re.compile(r"[\w@%+=:,./~ -]+")  # a shell only divides it into words
_WORDS = re.compile(r"[^\s'\"`();&|<>$=]+")
# What is there belongs to the machine: nodes have their own.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")


@dataclass(frozen=True, slots=True)
class OwnScript:
    folder: str  # to be sent
    script: str  # as it is called there


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a job: of a command, or a script and its arguments."""

    argv: tuple[str, ...]
    is_command: bool
    is_workdir_given: bool = False  # the user says which folder is sent
    follows_links: bool = False  # what a link in the folder leads to is sent with it

    @property
    def at(self) -> int | None:
        """The place of the script; None if there is none."""
        return place_of(self.argv) if self.is_command else None if self.argv[0].startswith("-") else 0

    def called(self, script: str) -> str:
        """A program is looked for in the folder only if its name has a slash; `nice` and `env` start programs, too."""
        is_read = any(_INTERPRETER.fullmatch(os.path.basename(word)) for word in self.argv[: self.at])
        return f"./{script}" if self.is_command and not is_read else script

    @property
    def names_elsewhere(self) -> bool:
        """Whether its script's name may lead out of the current folder, links in it aside."""
        return self.at is not None and _is_elsewhere(self.argv[self.at])


def place_of(command: Sequence[str]) -> int | None:
    """Where a command names the script that it runs, as far as its words tell."""
    words = enumerate(command)
    if _INTERPRETER.fullmatch(os.path.basename(command[0])):
        next(words)
        for at, word in words:
            if word == "-c":
                return None
            if word == "-m":
                break  # a module; it may start a script: python -m torch.distributed.run train.py
            if word in _WITH_VALUE:
                next(words, None)
            elif not word.startswith("-"):
                return at
    return next((at for at, word in words if is_script(word)), None)


def words_of(command: Sequence[str]) -> tuple[str, ...]:
    """Those of a text for a shell if it is one plain command; else those of the command itself."""
    text = _text_of(command)
    return tuple(text.split()) if text is not None and _PLAIN.fullmatch(text) else tuple(command)


def with_script(command: Sequence[str], at: int, script: str) -> tuple[str, ...]:
    """The command with another name of its script, which is the word ``at`` of ``words_of`` it."""
    words = words_of(command)
    if words == tuple(command):
        return (*words[:at], script, *words[at + 1 :])
    return (*command[:-1], " ".join((*words[:at], shlex.quote(script), *words[at + 1 :])))


def expect_no_script_elsewhere(here: str, command: Sequence[str]) -> None:
    """Raises ConfigError for a text that names a script outside of ``here`` by a path that no node can have. Blocks."""
    text = _text_of(command)
    if text is None or _PLAIN.fullmatch(text):
        return
    words = _WORDS.findall(text)
    if "cd" in words or "pushd" in words:
        return
    root = os.path.realpath(here)
    for word in words:
        real = os.path.realpath(os.path.join(here, word))
        is_outside = word.startswith("..") and is_script(word) and not _is_within(real, [root])
        if is_outside and os.path.isfile(real):
            raise ConfigError(
                f"{word} is not in {here}, the folder that is sent",
                hint=f"name the folder of both: --workdir {os.path.commonpath([root, real])}, and the script as seen "
                "from there; if the nodes have it: --cwd DIR",
            )


def own_script(here: str, words: Words) -> OwnScript | None:
    """The script of a job that is submitted in the folder ``here``; None if it needs no other folder or name.

    Blocks. Raises ConfigError for what cannot be sent together.
    """
    at = words.at
    if at is None:
        return None
    word = words.argv[at]
    path = os.path.join(here, os.path.expanduser(word))
    real, root = os.path.realpath(path), os.path.realpath(here)
    is_there = os.path.isfile(real) or os.path.isfile(os.path.join(real, "__main__.py"))
    if not is_there or _is_within(real, _SYSTEM):
        return None
    if words.follows_links and _is_within(os.path.normpath(path), [os.path.normpath(here)]):
        real = os.path.join(root, os.path.relpath(path, here))
    if _is_within(real, [root]):
        return OwnScript(here, words.called(os.path.relpath(real, root))) if _is_elsewhere(word) else None
    found = OwnScript(os.path.dirname(real), words.called(os.path.basename(real)))
    if words.is_workdir_given:
        raise ConfigError(
            f"{word} is not in {here}, the folder that is sent",
            hint=f"leave out the workdir: then {found.folder} is sent; "
            "if the nodes have the script: --no-sync, or --cwd DIR",
        )
    _expect_no_other_files(here, found, words.argv[at + 1 :])
    return found


def _expect_no_other_files(here: str, found: OwnScript, args: Sequence[str]) -> None:
    """Files of the current folder would not be sent with another one, or would be elsewhere there."""
    for word in args:
        for name in {word, word.partition("=")[2]} - {""}:
            is_own = not name.startswith(("/", "~", "-")) and os.path.isfile(os.path.join(here, name))
            is_below = not os.path.normpath(name).startswith("..")
            if is_own and not (is_below and os.path.lexists(os.path.join(found.folder, name))):
                raise ConfigError(
                    f"{name} would not be there: {found.script} is in {found.folder}, and that folder is sent",
                    hint=f"name it by its whole path if the nodes have it; or put both into one folder; or send "
                    f"only that of the script, and name it as seen from there: cd {found.folder} first",
                )


def is_script(word: str) -> bool:
    """Whether a word alone says that it names a script."""
    return word.endswith(_ENDINGS) and not word.startswith("-")


def _text_of(command: Sequence[str]) -> str | None:
    program, *flags = command[:-1] or [""]  # such as bash -e -c TEXT, bash -lc TEXT
    is_text = _SHELL.fullmatch(os.path.basename(program)) and all(_FLAG.fullmatch(one) for one in flags)
    return command[-1].strip() if is_text and flags and flags[-1].endswith("c") else None


def _is_elsewhere(word: str) -> bool:
    return word.startswith(("/", "~")) or ".." in word.split("/")


def _is_within(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


# --- whether a script knows an option ---------------------------------------------------------------------------------
# Reads the source of a Python script. Nothing is run.


# Packages that read no command line unless the script says which options there are.
_SILENT = frozenset({"click", "matplotlib", "numpy", "pandas", "sklearn", "torch", "torchvision", "tqdm", "ugro"})
_HANDS_ON = frozenset({"importlib", "runpy", "subprocess", "multiprocessing"})  # to code that is not read here
# Each of them makes a script that may take any option.
_TAKES_ANY = frozenset(
    {"parse_known_args", "parse_known_intermixed_args", "argv", "orig_argv", "REMAINDER", "UNPROCESSED",
     "ignore_unknown_options", "allow_extra_args", "exec", "eval", "__import__"}
)  # fmt: skip


class Knows(Enum):
    YES = "yes"  # its source has the option
    MAYBE = "maybe"
    NO = "no"


def knows(source: str, option: str) -> Knows:
    """``option``: such as ``--lr``, of which the source may also have a longer one: argparse takes a beginning.

    One with a single dash, such as ``-n``, has to be there as it is.
    """
    word = option.removeprefix("--")
    forms = {word, word.replace("-", "_"), word.replace("_", "-")}
    is_short = word == option
    if any((f"{mark}{form}{mark}" if is_short else f"--{form}") in source for form in forms for mark in "'\""):
        return Knows.YES
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Knows.MAYBE
    return Knows.MAYBE if any(_is_doubtful(node, forms) for node in nodes) else Knows.NO


def _is_doubtful(node: ast.AST, forms: set[str]) -> bool:
    match node:
        case ast.Import(names=names):
            return any(_may_parse(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            return level > 0 or _may_parse(module or "") or any(alias.name in _TAKES_ANY for alias in names)
        case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
            return word in _TAKES_ANY or word in forms
        case ast.Constant(value=str(word)):
            return word in forms
    return False


def _may_parse(module: str) -> bool:
    first = module.partition(".")[0]
    return first in _HANDS_ON or (first not in _SILENT and first not in sys.stdlib_module_names)


# --- programs that travel with a job ----------------------------------------------------------------------------------
# They are sent as text: any Python on a node runs them, and nothing is installed there.


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
