"""Adds a node to the cluster file's text, or removes one; comments and layout stay.

The edited text is read again: if anything but that one node changed, the edit is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ugro.kernel.config.document import compose
from ugro.kernel.config.kinds import BadValueError, flow
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config, NodeEntry
from ugro.kernel.config.section import NODE_NAME, dotted, nearest
from ugro.kernel.links.model import NodeSpec, Role
from ugro.kernel.support.errors import ConfigError, NotFound, UsageError
from ugro.kernel.support.state_dir import CLUSTER_FILE

# --- the layout of the text -------------------------------------------------------------------------------------------
# Finds the nodes in the text of a cluster file, adds one or removes one. It uses the positions that the YAML parser
# reports, and validates nothing.


@dataclass(frozen=True, slots=True)
class _Entry:
    """The position of one node in the text: indices of characters, line numbers from 0."""

    name: str
    start: int
    end: int
    first_line: int
    last_line: int


@dataclass(frozen=True, slots=True)
class Layout:
    """An alias refers to text elsewhere, so an edit can be wrong: the caller reads the result again."""

    text: str
    lines: list[str]
    nodes: yaml.CollectionNode
    entries: list[_Entry]

    @classmethod
    def of(cls, text: str, file: str) -> Layout | None:
        root = compose(text, file)
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        nodes = next((value for key, value in pairs if key.value == "nodes"), None)
        if isinstance(nodes, yaml.SequenceNode):
            entries = [_entry(item, item) for item in nodes.value]
        elif isinstance(nodes, yaml.MappingNode):
            entries = [_entry(key, value) for key, value in nodes.value]
        else:
            return None
        return cls(text, text.splitlines(keepends=True), nodes, entries)

    @property
    def is_list(self) -> bool:
        return isinstance(self.nodes, yaml.SequenceNode)

    def with_entry(self, name: str, fields: Mapping[str, object]) -> str:
        last = self.entries[-1]
        if not self.nodes.flow_style:
            return self._with_lines_after(self._end_of_block(last), self._block(last, name, fields))
        words = flow(name) if self.is_list else f"{flow(name)}: {flow(fields)}"
        if self.nodes.end_mark.line > last.last_line and self._begins_its_line(last):
            return self._with_flow_line(last, words)
        return f"{self.text[: last.end]}, {words}{self.text[last.end :]}"

    def without_entry(self, name: str) -> str:
        index = next((i for i, entry in enumerate(self.entries) if entry.name == name), None)
        if index is None:
            return self.text
        entry = self.entries[index]
        if not self.nodes.flow_style:
            return self._without_lines(entry.first_line, self._end_of_block(entry))
        if self._begins_its_line(entry) and re.fullmatch(r"(?s)\s*(,\s*)?(#.*)?", self._rest_of_line(entry)):
            return self._without_lines(entry.first_line, entry.last_line)
        return self._without_flow_entry(index)

    def _block(self, last: _Entry, name: str, fields: Mapping[str, object]) -> list[str]:
        """The new node's lines, in the style of the node above."""
        indent = self._indent_of(last)
        if self.is_list:
            return [f"{indent}- {flow(name)}"]
        above = self.nodes.value[-1][1]
        if not isinstance(above, yaml.MappingNode) or above.flow_style or not fields:
            return [f"{indent}{flow(name)}: {flow(fields)}" if fields else f"{indent}{flow(name)}:"]
        inner = " " * above.value[0][0].start_mark.column
        return [f"{indent}{flow(name)}:", *(f"{inner}{key}: {flow(value)}" for key, value in fields.items())]

    def _with_lines_after(self, line: int, new: list[str]) -> str:
        end = self._line_end(line)
        if self.lines[line].endswith(("\n", "\r")):
            added = [f"{part}{end}" for part in new]
        else:
            added = [f"{end}{part}" for part in new]
        return "".join([*self.lines[: line + 1], *added, *self.lines[line + 1 :]])

    def _with_flow_line(self, last: _Entry, words: str) -> str:
        """On a new line, after the comment of the line above."""
        tail = re.sub(r"#.*", "", self.text[last.end : self.nodes.end_mark.index])
        comma_before, comma_after = ("", ",") if "," in tail else (",", "")
        rest = self._rest_of_line(last)
        new_line = f"{self._indent_of(last)}{words}{comma_after}{self._line_end(last.last_line)}"
        behind = self.text[last.end + len(rest) :]
        return f"{self.text[: last.end]}{comma_before}{rest}{new_line}{behind}"

    def _without_flow_entry(self, index: int) -> str:
        entry = self.entries[index]
        if index + 1 < len(self.entries):
            start, end = entry.start, self.entries[index + 1].start
            gap = self.text[entry.end : end]
        else:
            start, end = self.entries[index - 1].end, entry.end
            gap = self.text[start : entry.start]
        if "#" in gap or "\n" in gap:
            comma = re.match(r"[ \t]*,", self.text[entry.end :])
            start, end = entry.start, entry.end + (comma.end() if comma else 0)
        return f"{self.text[:start]}{self.text[end:]}"

    def _without_lines(self, first: int, last: int) -> str:
        return "".join([*self.lines[:first], *self.lines[last + 1 :]])

    def _end_of_block(self, entry: _Entry) -> int:
        """The entry's last line, with the comments below it that are indented further."""
        line = entry.last_line
        own = re.compile(rf"{self._indent_of(entry)}[ ]+#")
        while line + 1 < len(self.lines) and own.match(self.lines[line + 1]):
            line += 1
        return line

    def _indent_of(self, entry: _Entry) -> str:
        line = self.lines[entry.first_line]
        return line[: len(line) - len(line.lstrip())]

    def _begins_its_line(self, entry: _Entry) -> bool:
        line_start = sum(len(line) for line in self.lines[: entry.first_line])
        return not self.text[line_start : entry.start].strip()

    def _rest_of_line(self, entry: _Entry) -> str:
        return self.text[entry.end : sum(len(line) for line in self.lines[: entry.last_line + 1])]

    def _line_end(self, line: int) -> str:
        content = self.lines[line]
        ending = content[len(content.rstrip("\r\n")) :]
        return ending or ("\r\n" if "\r\n" in self.text else "\n")


def _entry(key: yaml.Node, value: yaml.Node) -> _Entry:
    last = _last_leaf(value)
    # An alias refers to text before its key; then only the key's own position is known.
    end = max(key.end_mark, last.end_mark, key=lambda mark: mark.index)
    return _Entry(str(key.value), key.start_mark.index, end.index, key.start_mark.line, end.line)


def _last_leaf(node: yaml.Node) -> yaml.Node:
    """The parser reports the end of a block where the next item begins; its last leaf has the real end."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(last, tuple):
            key, value = last
            node = value if value.end_mark.index >= key.end_mark.index else key
        else:
            node = last
    return node


# --- edits that are read again ----------------------------------------------------------------------------------------


def add_node(text: str, name: str, fields: Mapping[str, object], *, file: str = CLUSTER_FILE) -> str:
    """``fields`` as in the file; one that is None is left out. A text without content gets its first node."""
    entry, needed = _checked(name, fields)
    if compose(text, file) is None:
        return _with_first(text, f"{flow(name)}: {flow(needed)}" if needed else f"- {flow(name)}")
    before = parse_config(text, Path(file), {})
    _refuse_clash(before, name, entry)
    layout = Layout.of(text, file)
    if layout and layout.is_list and needed:
        raise ConfigError(
            f"{file}: nodes is a list of names, and {name} needs {', '.join(needed)}",
            hint=f"turn the list into a map, with {name}: {flow(needed)}, or put them into ~/.ssh/config",
        )
    edited = layout.with_entry(name, needed) if layout else _with_first(text, f"{flow(name)}: {flow(needed)}")
    added = entry.spec(name, before)
    if not _is_only_change(before, edited, file, {**_by_name(before), name: added}):
        line = f"- {flow(name)}" if layout and layout.is_list else f"{flow(name)}: {flow(needed)}"
        raise _by_hand(file, f"add under nodes: {line}")
    return edited


def remove_node(text: str, name: str, *, file: str = CLUSTER_FILE) -> str:
    before = parse_config(text, Path(file), {})
    rest = _by_name(before)
    if name not in rest:
        near = nearest(name, rest)
        hint = f"did you mean {near}?" if near else f"the nodes are {', '.join(rest)}" if rest else "it lists no nodes"
        raise NotFound(f"no node named {name} in {file}", hint=hint)
    if len(rest) == 1:
        raise UsageError(
            f"{name} is the only node in {file}",
            hint="add another one first, or remove the file to use this machine",
        )
    del rest[name]
    layout = Layout.of(text, file)
    edited = layout.without_entry(name) if layout else text
    if not _is_only_change(before, edited, file, rest):
        raise _by_hand(file, f"remove {name} under nodes")
    return edited


def _checked(name: str, fields: Mapping[str, object]) -> tuple[NodeEntry, dict[str, object]]:
    """The node, and its fields that differ from the defaults."""
    try:
        NODE_NAME.parse(name)
    except BadValueError as error:
        raise UsageError(error.message, hint="for example: gpu1") from error
    given = {key: value for key, value in fields.items() if value is not None}
    try:
        entry = NodeEntry.read(given)
    except BadValueError as error:
        raise UsageError(f"{dotted((name, *error.at))}: {error.message}", hint=error.hint) from error
    default = NodeEntry()
    return entry, {key: value for key, value in given.items() if getattr(entry, key) != getattr(default, key)}


def _refuse_clash(before: Config, name: str, entry: NodeEntry) -> None:
    if name in _by_name(before):
        raise UsageError(f"there is a node named {name} already", hint="choose another name, or remove it first")
    masters = [node.name for node in before.nodes if node.role == Role.MASTER]
    if masters and entry.role == Role.MASTER:
        raise UsageError(f"{masters[0]} is the master already", hint=f"add {name} as a worker")


def _with_first(text: str, entry: str) -> str:
    """For a file without `nodes`: an empty one, or one whose nodes are found."""
    start = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{start}nodes:\n  {entry}\n"


def _by_name(config: Config) -> dict[str, NodeSpec]:
    return {node.name: node for node in config.nodes}


def _is_only_change(before: Config, edited: str, file: str, expected: Mapping[str, NodeSpec]) -> bool:
    try:
        after = parse_config(edited, Path(file), {})
    except ConfigError:
        return False
    return _by_name(after) == expected and replace(after, nodes=before.nodes) == before


def _by_hand(file: str, what: str) -> ConfigError:
    return ConfigError(f"edit {file} by hand: UGRO cannot change its layout safely", hint=what)


def write_atomically(path: Path, text: str | bytes, *, mode: int | None = None) -> None:
    """A reader sees the old text or the new one. A symbolic link is kept, and the file's mode unless one is given."""
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(8)}")
    try:
        if mode is None and real.exists():
            mode = stat.S_IMODE(real.stat().st_mode)
        _write_synced(temporary, text, mode)
        os.replace(temporary, real)
        _sync_directory(real.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {(error.strerror or 'unknown').lower()}") from error


def _write_synced(path: Path, text: str | bytes, mode: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    with open(descriptor, "wb") as file:
        if mode is not None:
            os.fchmod(descriptor, mode)
        file.write(text.encode("utf-8") if isinstance(text, str) else text)
        file.flush()
        os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
