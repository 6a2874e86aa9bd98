"""What a cluster file has UGRO do, and which files may have it done.

A file that was found in a folder may come with a repository that somebody else wrote. It is used only after the user
has allowed what it executes, which hosts it sends code to, and what it deletes or opens. Other edits need no allowance.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.features.power.model import WEBHOOK, PowerRule
from ugro.kernel.config.edit import write_atomically
from ugro.kernel.config.kinds import escaped, flow
from ugro.kernel.config.load import parse_config, read_text
from ugro.kernel.config.schema import Config, Settings
from ugro.kernel.config.section import Section
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import ConfigError, Unallowed
from ugro.kernel.support.secrets import masked, without_passwords
from ugro.kernel.support.state_dir import StateDir

# Every other key counts; so does a new one, until it is listed here. ``remote_root`` is part of each node.
HARMLESS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {"remote_root", "health_check", "ray", "training", "monitor", "alerts", "owner", "quotas", "fair_share"}
    ),
    "ssh": frozenset({"timeout", "connect_timeout", "max_retries", "pool_size"}),
    "sync": frozenset({"use_checksums", "max_parallel_transfers", "max_size", "store_limit", "folder_limit"}),
    "cluster": frozenset({"name"}),
    "discovery": frozenset({"leave_after", "interval", "timeout"}),
    "power": frozenset({"suspend_timeout", "resume_timeout", "cool_down", "most_per_hour", "idle_load", "exclude"}),
}
# The lines of an ssh configuration that the user is not shown; a change of any line counts.
_QUIET_OF_SSH = frozenset(
    {
        *("addressfamily", "batchmode", "compression", "connectionattempts", "connecttimeout", "identitiesonly"),
        *("ipqos", "loglevel", "serveralivecountmax", "serveraliveinterval", "tcpkeepalive"),
    }
)
# Where ssh splits a keyword off. It also takes quotes in and beside it, as in Proxy"Command": such a line may be any.
_KEYWORD = re.compile(r"[ \t]*(\w+)(?:[ \t=]|$)", re.ASCII)
_RUNS_HERE = re.compile(
    r"^node \S+ (?:runs this command|is (?:suspended|woken) by)|^discovery\.command: "
    r"|^hooks\.|^power\.(?:suspend|resume|labels): "
    r"|^ssh configuration: (?:(?:\w+command|match|include|\w+provider)\b|(?!\w+(?:[ =]|$)))",
    re.IGNORECASE,
)
_IS_COMMAND = re.compile(rf"{_RUNS_HERE.pattern}|^power\.on_node: ", re.IGNORECASE)  # here or on a node
_MOST_BYTES = 1024 * 1024  # of an ssh configuration
_MOST_PER_FILE = 20  # allowed contents of one file: for a repository with branches
_DEFAULT = NodeSpec("")


@dataclass(frozen=True, slots=True)
class Effects:
    """What one content of a cluster file does: a line for each thing, commands on this machine first."""

    file: str  # without symbolic links
    # For people: variables that look secret are masked. Commands are not, or they could hide what they do.
    lines: tuple[str, ...]
    digest: str  # of all of it, with the secrets
    ssh_config_file: str | None = None  # the ssh configuration that it names
    ssh_config: bytes | None = None  # the content of that

    @classmethod
    def of(cls, text: str, path: Path) -> Effects:
        """Of the file alone, without the environment. Raises ConfigError."""
        config = parse_config(text, path, {})
        named = config.ssh.config_file
        ssh_config = _content(path, named) if named else None
        exact = sorted([*_lines(config, is_masked=False), *_ssh_lines(ssh_config)])
        shown = [*_lines(config, is_masked=True), *_ssh_lines(ssh_config)]
        shown.sort(key=lambda line: (_RUNS_HERE.search(line) is None, line))
        digest = hashlib.sha256(json.dumps(exact).encode()).hexdigest()
        return cls(os.path.realpath(path), tuple(shown), digest, named, ssh_config)


class Allowances:
    """What the user has allowed, in a file of the state directory that only the user can read.

    Two writers at the same moment lose one allowance, never more: the user is asked again.
    """

    def __init__(self, home: StateDir) -> None:
        self.path = home.allowances

    def require(self, effects: Effects) -> None:
        """Raises Unallowed unless exactly these effects were allowed for this file."""
        known = self._files().get(effects.file, [])
        if not any(one["digest"] == effects.digest for one in known):
            before = tuple(known[-1]["lines"]) if known else None
            raise Unallowed(effects.file, effects.digest, effects.lines, before)

    def has(self, effects: Effects) -> bool:
        try:
            self.require(effects)
        except Unallowed:
            return False
        return True

    def add(self, file: str, digest: str, lines: tuple[str, ...]) -> None:
        files = self._files()
        others = [one for one in files.get(file, []) if one["digest"] != digest]
        new = {"digest": digest, "lines": list(lines), "at": round(time.time())}
        self._write({**files, file: [*others, new][-_MOST_PER_FILE:]})

    def remove(self, file: str) -> bool:
        """False if nothing was allowed for this file."""
        files = self._files()
        if files.pop(file, None) is None:
            return False
        self._write(files)
        return True

    def _files(self) -> dict[str, list[dict[str, Any]]]:
        """Nothing is allowed by a file that is damaged or not there."""
        try:
            found = json.loads(self.path.read_text())["files"]
            return {str(file): [_record(one) for one in known] for file, known in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self, files: Mapping[str, object]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps({"files": files}, indent=1), mode=0o600)


def _record(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"digest": str(found["digest"]), "lines": [str(line) for line in found["lines"]], "at": found["at"]}


def keep_allowed(allowances: Allowances, path: Path, before: str, after: str) -> None:
    """For an edit that the user has asked UGRO for: what was allowed before it stays so."""
    if allowances.has(Effects.of(before, path)):
        allow(allowances, Effects.of(after, path))


def allow(allowances: Allowances, effects: Effects) -> None:
    allowances.add(effects.file, effects.digest, effects.lines)


def effects_of(path: Path) -> Effects:
    return Effects.of(read_text(path), path)


def _content(path: Path, ssh_config: str) -> bytes:
    try:
        # Looked at before it is opened: a named pipe or a terminal would block.
        if not stat.S_ISREG(os.stat(ssh_config).st_mode):
            raise ConfigError(f"{escaped(str(path))}: ssh.config_file: {ssh_config} is not a file")
        with open(ssh_config, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or "unknown").lower()
        raise ConfigError(f"{escaped(str(path))}: ssh.config_file: {ssh_config} cannot be read: {reason}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{escaped(str(path))}: ssh.config_file: {ssh_config} is larger than 1 MiB")
    return content


def _lines(config: Config, *, is_masked: bool) -> Iterator[str]:
    yield from _node_lines(config, is_masked=is_masked)
    yield from _setting_lines(config, is_masked=is_masked)


def _node_lines(config: Config, *, is_masked: bool) -> Iterator[str]:
    for node in config.nodes:
        env = dict(masked(node.env)) if is_masked else dict(node.env)
        root = node.remote_root if node.remote_root != _DEFAULT.remote_root else None
        more = {"account": node.account, "python": node.python, "remote_root": root, "env": env or None}
        extra = "".join(f", {name}: {flow(value)}" for name, value in more.items() if value is not None)
        yield f"node {node.name}: {_way(node)}{extra}"
        yield from _power_lines(node)


def _power_lines(node: NodeSpec) -> Iterator[str]:
    """How it is put to sleep and woken, where that is not the usual way: commands are found by _RUNS_HERE."""
    if (rule := node.power) is None:
        return
    usual = PowerRule()
    webhook = f"{rule.webhook}, secret_file: {rule.secret_file}"
    for verb, means, usually in (("suspended", rule.suspend, usual.suspend), ("woken", rule.resume, usual.resume)):
        if means != usually:
            yield f"node {node.name} is {verb} by {webhook if means == WEBHOOK else flow(means)}"
    if rule.on_node != usual.on_node:
        yield f"node {node.name} suspends itself by {flow(rule.on_node)}"
    yield f"node {node.name} sleeps: {flow([rule.suspend_after_s, rule.mac])}"


def _way(node: NodeSpec) -> str:
    if node.transport == "local":
        return "runs jobs on this machine"
    if node.transport != "ssh":
        return f"runs this command on this machine: {flow(node.transport)}"  # found by _RUNS_HERE
    return f"sends code by ssh to {node.target}" + (f", port: {node.port}" if node.port else "")


def _setting_lines(config: Config, *, is_masked: bool) -> Iterator[str]:
    for name in Settings.known_keys():
        value = getattr(config, name)
        if name in HARMLESS[""]:
            continue
        keys = value.written() if isinstance(value, Section) else value  # channels are a map of sections
        for key, part in keys.items():
            if key not in HARMLESS.get(name, ()):
                line = f"{name}.{key}: {flow(part.written() if isinstance(part, Section) else part)}"
                # A command is shown as it is: what looks like a password in it may be what it runs.
                yield without_passwords(line) if is_masked and _IS_COMMAND.search(line) is None else line


def _ssh_lines(content: bytes | None) -> Iterator[str]:
    if content is None:
        return
    for line in content.decode("utf-8", "replace").split("\n"):
        if not line.strip() or line.lstrip(" \t").startswith("#"):
            continue
        keyword = _KEYWORD.match(line)
        if keyword is None or keyword[1].lower() not in _QUIET_OF_SSH:
            yield f"ssh configuration: {escaped(line.strip().expandtabs(1))}"
    yield f"ssh configuration: sha256 {hashlib.sha256(content).hexdigest()}"
