"""Where submitted code comes from: its folder, and its git commit and branch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ugro.cli.output import Output
from ugro.kernel.jobs.model import Origin
from ugro.kernel.jobs.script import Words, own_script, words_of

_TIMEOUT_S = 3.0


def code_folder(output: Output, file: Path | None, fields: Mapping[str, Any]) -> Path:
    """The folder of the code that is sent, as far as the command line says. Says so if it is not the current one."""
    if fields.get("workdir"):
        return Path(os.path.expanduser(fields["workdir"]))
    has_none = not (fields.get("command") or fields.get("script")) or fields.get("cwd") or fields.get("sync") is False
    if file is not None or has_none:
        return file.parent if file is not None else Path()
    is_command = "command" in fields
    named = words_of(fields["command"]) if is_command else (fields["script"], *(fields.get("args") or ()))
    words = Words(named, is_command=is_command)
    found = own_script(os.getcwd(), words) if words.names_elsewhere else None
    if found is None or found.folder == os.getcwd():
        return Path()
    output.note(f"note: the code is {found.folder}, the folder of {named[words.at or 0]}; not this one")
    return Path(found.folder)


def origin_of(folder: Path) -> Origin | None:
    """None without git."""
    here = folder.absolute()
    if not any(os.path.lexists(place / ".git") for place in (here, *here.parents)):
        return None
    import subprocess  # loaded only when needed: it takes long to load

    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(here), "status", "--porcelain=v2", "--branch"]
    # Takes no lock that another git would have to wait for.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parsed(done.stdout.decode("utf-8", "replace"))


def parsed(status: str) -> Origin:
    lines = status.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and " " in line[2:])
    commit, branch = head.get("branch.oid"), head.get("branch.head")
    return Origin(
        commit=None if commit in (None, "(initial)") else commit,
        is_dirty=any(not line.startswith("#") for line in lines),
        branch=None if branch in (None, "(detached)") else branch,
    )
