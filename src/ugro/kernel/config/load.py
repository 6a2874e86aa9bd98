"""From a cluster file and the environment to one frozen ``Config``, or one error that says where to look."""

from __future__ import annotations

import difflib
import functools
import json
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ugro.features.discovery.config import DiscoverySection
from ugro.kernel.access.model import USER
from ugro.kernel.config.document import Document, read_document
from ugro.kernel.config.kinds import BadValueError, Kind, escaped, flow, shown
from ugro.kernel.config.schema import Config, NodeEntry, Settings
from ugro.kernel.config.section import NODE_NAME, Key, KeyPath, Problem, Section, config_error, nearest
from ugro.kernel.links.model import NodeSpec, Role
from ugro.kernel.support.errors import ConfigError
from ugro.kernel.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE

# --- environment variables --------------------------------------------------------------------------------------------
# ``UGRO_<SECTION>_<KEY>`` overrides a key of the cluster file, unless the key is a map.


S = TypeVar("S", bound=Section)

PREFIX = "UGRO_"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    section: str | None  # None for a key of the top level
    key: str
    kind: Kind
    example: str


@functools.cache
def variables() -> Mapping[str, Variable]:
    found: list[Variable] = []
    for name, declared in Settings.known_keys().items():
        if declared.section is not None:
            found += [_variable(one, name) for one in declared.section.known_keys().values()]
        else:
            found.append(_variable(declared, None))
    return {variable.name: variable for variable in found}


def with_environment(settings: Settings, env: Mapping[str, str]) -> Settings:
    """An empty variable counts as not set; ``null`` clears a key that may be empty."""
    known = variables()
    _refuse_misspelt(env, known)
    for name, variable in known.items():
        if is_set(name, env):
            settings = _override(settings, variable, env[name].strip())
    return settings


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The names of settings that two environments give different values."""
    return tuple(name for name in sorted(variables()) if _given(name, ours) != _given(name, theirs))


def is_set(name: str, env: Mapping[str, str]) -> bool:
    return _given(name, env) != ""


def _given(name: str, env: Mapping[str, str]) -> str:
    return env.get(name, "").strip()


def _variable(declared: Key, section: str | None) -> Variable:
    name = f"{PREFIX}{section}_{declared.name}" if section else f"{PREFIX}{declared.name}"
    return Variable(name.upper(), section, declared.name, declared.kind, _text(declared.example))


def _text(example: object) -> str:
    if isinstance(example, tuple | list):
        return ",".join(map(str, example))
    if isinstance(example, str):
        return example
    return json.dumps(example) if isinstance(example, dict) else flow(example)


def _override(settings: Settings, variable: Variable, text: str) -> Settings:
    try:
        value = variable.kind.parse(variable.kind.from_text(text))
    except BadValueError as error:
        hint = f"for example: {variable.name}={variable.example}"
        raise ConfigError(f"{variable.name}: {error.message}", hint=hint) from error
    if variable.section is None:
        return _with(settings, variable.key, value)
    return _with(settings, variable.section, _with(getattr(settings, variable.section), variable.key, value))


def _with(section: S, key: str, value: object) -> S:
    changes: dict[str, Any] = {key: value, "given_keys": section.given_keys | {key}}
    return replace(section, **changes)


def _refuse_misspelt(env: Mapping[str, str], known: Mapping[str, Variable]) -> None:
    """UGRO_SSH_TIMOUT must not be ignored silently. UGRO's other variables are not this close to any of these."""
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.93)
        if near:
            raise ConfigError(f"{name}: unknown variable", hint=f"did you mean {near[0]}?")


# --- loading a file ---------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 1024 * 1024

_NODES_HINT = "for example: nodes: [gpu1, gpu2]"
_KNOWN, _CHOSEN = "UGRO_CHANNELS", "UGRO_ALERTS_CHANNELS"
_FIELDS = "{ip: 192.168.1.11, user: ann}"
_MAP_HINT = f"a node with fields needs the map form: gpu1: {_FIELDS}"


def load_config(path: Path | None, env: Mapping[str, str]) -> Config:
    if path is None:
        settings = with_environment(Settings(), env)
        return _config(settings, (_this_machine(settings),), None, env)
    return parse_config(read_text(path), path, env)


def parse_config(text: str, path: Path, env: Mapping[str, str]) -> Config:
    file = escaped(str(path))
    document = read_document(text, file)
    tree = document.tree
    if not isinstance(tree, dict):
        problem = Problem(1, "", f"expected a map of keys to values, got {shown(tree)}", _NODES_HINT)
        raise config_error(file, [problem])
    _refuse_foreign(file, tree)
    settings = document.read(Settings, {name: value for name, value in tree.items() if name != "nodes"})
    # A misspelt "nodes" is one mistake, and the misspelt line is where to look.
    finds_some = settings is not None and settings.section(DiscoverySection).has_sources
    needs_nodes = "nodes" in tree or not (document.problems or finds_some)
    entries = _entries(tree.get("nodes"), document) if needs_nodes else {}
    if document.problems or settings is None:
        raise config_error(file, document.problems)
    settings = with_environment(settings, env)
    nodes = tuple(entry.spec(name, settings) for name, entry in entries.items())
    _expect_own_folders(document, settings, nodes)
    if document.problems:
        raise config_error(file, document.problems)
    return _config(settings, nodes, path, env)


def _expect_own_folders(document: Document, settings: Settings, nodes: tuple[NodeSpec, ...]) -> None:
    """Where jobs run in the accounts of their users; also for nodes that are yet to be found."""
    hint = "choose one below ~, or with {user}: /data/{user}/ugro"
    for name in [node.name for node in nodes if node.account is not None and not _is_personal(node.remote_root)]:
        message = f"jobs on {name} run in accounts of their users, who cannot share one remote_root"
        document.note(("nodes",), message, hint)
    is_found = settings.section(DiscoverySection).has_sources and settings.team.account is not None
    if is_found and not _is_personal(settings.remote_root):
        message = "jobs on nodes that are found run in accounts of their users, who cannot share one remote_root"
        document.note(("remote_root",), message, hint)


def _is_personal(folder: str) -> bool:
    return USER in folder or folder.startswith("~/")


def _refuse_foreign(file: str, tree: Mapping[str, object]) -> None:
    """Other programs have a cluster.yaml, too: its first unknown key would be a misleading complaint."""
    if len(tree) > 1 and not set(tree) & {"nodes", *Settings.known_keys()} and not nearest("nodes", map(str, tree)):
        raise ConfigError(
            f"{file}: not a cluster file of UGRO: it has no nodes, but {', '.join(map(shown, list(tree)[:3]))}",
            hint=f"if it is another program's, name yours: ugro --cluster FILE …, or set {CLUSTER_VARIABLE}",
        )


def read_text(path: Path) -> str:
    """The file as it is, line ends included."""
    try:
        # Looked at before it is opened: opening a named pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: not a file", hint=f"name the file itself, such as {path / CLUSTER_FILE}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB", hint="this does not look like a cluster file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", hint="save the file as UTF-8") from error


def _cannot_read(path: Path, error: OSError | ValueError, hint: str | None = None) -> ConfigError:
    # A ValueError is a path with a NUL in it.
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{escaped(str(path))}: cannot be read: {(reason or 'not a path').lower()}", hint=hint)


def _config(settings: Settings, nodes: tuple[NodeSpec, ...], path: Path | None, env: Mapping[str, str]) -> Config:
    values = {name: getattr(settings, name) for name in Settings.known_keys()}
    config = Config(**values, nodes=nodes, path=path, given_keys=settings.given_keys)
    try:
        config.check()
    except BadValueError as error:
        # The file alone was right: a variable has changed one of two keys that must agree.
        raise _disagreement(error, env) from error
    return config


def _disagreement(error: BadValueError, env: Mapping[str, str]) -> ConfigError:
    if is_set(_CHOSEN, env):
        place = _KNOWN if is_set(_KNOWN, env) else "channels in the cluster file"
        return ConfigError(f"{_CHOSEN}: {error.message}", hint=f"add it to {place}")
    message = f"{_KNOWN}: {error.message}, which alerts.channels in the cluster file names"
    return ConfigError(message, hint=f"add it to {_KNOWN}, or choose other channels with {_CHOSEN}")


def _this_machine(settings: Settings) -> NodeSpec:
    word = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:64]
    entry = NodeEntry(role=Role.MASTER, transport="local")
    return entry.spec(word or "localhost", settings)


def _entries(nodes: object, document: Document) -> dict[str, NodeEntry]:
    if not nodes or not isinstance(nodes, dict | list):
        message = f"expected a list of names or a map of nodes, got {shown(nodes) if nodes else 'none'}"
        document.note(("nodes",), message, _NODES_HINT)
        return {}
    entries: dict[str, NodeEntry] = {}
    masters: list[str] = []
    for path, name, fields in _named(nodes, document):
        entry = document.read(NodeEntry, fields, path, hint=f"for example: {name}: {_FIELDS}")
        if entry is None:
            continue
        entries[name] = entry
        if entry.role == Role.MASTER:
            masters.append(name)
    for name in masters[1:]:
        line = document.line_of(("nodes", masters[0], "role"))
        message = f"a second master; {masters[0]} is one already, in line {line}"
        document.note(("nodes", name, "role"), message, "make one of them a worker")
    return entries


def _named(
    nodes: dict[str, object] | list[object], document: Document
) -> Iterator[tuple[KeyPath, str, object]]:
    """Each node's place, name and fields, in either form; a node without a valid name is noted and left out."""
    found: list[tuple[KeyPath, object, object]]
    if isinstance(nodes, dict):
        found = [(("nodes", name), name, fields) for name, fields in nodes.items()]
    else:
        found = [(("nodes", index), name, None) for index, name in enumerate(nodes)]
    first_lines: dict[str, int] = {}
    for path, name, fields in found:
        line = document.line_of(path)
        try:
            word = NODE_NAME.parse(name)
        except BadValueError as error:
            hint = error.hint or (_MAP_HINT if isinstance(nodes, list) else "for example: gpu-1")
            document.problems.append(Problem(line, "nodes", error.message, hint))
            continue
        if word in first_lines:
            message = f"given twice, in line {first_lines[word]} and in line {line}"
            document.problems.append(Problem(line, f"nodes.{word}", message, "remove one of them"))
            continue
        first_lines[word] = line
        yield path, word, fields
