"""What one member can take of the agent over the team's socket: connections, time, memory. Real users and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.identity import MEMBER, running_agent
from tests.rig.waiting import wait_until
from ugro.kernel.access.team_server import LIMITS, serve_team
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.door import DoorLimits

PYTHON = "/usr/bin/python3"
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"other users have no other Python than {PYTHON}"),
]
FEW = replace(LIMITS, of_one_peer=6)
SOON = replace(LIMITS, stranger_s=1.0, head_s=1.0, body_s=1.0)
WHOAMI = "GET /v1/whoami"
_ANSWER_S = 60
_CONNECT = """
import socket, sys
opened = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for one in opened:
    one.connect(sys.argv[1])
socket.send_fds(socket.socket(fileno=0), [b"x"], [one.fileno() for one in opened])
"""
_CLUSTER = f"""\
nodes: {{here: {{transport: local}}}}
team: {{group: {MEMBER}, roles: {{{MEMBER}: ROLE}}, socket: SOCKET}}
"""


class Talk:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, line: str, *headers: str, body: bytes = b"") -> tuple[int, Any]:
        self.say(line, *headers, body=body)
        return await self.answer()

    def say(self, line: str, *headers: str, body: bytes = b"") -> None:
        lines = [f"{line} HTTP/1.1", "host: ugro", "content-type: application/json", *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode() + body)

    async def answer(self) -> tuple[int, Any]:
        """The status, and the document if its length is stated."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        sizes = [int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length:")]
        content = await self.reader.readexactly(sum(sizes))
        return int(head.split()[1]), json.loads(content) if content else None

    async def end(self) -> None:
        """Until the other end has closed it."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass


@dataclass
class TeamRig:
    agent: Agent
    path: str
    ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def connected(self, count: int = 1) -> list[socket.socket]:
        """Connections of a member, as the kernel sees it. They need nobody who accepts them."""
        ours, theirs = socket.socketpair()
        account = pwd.getpwnam(MEMBER)
        with ours, theirs:
            subprocess.run(
                [PYTHON, "-I", "-c", _CONNECT, self.path, str(count)],
                stdin=theirs.fileno(), user=account.pw_uid, group=account.pw_gid, extra_groups=[],
                cwd="/", check=True, timeout=_ANSWER_S,
            )  # fmt: skip
            _, numbers, _, _ = socket.recv_fds(ours, 1, count)
        assert len(numbers) == count
        found = [socket.socket(fileno=number) for number in numbers]
        for one in found:
            self.ending.callback(one.close)
        return found

    async def members(self, count: int = 1) -> list[Talk]:
        return [await self._talk(sock=one) for one in self.connected(count)]

    async def owner(self) -> Talk:
        return await self._talk(path=self.path)

    async def _talk(self, **where: Any) -> Talk:
        talk = Talk(*await asyncio.open_unix_connection(**where))
        self.ending.callback(talk.writer.close)
        return talk

    async def recorded(self) -> list[tuple[str, str, str, str]]:
        found = await self.agent.audit.newest(100, "", None)
        return [(one.user, one.action, one.subject, one.outcome) for one in found]


@pytest.fixture
def place() -> Iterator[Path]:
    """That others can get to, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="team-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


Scenario = Callable[[TeamRig], Coroutine[Any, Any, None]]


def with_team(place: Path, scenario: Scenario, *, role: str = "viewer", limits: DoorLimits = LIMITS) -> None:
    """``role``: the member's."""
    path = str(place / "team" / "agent.sock")

    async def main() -> None:
        text = _CLUSTER.replace("SOCKET", path).replace("ROLE", role)
        async with running_agent(place, text) as (agent, api):
            serving = asyncio.create_task(serve_team(agent, api, limits), name="serve the team")
            team = TeamRig(agent, path)
            try:
                await until(lambda: agent.team_address.url == path)
                async with asyncio.timeout(_ANSWER_S):
                    await scenario(team)
            finally:
                team.ending.close()
                agent.stopping.set()
                await serving

    asyncio.run(main())


async def until(predicate: Callable[[], bool]) -> None:
    """In a thread: the server runs in this loop."""
    await asyncio.to_thread(wait_until, predicate, _ANSWER_S / 3)


def shown_out(crowd: list[socket.socket]) -> int:
    """How many the server has closed."""
    poll = select.poll()
    for one in crowd:
        poll.register(one, select.POLLRDHUP)
    return len(poll.poll(0))


def test_a_crowd_of_one_member_gets_little_room_for_a_short_time(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        crowd = team.connected(200)
        status, found = await (await team.owner()).ask(WHOAMI)
        assert (status, found["user"]) == (200, team.agent.team.owner), "others get in all the same"
        await until(lambda: shown_out(crowd) == len(crowd))  # none stays without a request
        [idle] = await team.members()
        assert (await idle.ask(WHOAMI))[0] == 200
        await idle.end()  # it has not asked again

    with_team(place, scenario, limits=SOON)


def test_one_member_has_a_share_of_the_connections(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        busy = await team.members(6)
        for one in busy:
            assert (await one.ask("GET /v1/changes?after=0"))[0] == 200
        [more] = await team.members()
        status, found = await more.answer()
        assert (status, found["error"]["message"]) == (503, "too many connections are open")
        assert (await (await team.owner()).ask(WHOAMI))[0] == 200, "others have theirs"
        assert not any(one.reader.at_eof() for one in busy), "what is being answered is not interrupted"

    with_team(place, scenario, limits=FEW)


def test_a_body_that_does_not_come_is_not_waited_for_but_a_tunnel_stays_open(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        team.ending.callback(listener.close)
        [tunnel] = await team.members()
        port = listener.getsockname()[1]
        assert (await tunnel.ask(f"POST /v1/tunnel?node=here&port={port}", "transfer-encoding: chunked"))[0] == 200
        [slow] = await team.members()
        slow.say("POST /v1/sweeps/plan", "content-length: 900", body=b"{")
        await slow.end()
        assert not tunnel.reader.at_eof()
        assert (MEMBER, "tunnel", f"here port {port}", "done") in await team.recorded()

    with_team(place, scenario, role="user", limits=SOON)


@pytest.mark.parametrize(("where", "role"), [("/v1/jobs", "viewer"), ("/v1/exec", "user")])
def test_a_role_that_does_not_suffice_is_refused_before_the_body_is_read(place: Path, where: str, role: str) -> None:
    async def scenario(team: TeamRig) -> None:
        [one] = await team.members()
        status, found = await one.ask(f"POST {where}", f"content-length: {3 << 20}")  # and nothing follows
        assert (status, found["error"]["kind"]) == (403, "not_allowed")
        [entry] = await team.recorded()
        assert (entry[0], entry[3]) == (MEMBER, f"refused: {found['error']['message']}")

    with_team(place, scenario, role=role)


def test_a_member_may_send_less_than_the_owner(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        [one] = await team.members()
        status, found = await one.ask("POST /v1/jobs/batch", f"content-length: {5 << 20}")
        assert (status, found["error"]["message"]) == (413, "request too large (limit 4.0 MiB)")

    with_team(place, scenario, role="user")


def test_tunnels_and_looks_that_a_role_forbids_are_recorded(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        [one] = await team.members()
        status, found = await one.ask("POST /v1/tunnel?node=here&port=22", "content-length: 0")
        assert status == 403
        why = f"refused: {found['error']['message']}"
        assert (await one.ask("GET /v1/audit"))[0] == 403
        assert [entry[:3] for entry in await team.recorded()] == [
            (MEMBER, "tunnel", "here port 22"),
            (MEMBER, "read", "/v1/audit"),
        ]
        assert why == (await team.recorded())[0][3]

    with_team(place, scenario)


def test_a_pipelined_request_inherits_nothing_of_the_one_before_it(place: Path) -> None:
    async def scenario(team: TeamRig) -> None:
        body = b'{"items": []}'
        length = f"content-length: {len(body)}"
        talk = await team.owner()
        talk.say("POST /v1/remote/items", length, "ugro-remote: key laptop", body=body)
        talk.say("POST /v1/remote/items", length, body=body)
        assert (await talk.answer())[0] == 204
        status, found = await talk.answer()
        assert (status, found["error"]["message"]) == (400, "the header ugro-remote is missing")

    with_team(place, scenario)
