"""Serves the team's socket: the same API as on the owner's, open to the members of a Unix group.

It has a folder of its own, because the state directory stays private. The kernel decides who opens it (mode 0660 and
the group, in a folder of mode 0750), and says who each of them is.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import socket
import stat
from pathlib import Path

from fastapi import FastAPI

from ugro.agent.agent import Agent
from ugro.agent.ops.team import ROOT
from ugro.agent.server import socket_server
from ugro.config.team import Team
from ugro.core.errors import NotAllowed, UgroError
from ugro.core.support.state_dir import team_socket

log = logging.getLogger(__name__)

_POLL_S = 0.5
_FOLDER_MODE = 0o750
_SOCKET_MODE = 0o660


async def serve_team(agent: Agent, api: FastAPI) -> None:
    """Until the agent stops; opens again when the settings change. A team that fails affects no job."""
    while not agent.stopping.is_set():
        settings = agent.cluster.config.team
        problem: UgroError | None = None
        if settings.group is not None:
            try:
                await _serve(agent, api, settings)
            except (UgroError, OSError) as error:
                problem = _as_error(error)
                log.warning("the team's socket is not open: %s", problem)
        agent.team_address.closed(problem)
        if problem is not None or settings.group is None:
            await _until_changed(agent, settings)


async def _serve(agent: Agent, api: FastAPI, settings: Team) -> None:
    env, team = os.environ, agent.team
    path = team_socket(env, owner=team.owner, is_root=team.uid == ROOT, configured=settings.socket)
    listener = await asyncio.to_thread(open_socket, path, str(settings.group))
    server = socket_server(agent, api, is_of_team=True)
    serving = asyncio.create_task(server.serve([listener]), name="serve the team's socket")
    agent.team_address.opened(str(path))
    log.info("members of %s reach this agent at %s", settings.group, path)
    try:
        await _until_changed(agent, settings)
    finally:
        path.unlink(missing_ok=True)
        server.should_exit = True
        await serving


async def _until_changed(agent: Agent, settings: Team) -> None:
    def opens() -> tuple[str | None, str | None]:
        team = agent.cluster.config.team  # roles may change meanwhile: they are looked up for each request
        return team.group, team.socket

    while opens() == (settings.group, settings.socket) and not agent.stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(agent.stopping.wait(), _POLL_S)


def open_socket(path: Path, group: str) -> socket.socket:
    """Blocks. Raises NotAllowed, and OSError."""
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise NotAllowed(f"there is no group {group}", hint=f"create it: sudo groupadd {group}") from None
    _make_folder(path.parent, number, group, own={path.name, _fresh(path).name})
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _fresh(path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # By the folder's descriptor: the path may be longer than a socket's address allows.
        listener.bind(f"/proc/self/fd/{folder}/{_fresh(path).name}")
        os.chown(_fresh(path).name, -1, number, dir_fd=folder)
        os.chmod(_fresh(path).name, _SOCKET_MODE, dir_fd=folder)
    finally:
        os.close(folder)
    listener.listen(128)
    _fresh(path).rename(path)  # seen once it can be used; replaces that of a dead agent
    return listener


def _make_folder(folder: Path, group: int, name: str, own: set[str]) -> None:
    """``own``: what may be in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    elsewhere = "name another place in the cluster file: team.socket"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise NotAllowed(f"{folder} is not a folder of this user", hint=elsewhere)
    is_ready = stat.S_IMODE(found.st_mode) == _FOLDER_MODE and found.st_gid == group
    if not is_ready and set(os.listdir(folder)) - own:
        raise NotAllowed(f"{folder} has other files: the team's socket needs a folder of its own", hint=elsewhere)
    if not is_ready:
        try:
            os.chown(folder, -1, group)
        except PermissionError as error:
            hint = f"join it: sudo usermod -aG {name} $USER, then log in again and: ugro agent restart"
            raise NotAllowed(f"you are not a member of the group {name}", hint=hint) from error
        folder.chmod(_FOLDER_MODE)


def _fresh(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _as_error(error: UgroError | OSError) -> UgroError:
    if isinstance(error, UgroError):
        return error
    reason = (error.strerror or str(error)).lower()
    return UgroError(f"{error.filename or 'team.socket'}: {reason}", hint="see team in the cluster file")
