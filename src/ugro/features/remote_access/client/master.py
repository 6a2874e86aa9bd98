"""Which agent a client talks to: this machine's, or that of a master which is reached by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ugro.kernel.support.errors import UgroError, UsageError
from ugro.kernel.support.state_dir import StateDir

MASTER_VARIABLE = "UGRO_MASTER"
COMMAND_VARIABLE = "UGRO_MASTER_COMMAND"
SSH_CONFIG_VARIABLE = "UGRO_MASTER_SSH_CONFIG"
LOCAL = "local"  # as a master's name: this machine
_FILE = "master.json"
_LONGEST = 500
_WITH_PORT = re.compile(r"([^:/\[\]]+):([0-9]{1,5})")
_EXAMPLE = "for example: ugro login ann@gpu-master"


@dataclass(frozen=True, slots=True)
class Master:
    """``address``: as ssh takes it, or USER@HOST:PORT. ``command``: the path of ugro there; None: in its PATH."""

    address: str
    command: str | None = None
    ssh_config: str | None = None

    def __str__(self) -> str:
        return self.address

    @property
    def destination(self) -> list[str]:
        """The words for ssh."""
        found = _WITH_PORT.fullmatch(self.address)
        return ["-p", found[2], "--", found[1]] if found else ["--", self.address]


def chosen_master(
    env: Mapping[str, str], home: StateDir, *, named: str | None = None, command: str | None = None
) -> Master | None:
    """The one that was named, or that of the environment, or the remembered one; None: this machine."""
    name = named or env.get(MASTER_VARIABLE) or None
    if name == LOCAL:
        return None
    remembered = recall(home) if name is None else _recalled(home, name)
    if name is None and remembered is None:
        return None
    base = remembered or Master(name or "")
    command = command or env.get(COMMAND_VARIABLE) or base.command
    return checked(Master(base.address, command, env.get(SSH_CONFIG_VARIABLE) or base.ssh_config))


def checked(master: Master) -> Master:
    """Raises UsageError for what ssh would take for something else, or a shell for more than a path."""
    for what, text in (("master", master.address), ("path of ugro there", master.command or "ugro")):
        if not text or len(text) > _LONGEST or not text.isprintable() or text.startswith("-") or " " in text:
            raise UsageError(f"{text[:60]!r} is no {what}", hint=_EXAMPLE)
    return master


# --- remembered -------------------------------------------------------------------------------------------------


def file_of(home: StateDir) -> Path:
    return home.path / _FILE


def recall(home: StateDir) -> Master | None:
    path = file_of(home)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return checked(Master(str(found["address"]), _text(found.get("command")), _text(found.get("ssh_config"))))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "forget it: ugro logout; or use this machine: ugro --master local …"
        raise UgroError(f"{path} cannot be read: {error}", hint=hint) from error


def _recalled(home: StateDir, name: str) -> Master | None:
    """What is remembered of a master that was named; a memory that cannot be read does not matter then."""
    with contextlib.suppress(UgroError):
        known = recall(home)
        return known if known is not None and known.address == name else None
    return None


def remember(home: StateDir, master: Master) -> None:
    fresh = file_of(home).with_suffix(f".{os.getpid()}")
    try:
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(master)) + "\n")
        fresh.rename(file_of(home))
    except OSError as error:
        raise home.unusable(error) from error


def forget(home: StateDir) -> Master | None:
    """The one that was remembered."""
    try:
        known = recall(home)
    except UgroError:
        known = None
    with contextlib.suppress(FileNotFoundError):
        file_of(home).unlink()
    return known


def _text(value: object) -> str | None:
    return None if value is None else str(value)
