"""Finds the nodes in a cluster file's text, and adds one to it or removes one.

It uses the positions that the YAML parser reports, and validates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from ugro.config.document import compose
from ugro.config.yamltext import flow


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
