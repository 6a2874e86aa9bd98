"""What clients elsewhere send, and what they know of others' files: nobody gets those, or pushes out what was sent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tests.rig.identity import CLUSTER, MEMBER, Answer, ask, person, running_agent, signed_in
from ugro.features.remote_access.api import RemoteClients
from ugro.kernel.access.model import Role
from ugro.kernel.access.service import user_name
from ugro.kernel.agent.agent import Agent
from ugro.web.access import AccessSettings
from ugro.web.access import Tokens as DashboardTokens
from ugro.web.dashboard import create_web

ANN = person("ann", Role.ADMIN, shares_account=True)  # the agent reads her files
BOB, VIEWER, OPERATOR = person("bob", Role.USER), person("eve", Role.VIEWER), person("olga", Role.OPERATOR)
LOOKS = (
    *("", "/file", "/why", "/wait?timeout_s=0", "/logs?moves=true", "/results", "/results/brief", "/results/files"),
    *("/notes", "/profile", "/steps", "/traces", "/headline", "/energy"),
)


async def submitted(api: FastAPI, folder: Path, text: str) -> list[str]:
    """A job with code and a folder; their hashes."""
    for name in ("code", "data"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "file.txt").write_text(f"{name} {text}")
    fields = {"name": text, "command": ["true"], "workdir": str(folder / "code"), "folder": {"d": str(folder / "data")}}
    made = await ask(api, "POST", "/v1/jobs", caller=ANN, body={"user": "", "key": text, "fields": fields})
    assert made.status == 200, made.body
    spec = made.document["job"]["spec"]
    return [spec["snapshot"], spec["folders"][0]["tree"]]


def test_nobody_gets_the_files_of_another_by_what_is_shown_of_their_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            hashes = [*await submitted(api, tmp_path, "one"), *await submitted(api, tmp_path, "two")]
            assert {len(one) for one in hashes} == {64}
            paths = [*(f"/v1/jobs/1{look}" for look in LOOKS), "/v1/jobs", "/v1/events", "/v1/compare?job=1&job=2"]
            for caller in (BOB, VIEWER, OPERATOR):
                for path in paths:
                    body = (await ask(api, "GET", path, caller=caller)).body
                    assert not [one for one in hashes if one.encode() in body], (path, caller)
            rows = (await ask(api, "GET", "/v1/compare?job=1&job=2", caller=BOB)).document["rows"]
            [code] = [row["values"] for row in rows if row["key"] == "code"]
            assert code == [hashes[0][:12], hashes[2][:12]], "that they differ is seen"
            seen = (await ask(api, "GET", "/v1/jobs/1", caller=BOB)).document["job"]["spec"]["folders"][0]["tree"]
            assert (await offered(agent, api, seen)).kind == "usage"
            nothing = await offered(agent, api, "0" * 64)
            assert nothing.kind == "wanted", "it is not here: to be sent"
            # Who has the same files knows their hash, and need not send them.
            assert (await offered(agent, api, hashes[1])).status == 200

    asyncio.run(scenario())


async def offered(agent: Agent, api: FastAPI, tree: str) -> Answer:
    """A job of Bob's with a folder that he says is this one."""
    remote, headers = RemoteClients(api, agent.code.offers), {"ugro-remote": f"{tree} laptop"}
    item = {"what": "folder", "path": "d=/x", "value": {"name": "d", "source": "/x", "tree": tree}}
    took = await ask(remote, "POST", "/v1/remote/items", caller=BOB, headers=headers, body={"items": [item]})
    assert took.status == 204, took.body
    fields = {"name": "theirs", "command": ["true"], "sync": False, "cwd": "/", "folder": {"d": "/x"}}
    body = {"user": "", "key": tree, "fields": fields}
    return await ask(remote, "POST", "/v1/jobs", caller=BOB, headers=headers, body=body)


def test_the_dashboard_compares_the_code_of_others_without_its_hash(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path, CLUSTER.replace("admin", "user")) as (agent, api):
            hashes = [*await submitted(api, tmp_path, "one"), *await submitted(api, tmp_path, "two")]
            tokens = DashboardTokens(tmp_path / "token")
            app = create_web(agent, api, AccessSettings(tokens, frozenset(), "c", agent.team.browser))
            member = signed_in(f"c={tokens.sessions.begin(time.time(), MEMBER)}")
            for page in ("/jobs/1", "/compare?jobs=1,2", "/compare?jobs=1,2&all=true", "/compare/code?old=1&new=2"):
                found = await ask(app, "GET", page, headers=member)
                assert found.status == 200, (page, found)
                assert not [one for one in hashes if one.encode() in found.body], page
                if page.startswith("/compare?"):
                    assert b"/compare/code?old=1" in found.body, "the link to what differs"

    asyncio.run(scenario())


def test_a_viewer_leaves_nothing_and_pushes_nothing_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            remote = RemoteClients(api, agent.code.offers)
            mine = {"ugro-remote": "mine laptop"}
            items: dict[str, Any] = {"items": [{"what": "text", "path": "/job.yaml", "value": "command: [ls]"}]}
            assert (await ask(remote, "POST", "/v1/remote/items", caller=BOB, headers=mine, body=items)).status == 204
            for number in range(300):
                headers = {"ugro-remote": f"key{number} laptop"}
                assert (await ask(remote, "GET", "/v1/whoami", caller=VIEWER, headers=headers)).status == 200
            refused = await ask(remote, "POST", "/v1/remote/items", caller=VIEWER, headers=mine, body=items)
            assert (refused.status, refused.kind) == (403, "not_allowed")
            body = {"user": "", "key": "k", "file": "/job.yaml", "fields": {"sync": False, "cwd": "/"}}
            made = await ask(remote, "POST", "/v1/jobs", caller=BOB, headers=mine, body=body)
            assert made.status == 200, made.body

    asyncio.run(scenario())


def test_an_upload_has_no_more_than_it_announced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path, f"sync: {{folder_limit: 1MB}}\n{CLUSTER}") as (agent, api):
            for store, size, text in (("folders", 3_000_000, "sync.folder_limit is"), ("code", 1 << 60, "too much")):
                path = f"/v1/remote/trees?store={store}&root={'0' * 64}&bytes={size}"
                found = await ask(api, "POST", path, caller=BOB)
                assert found.status == 500, found.body
                assert text in found.document["error"]["message"]
            assert agent.store.damage is None

    asyncio.run(scenario())


def test_a_user_id_without_a_name_is_nobody(tmp_path: Path) -> None:
    """Roles are given to names: as a number it would have the role of all others, whatever its own is."""
    uid = next(number for number in range(60_000, 65_000) if user_name(number) is None)

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            assert await agent.team.peer(uid, 1, is_of_team=True) is None
            owner = await agent.team.peer(agent.team.uid, 1, is_of_team=False)
            assert owner is not None
            assert (owner.user, owner.role) == (agent.team.owner, Role.ADMIN)

    asyncio.run(scenario())
