"""Serves the team's socket: the same API as on the owner's, open to the members of a Unix group.

It has a folder of its own, because the state directory stays private. The kernel decides who opens it (mode 0660 and
the group, in a folder of mode 0750), and says who each of them is. What one member can take of the agent is limited.
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
from typing import ClassVar

from fastapi import FastAPI

from ugro.kernel.access.config import Team
from ugro.kernel.access.service import ROOT
from ugro.kernel.agent.agent import Agent
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.operations.app import STREAMS, socket_server
from ugro.kernel.operations.audit_trail import LocalProtocol, credentials
from ugro.kernel.operations.door import Connection, Door, DoorLimits
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, UgroError
from ugro.kernel.support.state_dir import team_socket

log = logging.getLogger(__name__)

# A body may come over a slow link, by ``ugro relay``. Each connection of a tunnel is one here.
LIMITS = DoorLimits(connections=1000, of_one_peer=200, of_one_user=None, body_s=300.0, streams=STREAMS)
_BACKLOG = 1024  # a member must not wait because a crowd of another came before
_FOLDER_MODE = 0o750
_SOCKET_MODE = 0o660


def _full() -> bytes:
    error = NotAllowed("too many connections are open", hint="close some, or try again in a few seconds")
    body = dumps({"error": error.to_wire()}).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class MemberConnection(LocalProtocol, Connection):
    full: ClassVar[bytes] = _full()

    @staticmethod
    def peer_of(accepted: socket.socket) -> str:
        _, uid = credentials(accepted)
        return f"uid {uid}"


async def serve_team(agent: Agent, api: FastAPI, limits: DoorLimits = LIMITS) -> None:
    """Until the agent stops; opens again when the settings change. A team that fails affects no job."""
    while not agent.stopping.is_set():
        settings = agent.cluster.config.team
        problem: BaseException | None = None
        if settings.group is not None:
            serving = asyncio.create_task(_serve(agent, api, settings, limits), name="the team's socket")
            try:
                await asyncio.wait([serving])
            finally:
                serving.cancel()
            problem = serving.exception()
        agent.team_address.closed(_as_error(problem) if problem is not None else None)
        if problem is not None or settings.group is None:
            await _until_changed(agent, settings)


async def _serve(agent: Agent, api: FastAPI, settings: Team, limits: DoorLimits) -> None:
    env, team = os.environ, agent.team
    path = team_socket(env, owner=team.owner, is_root=team.uid == ROOT, configured=settings.socket)
    with await asyncio.to_thread(open_socket, path, str(settings.group)) as listener:
        server = socket_server(agent, api, is_of_team=True)
        door = Door(server, limits, what="the team's socket", kind=MemberConnection)
        agent.team_address.opened(str(path))
        log.info("members of %s reach this agent at %s", settings.group, path)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([]), name="serve the team's socket")
            accepting = group.create_task(door.serve(listener), name="the team's door")
            try:
                await _until_changed(agent, settings)
            finally:
                path.unlink(missing_ok=True)
            accepting.cancel()
            server.should_exit = True


async def _until_changed(agent: Agent, settings: Team) -> None:
    """Returns when the team's socket is another one, or the agent stops."""
    waits = [asyncio.create_task(_until_another(agent.cluster, settings)), asyncio.create_task(agent.stopping.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _until_another(cluster: Cluster, settings: Team) -> None:
    while True:
        seen, team = cluster.changed.count, cluster.config.team
        if (team.group, team.socket) != (settings.group, settings.socket):
            return  # of its roles nothing is kept: they are looked up for each request
        await cluster.changed.wait(seen)


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
    listener.listen(_BACKLOG)
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


def _as_error(problem: BaseException) -> UgroError:
    found = _known(problem)
    if found is None:
        log.error("the team's socket failed", exc_info=problem)
        return UgroError("the team's socket failed", hint="see: ugro agent logs")
    log.warning("the team's socket is not open: %s", found)
    return found


def _known(problem: BaseException) -> UgroError | None:
    if isinstance(problem, UgroError):
        return problem
    if not isinstance(problem, OSError):
        return None
    reason = (problem.strerror or str(problem)).lower()
    return UgroError(f"{problem.filename or 'team.socket'}: {reason}", hint="see team in the cluster file")
