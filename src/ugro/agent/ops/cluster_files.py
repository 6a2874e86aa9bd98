"""The cluster file that ``ugro init`` writes: a new one, or an existing one with more nodes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ugro.config.allowance import Allowances, Effects, allow, keep_allowed
from ugro.config.edit import add_node, write_atomically
from ugro.config.load import parse_config, read_text
from ugro.core.cluster_file import ClusterFacts, ClusterWish, KnownHost, NewHost
from ugro.core.node import NodeSpec
from ugro.core.support.destination import Destination


def read(path: Path) -> ClusterFacts:
    """The file alone, without the environment."""
    config = parse_config(read_text(path), path, {})
    file = config.ssh.config_file
    return ClusterFacts(
        tuple(
            KnownHost(node.name, Destination(node.host or node.name, node.user, node.port))
            for node in config.nodes
            if node.transport == "ssh"
        ),
        any(node.transport == "local" for node in config.nodes),
        os.path.abspath(os.path.expanduser(file)) if file else None,
    )


def write(path: Path, wish: ClusterWish, allowances: Allowances) -> None:
    """Writes a new file, or adds hosts to one; everything that is in it stays as it is.

    A new one is the user's own, and allowed by that; another one stays allowed if it was.
    """
    if wish.is_new:
        text = new_text(wish)
        write_atomically(path, text)
        allow(allowances, Effects.of(text, path))
        return
    before = read_text(path)
    edited = with_hosts(before, path, parse_config(before, path, {}).nodes, wish)
    if edited != before:
        keep_allowed(allowances, path, before, edited)
        write_atomically(path, edited)


def new_text(wish: ClusterWish) -> str:
    """A further name for a machine becomes a comment."""
    names: set[str] = set()
    distinct = [host for host in wish.hosts if host.same_as is None]
    lines = ["# The machines of this cluster. Edit it at any time: the agent reads changes by itself.", "nodes:"]
    if wish.has_local or not distinct:
        name = _unique(os.uname().nodename, names)
        lines.append(f"  {name}: {{transport: local, role: master}}  # this machine")
    lines += [f"  {_entry(host, names)}" for host in distinct]
    second = [f"{host.word}: the same machine as {host.same_as}" for host in wish.hosts if host.same_as]
    lines += [f"  # {_on_one_line(text)}" for text in second]
    if wish.ssh_config:
        lines += ["ssh:", f"  config_file: {json.dumps(wish.ssh_config)}"]
    return "\n".join(lines) + "\n"


def with_hosts(text: str, path: Path, known: Sequence[NodeSpec], wish: ClusterWish) -> str:
    names = {node.name for node in known}
    if wish.has_local and not any(node.transport == "local" for node in known):
        text = add_node(text, _unique(os.uname().nodename, names), {"transport": "local"}, file=str(path))
    for host in wish.hosts:
        if host.same_as is None:
            name, fields = _node(host.word, names)
            text = add_node(text, name, fields, file=str(path))
    return text


def _entry(host: NewHost, names: set[str]) -> str:
    name, fields = _node(host.word, names)
    text = ", ".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
    return f"{name}:" + (f" {{{text}}}" if text else "") + f"  # {_on_one_line(host.remark)}"


def _node(word: str, names: set[str]) -> tuple[str, dict[str, object]]:
    """A name that is not taken yet, and the fields that the file needs."""
    to = Destination.parse(word)
    name = _unique(to.host, names)
    fields = {"host": to.host if name != to.host else None, "user": to.user, "port": to.port}
    return name, {key: value for key, value in fields.items() if value is not None}


def _on_one_line(text: str) -> str:
    """A comment ends with its line, and YAML allows no control characters in it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in re.sub(r"\s+", " ", text))


def _unique(host: str, names: set[str]) -> str:
    """A node name made from a host name; no name is used twice."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._")[:50] or "node"
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", base):  # a number to other readers of YAML
        base = f"node-{base}"
    name, number = base, 2
    while name in names:
        name, number = f"{base}-{number}", number + 1
    names.add(name)
    return name
