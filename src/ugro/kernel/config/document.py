"""YAML text as plain values, each with the line it came from, and duplicate keys found.

The text is untrusted: its depth and its aliases are bounded, it creates no objects, and every error in it becomes a
``ConfigError``. This module does not know what the keys mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import yaml

from ugro.kernel.config.kinds import BadValueError, Limits, printable
from ugro.kernel.config.section import KeyPath, Problem, Section, config_error, dotted
from ugro.kernel.support.errors import ConfigError
from ugro.kernel.support.quantities import format_size

S = TypeVar("S", bound=Section)

MAX_DEPTH = 32


CLUSTER_LIMITS = Limits()
_EXAMPLE = "name the nodes, for example: nodes: [gpu1, gpu2]"

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = (f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value", f"{_TAG}merge")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# The YAML library's most frequent messages, and what they mean.
_EXPLAINED = (
    ("'\\t'", "a tab cannot indent", "use spaces"),
    ("single document", "a second document begins here", "keep one document: remove this ---"),
    ("alias", "a value that begins with * is an alias to YAML", "put a pattern in quotes: '*.pyc'"),
    ("mapping values", "a second ':' where none can be", "put a value that contains ': ' in quotes"),
    ("could not find expected ':'", "expected a key and a ':'", "write it as key: value"),
)

_Pair = tuple[yaml.Node, yaml.Node, bool]  # key, value, and whether the map has it itself


@dataclass(slots=True)
class Document:
    """``tree`` holds dict, list, str, int, float, bool and None; ``lines`` the line of every key and item."""

    tree: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: KeyPath) -> int:
        """That of the nearest part that is in the file: a missing key has no line of its own."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def note(self, path: KeyPath, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(self.line_of(path), dotted(path), message, hint))

    def read(self, section: type[S], tree: object, at: KeyPath = (), hint: str | None = None) -> S | None:
        """None when something was wrong, which is then in ``problems``."""
        try:
            return section.read(tree)
        except BadValueError as error:
            for one in error.within(*at, hint=hint).all:
                self.note(one.at, one.message, one.hint)
            return None


def read_document(text: str, file: str, limits: Limits = CLUSTER_LIMITS, *, example: str = _EXAMPLE) -> Document:
    """``example``: what an empty file might have."""
    root = compose(text, file, limits)
    if root is None:
        raise ConfigError(f"{file}:1: the file is empty", hint=example)
    walk = _Walk(file, limits)
    walk.document.tree = walk.value(root, ())
    return walk.document


def compose(text: str, file: str, limits: Limits = CLUSTER_LIMITS) -> yaml.Node | None:
    """The YAML nodes with their places in the text; None when there is nothing but comments."""
    if len(text) > limits.bytes or len(text.encode("utf-8", "surrogatepass")) > limits.bytes:
        hint = "a file may have a range instead of many values, and name another file instead of having it inside"
        raise ConfigError(f"{file}: larger than {format_size(limits.bytes)}", hint=hint)
    loader = None
    try:
        loader = _BoundedLoader(text, limits.values)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{file}:{line}: a character that YAML does not allow", hint="remove it, or write it as an escape"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, file) from error
    # ValueError and OverflowError: the library does not check the numbers in escapes such as "\U99999999".
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        line = loader.line + 1 if loader else 1
        raise ConfigError(f"{file}:{line}: not valid YAML", hint="look for an escape that is wrong") from error


class _LimitError(yaml.MarkedYAMLError):
    pass


class _BoundedLoader(yaml.SafeLoader):
    """Composing recurses with the text's depth, so the depth is counted on the way down."""

    def __init__(self, text: str, most_values: int) -> None:
        super().__init__(text)
        self._most_values = most_values
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        self._depth += 1
        self._values += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth > MAX_DEPTH:
            raise _LimitError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        if self._values > self._most_values:
            raise _LimitError(None, None, _many(self._most_values), mark)
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self._depth -= 1
        return node


class _Walk:
    """From YAML nodes to values. Aliases share nodes, so what is counted here is what they expand to."""

    def __init__(self, file: str, limits: Limits) -> None:
        self.document = Document()
        self._most_values = limits.values
        self._file = file
        self._values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._count(node, path)
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, (f"{_TAG}seq",), path)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self._check_tag(node, (f"{_TAG}map",), path)
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, object]:
        entries: dict[str, object] = {}
        for key_node, value_node, is_own in self._pairs(node, path):
            key, line = self._key(key_node, path), key_node.start_mark.line + 1
            if key not in entries:
                self.document.lines[(*path, key)] = line
                entries[key] = self.value(value_node, (*path, key))
            elif is_own:
                message = f"given twice, in line {self.document.lines[(*path, key)]} and in line {line}"
                self._note(line, (*path, key), message, "remove one of them")
        return entries

    def _pairs(self, node: yaml.Node, path: KeyPath, merges: int = 0) -> list[_Pair]:
        """The map's own pairs, then those it merges with ``<<``, which never replace one."""
        self._count(node, path, merges)
        own = [(key, value, True) for key, value in node.value if key.tag != f"{_TAG}merge"]
        sources = [value for key, value in node.value if key.tag == f"{_TAG}merge"]
        merged: list[_Pair] = []
        for source in sources:
            for part in source.value if isinstance(source, yaml.SequenceNode) else [source]:
                if isinstance(part, yaml.MappingNode):
                    merged += [(key, value, False) for key, value, _ in self._pairs(part, path, merges + 1)]
                    self._values += len(part.value)  # the same large map may be merged thousands of times
                else:
                    self._note(part.start_mark.line + 1, path, "expected a map after <<")
        return own + merged

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        # The text itself, whatever it resolves to: a node may be called 1 or on.
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        line = node.start_mark.line + 1
        raise config_error(self._file, [Problem(line, dotted(path), "expected a word before the ':'")])

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text = str(node.value)
        if node.tag == f"{_TAG}null":
            return None
        if node.tag == f"{_TAG}bool":
            return _FLAGS.get(text.lower(), text)
        if node.tag in (f"{_TAG}int", f"{_TAG}float"):
            return _number(text)
        self._check_tag(node, _TEXT_TAGS, path)
        return text

    def _check_tag(self, node: yaml.Node, allowed: tuple[str, ...], path: KeyPath) -> None:
        if node.tag not in allowed:
            tag = printable(str(node.tag).replace(_TAG, "!!"))
            self._note(node.start_mark.line + 1, path, f"the tag {tag} is not supported", "remove it")

    def _count(self, node: yaml.Node, path: KeyPath, merges: int = 0) -> None:
        self._values += 1
        if self._values > self._most_values or len(path) + merges > MAX_DEPTH:
            many = _many(self._most_values)
            raise config_error(self._file, [Problem(node.start_mark.line + 1, dotted(path[:3]), many)])

    def _note(self, line: int, path: KeyPath, message: str, hint: str | None = None) -> None:
        self.document.problems.append(Problem(line, dotted(path), message, hint))


def _many(most: int) -> str:
    return f"too many values (limit {most}); are aliases repeated?"


def _number(text: str) -> object:
    """Decimal only. YAML 1.1 also reads 010 as 8 and 1:30 as 90, which nobody means in a port."""
    plain = text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
    for convert in (int, float):
        try:
            return convert(plain)
        except ValueError:
            continue
    return text


def _syntax_error(error: yaml.MarkedYAMLError, file: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{file}:{mark.line + 1 if mark else 1}"
    if isinstance(error, _LimitError):
        return ConfigError(f"{place}: {error.problem}")
    words = f"{error.context} {error.problem}"
    for fragment, message, hint in _EXPLAINED:
        if fragment in words:
            return ConfigError(f"{place}: {message}", hint=hint)
    what = printable(error.problem or error.context or "cannot be read")
    return ConfigError(f"{place}: not valid YAML: {what}", hint="check the lines above it too")
