"""Adds a node to the cluster file's text, or removes one; comments and layout stay.

The edited text is read again: if anything but that one node changed, the edit is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ugro.config.document import compose
from ugro.config.kinds import BadValueError
from ugro.config.layout import Layout
from ugro.config.load import parse_config
from ugro.config.names import NODE_NAME
from ugro.config.problems import dotted, nearest
from ugro.config.schema import Config, NodeEntry
from ugro.config.yamltext import flow
from ugro.core.errors import ConfigError, NotFound, UsageError
from ugro.core.node import NodeSpec, Role
from ugro.core.support.state_dir import CLUSTER_FILE


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
