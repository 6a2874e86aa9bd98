"""A part of a configuration file: a map of keys, declared as a dataclass.

    @section
    class Ssh(Section):
        timeout: float = key(10.0, Duration(), "Longest wait for an answer, in seconds.")

The declaration is all there is: it reads the map, describes it for the reference page, names the environment variables
of the cluster file and the command-line options of jobs, and writes a job file. It does without pydantic because the
command line needs it too, and must start fast.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from ugro.kernel.config.kinds import BadValueError, Kind, OrNull, Text, expect_at_most, flow, printable, shown
from ugro.kernel.support.errors import ConfigError

# --- the texts that both files have -----------------------------------------------------------------------------------
# These functions know what names of nodes, hosts, users, jobs and channels, labels, paths and lines look like.


# OpenSSH refuses these too: such names reach a shell through ProxyCommand and Match exec.
_SHELL_CHARACTERS = frozenset("'`\"$;&<>|(){}")
# Linux passes no longer word to a program.
_LONGEST_WORD_BYTES = 128 * 1024 - 1


def is_node_name(text: str) -> bool:
    return len(text) <= 64 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None


def is_job_name(text: str) -> bool:
    """Not a number and not ``last``: where a job is named, those mean an id and the newest job."""
    return is_node_name(text) and not text.isdigit() and text != "last"


def is_channel_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.replace("-", "").replace("_", "").isalnum() and text[0] != "-"


def is_host(text: str) -> bool:
    return _is_ssh_word(text) and not set("@/\\,") & set(text)


def is_user(text: str) -> bool:
    return _is_ssh_word(text) and not set("/,") & set(text) and not text.endswith("\\")


def is_label(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable() and not set(" ,") & set(text) and text[0] not in "-@"


def is_line(text: str) -> bool:
    return 0 < len(text) <= 1024 and text.isprintable() and text == text.strip()


def is_program(text: str) -> bool:
    return is_line(text) and not text.startswith("-")


def is_snippet(text: str) -> bool:
    return bool(text.strip()) and is_word(text)


def is_word(text: str) -> bool:
    """Whether a program can be given it as an argument."""
    # Bytes of a command line that are not UTF-8 come as lone surrogates, and reach the program as the same bytes.
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) <= _LONGEST_WORD_BYTES


def is_local_path(text: str) -> bool:
    """With the home directory put in. Not a relative one: the agent's working directory is not its user's."""
    return is_line(text) and text.startswith("/")


def is_path_on_node(text: str) -> bool:
    return is_line(text) and text.startswith(("/", "~"))


def is_path_without_parent(text: str) -> bool:
    # A leading "-" would be an option to the program that is given the path.
    return is_line(text) and not text.startswith("-") and ".." not in text.split("/")


def is_path_inside(text: str) -> bool:
    return is_path_without_parent(text) and not text.startswith(("/", "~"))


def is_directory_on_node(text: str) -> bool:
    """A directory below something: UGRO must not have all of / or of a home directory as its own."""
    inside = re.fullmatch(r"(?:~[^/]*)?/(.*)", text)
    parts = [part for part in inside[1].split("/") if part not in ("", ".")] if inside else []
    return is_line(text) and bool(parts) and ".." not in parts


def _is_ssh_word(text: str) -> bool:
    # A leading "-" would be an option to ssh.
    is_one_word = 0 < len(text) <= 255 and text.isprintable() and " " not in text and text[0] != "-"
    return is_one_word and not _SHELL_CHARACTERS & set(text)


class UserName(Text):
    """As a shell would have the current user's: no shell is run for it."""

    _CURRENT = frozenset({"$(whoami)", "`whoami`", "$(id -un)", "$USER", "${USER}", "$LOGNAME", "${LOGNAME}"})

    def parse(self, value: object) -> str:
        return super().parse(_own_name() if isinstance(value, str) and value in self._CURRENT else value)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account without a name: ssh has no name for it either
        return str(os.geteuid())


NODE_NAME = Text("a node's name: letters, digits and . _ -, at most 64", is_node_name, metavar="NAME")
JOB_NAME = Text(
    "a job's name: letters, digits and . _ -, at most 64, not a number and not last", is_job_name, metavar="NAME"
)
CHANNEL_NAME = Text("a channel's name: letters, digits, - and _, at most 64", is_channel_name, metavar="CHANNEL")
HOST = Text("a host name or an address, without spaces, @ or a leading -", is_host)
USER = UserName("a user name, without spaces or a leading -", is_user)
LABEL = Text("a word of at most 64 characters, without spaces or commas", is_label, metavar="LABEL")
LINE = Text("a text on one line", is_line)
LOCAL_PATH = Text("a path that starts with / or ~", is_local_path, expands_home=True, metavar="PATH")
NODE_DIRECTORY = Text("a directory on the node such as ~/grid_workspace or /data/ugro", is_directory_on_node)
SNIPPET = Text("a text for a shell, of at most 128 KiB", is_snippet)
WORD = Text("words as texts that a program can be given", is_word)


# --- problems of a file -----------------------------------------------------------------------------------------------
# Many problems become one error, in the order of their lines.


_MOST_SHOWN = 20
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    line: int
    key: str  # dotted; empty for the file as a whole
    message: str
    hint: str | None = None


def config_error(file: str, problems: Sequence[Problem]) -> ConfigError:
    first, *others = sorted(problems, key=lambda problem: problem.line)
    more = f" (and {len(others)} more)" if others else ""
    shown = [(_said(file, one), one.hint) for one in others[:_MOST_SHOWN]]
    return ConfigError(f"{_said(file, first)}{more}", hint=first.hint, others=shown)


def _said(file: str, problem: Problem) -> str:
    key = f"{problem.key}: " if problem.key else ""
    return f"{file}:{problem.line}: {key}{problem.message}"


def dotted(path: KeyPath) -> str:
    """Without the positions in lists: the line says which item is meant."""
    return ".".join(printable(part) for part in path if isinstance(part, str))


def nearest(word: str, known: Iterable[str]) -> str | None:
    import difflib  # only a mistake needs it

    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


# --- sections ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_MOST_KEYS = 1_000
_KEYS: dict[type, dict[str, Key]] = {}
_UNUSED: dict[type, object] = {}
_MADE: dict[type, object] = {}
NO_OPTION = ""  # a key that is too much for a command line


@dataclass(frozen=True)
class Key:
    """What a section's declaration says about one of its keys."""

    kind: Kind
    meaning: str = ""
    sample: Any = None
    option: str | None = None  # the command-line option, where it is not called as the key
    attribute: str | None = None  # of what the section makes, where it is not called as the key
    name: str = ""
    default: Any = None
    field: str = ""  # of the dataclass: a key that is a word of Python ends with _ there

    @property
    def section(self) -> type[Section] | None:
        return self.kind.section if isinstance(self.kind, Nested) else None

    @property
    def example(self) -> Any:
        if self.sample is not None:
            return self.sample
        if self.section is None:
            return self.default
        first = next(iter(self.section.known_keys().values()))
        return {first.name: first.example}


def key(
    default: T,
    kind: Kind,
    meaning: str,
    *,
    example: object = None,
    option: str | None = None,
    to: str | None = None,
) -> T:
    """A key that defaults to None may be null. The first sentence of ``meaning`` is the help of its option."""
    declared = Key(OrNull(kind) if default is None else kind, meaning, example, option, to)
    if isinstance(default, dict):
        return cast(T, field(default_factory=lambda: dict(default), metadata={"key": declared}))
    return field(default=default, metadata={"key": declared})


def nested(section: type[T]) -> T:
    """A key whose value is a map of its own."""
    kind = Nested(cast(type[Section], section))
    default = partial(_unused, section)
    return field(default_factory=default, metadata={"key": Key(kind, section.__doc__ or "")})


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, kw_only=True)
class Section:
    noun: ClassVar[str] = "this map"
    other_keys: ClassVar[tuple[str, ...]] = ()  # keys of the same map that are read elsewhere
    elsewhere: ClassVar[Mapping[str, str]] = {}  # keys that people look for in this map: a hint where they stand
    makes: ClassVar[Callable[..., Any] | None] = None
    # Which keys the file has; a default that the file spells out is among them.
    given_keys: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def known_keys(cls) -> dict[str, Key]:
        if cls not in _KEYS:
            found = (_key(one) for one in fields(cls) if "key" in one.metadata)
            _KEYS[cls] = {one.name: one for one in found}
        return _KEYS[cls]

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The keys whose values are maps of their own."""
        return {name: one.section for name, one in cls.known_keys().items() if one.section is not None}

    def check_within(self, whole: Any) -> None:
        """Raises BadValueError for what does not fit the rest of the file."""

    @classmethod
    def read(cls, value: object) -> Self:
        """Raises BadValueError, with all that is wrong."""
        if isinstance(value, cls):
            return value
        # "ssh:" with every key below it commented out is null to YAML, and means the defaults.
        if not isinstance(value, dict | None):
            raise BadValueError(f"expected a map of keys to values, got {shown(value)}")
        tree: Mapping[str, object] = value or {}
        expect_at_most(_MOST_KEYS, tree, "keys")
        errors = [cls.unknown(str(name)) for name in tree if name not in cls.known_keys()]
        values: dict[str, Any] = {}
        for name, declared in cls.known_keys().items():
            try:
                if name in tree:
                    values[declared.field] = declared.kind.parse(tree[name])
            except BadValueError as error:
                errors += error.within(name, hint=f"for example: {name}: {flow(declared.example)}").all
        if errors:
            raise BadValueError(errors[0].message, hint=errors[0].hint, at=errors[0].at, more=errors[1:])
        found = cls(**values, given_keys=frozenset(name for name in tree if name in cls.known_keys()))
        found.check()
        return found

    def check(self) -> None:
        """Raises BadValueError for keys that do not agree with each other."""

    def made(self) -> dict[str, Any]:
        """The arguments for ``makes``: values by attribute, with nested sections made first."""
        found = self.known_keys().items()
        return {declared.attribute or name: made(getattr(self, declared.field)) for name, declared in found}

    @classmethod
    def of(cls, made: object, **others: Any) -> Self:
        """The section that makes ``made``; ``others`` are keys that are not simply its attributes."""
        values = dict(others)
        for name, declared in cls.known_keys().items():
            if name not in others:
                value = getattr(made, declared.attribute or name)
                values[name] = declared.section.of(value) if declared.section else value
        return cls(**values)

    def written(self) -> dict[str, object]:
        """As a file has it: the keys whose values are not the defaults."""
        given = ((name, declared, getattr(self, declared.field)) for name, declared in self.known_keys().items())
        return {name: declared.kind.written(value) for name, declared, value in given if value != declared.default}

    @classmethod
    def unknown(cls, name: str) -> BadValueError:
        known = [*cls.other_keys, *cls.known_keys()]
        near = nearest(name, known)
        others = f"did you mean {near}?" if near else f"the keys of {cls.noun} are {', '.join(known)}"
        return BadValueError("unknown key", hint=cls.elsewhere.get(name, others), at=(name,))


class Nested(Kind):
    expected = "a map of keys to values"

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def parse(self, value: object) -> Section:
        return self.section.read(value)

    def written(self, value: Section) -> object:
        return value.written()


def _key(one: Field[Any]) -> Key:
    default = one.default if one.default_factory is MISSING else one.default_factory()
    declared: Key = one.metadata["key"]
    return replace(declared, name=one.name.removesuffix("_"), default=default, field=one.name)


def made(value: Any) -> Any:
    """What a parsed value stands for in the program."""
    if not isinstance(value, Section) or value.makes is None:
        return value
    kind = type(value)
    return _made_of_unused(kind) if value is _unused(kind) else value.makes(**value.made())


def _unused(kind: type[T]) -> T:
    """A section of which no key is given. Most of a small job's are, and they are all the same one."""
    if kind not in _UNUSED:
        _UNUSED[kind] = kind()
    return cast(T, _UNUSED[kind])


def _made_of_unused(kind: type[Section]) -> Any:
    assert kind.makes is not None
    if kind not in _MADE:
        _MADE[kind] = kind.makes(**_unused(kind).made())
    return _MADE[kind]
