"""The text that ``ugro init`` writes: a new cluster file, or an existing one with more nodes. It touches no files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ugro.cli.output import clean
from ugro.config.edit import add_node
from ugro.core.node import NodeReport, NodeSpec
from ugro.core.support.destination import Destination
from ugro.core.support.quantity import format_size


def new_text(reports: Sequence[NodeReport], ssh_config: str | None, *, has_local: bool) -> str:
    """A further name for a machine becomes a comment."""
    names: set[str] = set()
    distinct = [report for report in reports if report.same_as is None]
    lines = ["# The machines of this cluster. Edit it at any time: the agent reads changes by itself.", "nodes:"]
    if has_local or not distinct:
        name = _unique(os.uname().nodename, names)
        lines.append(f"  {name}: {{transport: local, role: master}}  # this machine")
    lines += [f"  {_entry(report, names)}" for report in distinct]
    second = [f"{report.name}: the same machine as {report.same_as}" for report in reports if report.same_as]
    lines += [f"  # {_on_one_line(text)}" for text in second]
    if ssh_config:
        lines += ["ssh:", f"  config_file: {json.dumps(ssh_config)}"]
    return "\n".join(lines) + "\n"


def with_nodes(text: str, path: Path, known: Sequence[NodeSpec], words: Sequence[str], *, adds_local: bool) -> str:
    """Adds hosts to a file; everything that is in it stays as it is."""
    names = {node.name for node in known}
    if adds_local and not any(node.transport == "local" for node in known):
        text = add_node(text, _unique(os.uname().nodename, names), {"transport": "local"}, file=str(path))
    for word in words:
        name, fields = _node(word, names)
        text = add_node(text, name, fields, file=str(path))
    return text


def is_known(word: str, known: Collection[NodeSpec]) -> bool:
    """Whether a host, as the user or ssh's configuration names it, is a node already."""
    to = Destination.parse(word)
    return any(
        node.name == word or ((node.host or node.name), node.user, node.port) == (to.host, to.user, to.port)
        for node in known
        if node.transport == "ssh"
    )


def _entry(report: NodeReport, names: set[str]) -> str:
    name, fields = _node(report.name, names)
    text = ", ".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
    return f"{name}:" + (f" {{{text}}}" if text else "") + f"  # {_remark(report)}"


def _node(word: str, names: set[str]) -> tuple[str, dict[str, object]]:
    """A name that is not taken yet, and the fields that the file needs."""
    to = Destination.parse(word)
    name = _unique(to.host, names)
    fields = {"host": to.host if name != to.host else None, "user": to.user, "port": to.port}
    return name, {key: value for key, value in fields.items() if value is not None}


def _remark(report: NodeReport) -> str:
    if report.facts is None or report.machine is None:
        return _on_one_line(str(report.error))
    gpus = ", ".join(gpu.model for gpu in report.facts.gpus) or "no GPU"
    size = format_size(report.machine.memory_total_bytes)
    return _on_one_line(f"{gpus}; {report.machine.cores} cores, {size}")


def _on_one_line(text: str) -> str:
    """A comment ends with its line, and YAML allows no control characters in it."""
    return re.sub(r"\s+", " ", clean(text))


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
