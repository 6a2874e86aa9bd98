"""Users of one agent are not in each other's way: their jobs are theirs, private ones are hidden, values are secret."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tests.rig.identity import CLUSTER, MEMBER, Answer, ask, person, running_agent, signed_in
from ugro.features.environments.model import Whose
from ugro.features.sweeps.model import Budget
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.support.codec import dumps
from ugro.web.access import AccessSettings
from ugro.web.access import Tokens as DashboardTokens
from ugro.web.dashboard import create_web

ANN, BOB = person("ann", Role.USER), person("bob", Role.USER)
VIEWER, OPERATOR, OWNER = (
    person("eve", Role.VIEWER),
    person("olga", Role.OPERATOR),
    person("root", Role.ADMIN, shares_account=True),
)


def job(name: str, **fields: Any) -> dict[str, Any]:
    run = {"name": name, "command": ["true"], "sync": False, "cwd": "/", **fields}
    return {"user": "root", "key": f"key-{name}", "fields": run, "env": {}}


async def submitted(api: FastAPI, caller: Caller, name: str, **fields: Any) -> dict[str, Any]:
    found = await ask(api, "POST", "/v1/jobs", caller=caller, body=job(name, **fields))
    assert found.status == 200, found.body
    made: dict[str, Any] = found.document["job"]
    return made


def refused(answer: Answer, kind: str = "not_allowed") -> bool:
    return answer.kind == kind


def test_a_job_is_of_the_user_that_the_agent_saw(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert (await submitted(api, ANN, "mine"))["user"] == "ann", "the client claimed to be root"
            again = await submitted(api, ANN, "mine")
            assert again["id"] == 1, "one job for one key"
            other = await submitted(api, BOB, "mine")
            assert (other["id"], other["user"]) == (2, "bob"), "a key is its user's own"
            withdrawn = await ask(api, "DELETE", "/v1/submissions/key-mine", caller=VIEWER)
            assert refused(withdrawn)

    asyncio.run(scenario())


def test_a_submission_without_a_key_is_refused_and_not_taken_for_that_of_another(tmp_path: Path) -> None:
    nameless = {**job("secret", private=True), "key": ""}
    requests: tuple[tuple[str, Any], ...] = (
        ("/v1/jobs", nameless),
        ("/v1/jobs/batch", {"jobs": [nameless]}),
        ("/v1/jobs/1/retry", {"key": "", "user": ""}),
        ("/v1/sweeps", {"submit": nameless}),
        ("/v1/sweeps/1/launch", {"key": "", "user": ""}),
        ("/v1/services", {"submit": nameless, "model": "gpt2"}),
    )

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await submitted(api, BOB, "open")
            await agent.store.sweeps.create(NewSweep("k", "search", "bob", "{}", dumps(JobSpec("x", ("x",))), Budget()))
            for path, body in requests:
                for caller in (BOB, OWNER) if "/1/" in path else (ANN, BOB, OWNER):
                    found = await ask(api, "POST", path, caller=caller, body=body)
                    assert refused(found, "usage"), (path, found.body)
                    assert b"key: " in found.body
                    assert b"ann" not in found.body
            assert [one.spec.name for one in await agent.jobs.page(Listed())] == ["open"]

    asyncio.run(scenario())


def test_operators_change_the_jobs_of_others_and_nobody_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            await submitted(api, ANN, "theirs")
            for caller in (BOB, VIEWER):
                for word in ("1", "theirs", "last"):
                    assert refused(await ask(api, "POST", f"/v1/jobs/{word}/cancel", caller=caller)), (word, caller)
            assert (await ask(api, "GET", "/v1/jobs/1", caller=ANN)).document["job"]["ending"] is None
            assert (await ask(api, "PUT", "/v1/jobs/1/notes", caller=ANN, body={"text": "own"})).status == 200
            assert (await ask(api, "POST", "/v1/jobs/1/cancel", caller=OPERATOR)).status == 200

    asyncio.run(scenario())


def test_a_private_job_is_hidden_everywhere(tmp_path: Path) -> None:
    others = ("/v1/compare?job=secret&job=1", "/v1/metrics?job=2", "/v1/metrics/keys?job=secret", "/v1/events?job=2")

    async def names(api: FastAPI, caller: Caller) -> list[str]:
        listed = (await ask(api, "GET", "/v1/jobs", caller=caller)).document["jobs"]
        return [one["spec"]["name"] for one in listed]

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await submitted(api, BOB, "open")
            assert (await submitted(api, ANN, "secret", private=True))["id"] == 2
            for caller in (BOB, VIEWER):
                for path in others:
                    assert refused(await ask(api, "GET", path, caller=caller), "not_found"), path
                assert await names(api, caller) == ["open"]
                assert b'"job":2' not in (await ask(api, "GET", "/v1/events", caller=caller)).body
                assert (await ask(api, "GET", "/v1/jobs/last", caller=caller)).document["job"]["id"] == 1
                assert b"did you mean" not in (await ask(api, "GET", "/v1/jobs/secre", caller=caller)).body
            for caller in (ANN, OPERATOR, OWNER):
                assert await names(api, caller) == ["secret", "open"]
                assert (await ask(api, "GET", "/v1/jobs/secret", caller=caller)).status == 200
            assert agent.store.damage is None

    asyncio.run(scenario())


def test_a_job_runs_after_one_that_its_user_may_see(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert (await submitted(api, BOB, "train"))["id"] == 1
            assert (await submitted(api, ANN, "train", private=True))["id"] == 2
            assert (await submitted(api, ANN, "secret", private=True))["id"] == 3
            for caller, first in ((BOB, 1), (ANN, 2)):
                made = await submitted(api, caller, f"of-{caller.user}", after="train")
                assert made["spec"]["after"]["ok"] == [first], caller.user
            for hidden in ("secret", "2"):
                found = await ask(api, "POST", "/v1/jobs", caller=BOB, body=job("x", after=hidden))
                assert refused(found, "config"), found.body
                assert b"there is no job" in found.body

    asyncio.run(scenario())


def test_what_a_job_waits_for_is_said_without_the_numbers_of_private_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert (await submitted(api, ANN, "secret", private=True))["id"] == 1
            was_operator = person("bob", Role.OPERATOR)
            await submitted(api, was_operator, "mine", after=[1])
            for caller, said in ((BOB, "runs after a private job"), (was_operator, "runs after job 1")):
                for path in ("/v1/jobs/2", "/v1/jobs/2/why", "/v1/jobs"):
                    found = await ask(api, "GET", path, caller=caller)
                    assert said in found.body.decode(), (path, caller, found.body)
            assert (await ask(api, "GET", "/v1/jobs/2/why", caller=BOB)).document["blocked_by"] == []

    asyncio.run(scenario())


def test_a_list_of_jobs_has_an_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert refused(await ask(api, "GET", "/v1/jobs?limit=1001", caller=VIEWER), "usage")
            assert (await ask(api, "GET", "/v1/jobs?limit=1000", caller=VIEWER)).status == 200

    asyncio.run(scenario())


def test_values_of_an_environment_are_for_their_owner_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            await submitted(api, ANN, "with", env={"DATA": "hush"})
            of_job = ("", "/file", "/results", "/logs?moves=true", "/wait?timeout_s=0")
            paths = ("/v1/jobs", "/v1/compare?job=1&job=2", *(f"/v1/jobs/1{look}" for look in of_job))
            await submitted(api, ANN, "two", env={"DATA": "hush too"})
            for caller in (BOB, VIEWER, OPERATOR, OWNER):
                for path in paths:
                    assert b"hush" not in (await ask(api, "GET", path, caller=caller)).body, (path, caller)
            assert b"hush" in (await ask(api, "GET", "/v1/jobs", caller=ANN)).body
            await ask(api, "POST", "/v1/jobs/1/cancel", caller=ANN)

    asyncio.run(scenario())


def test_a_member_sees_their_own_view_of_the_dashboard(tmp_path: Path) -> None:
    pages = ("/", "/jobs", "/jobs/1", "/experiments", "/nodes/here", "/compare", "/sweeps", "/services", "/settings")

    async def scenario() -> None:
        async with running_agent(tmp_path, CLUSTER.replace("admin", "user")) as (agent, api):
            tokens = DashboardTokens(tmp_path / "token")
            app = create_web(agent, api, AccessSettings(tokens, frozenset(), "c", agent.team.browser))
            await submitted(api, ANN, "open", env={"DATA": "hush"})
            await submitted(api, ANN, "veiled", private=True)
            member, owner = (f"c={tokens.sessions.begin(time.time(), user)}" for user in (MEMBER, ""))
            for page in pages:
                found = await ask(app, "GET", page, headers=signed_in(member))
                assert found.status == 200, (page, found)
                assert b"veiled" not in found.body, page
                assert b"hush" not in found.body, page
            assert (await ask(app, "GET", "/compare?jobs=1,2", headers=signed_in(member))).status == 404
            assert b"veiled" in (await ask(app, "GET", "/jobs", headers=signed_in(owner))).body
            assert (await ask(app, "GET", "/jobs/1/again", headers=signed_in(member))).status == 403
            assert refused(await ask(app, "POST", "/v1/jobs/1/cancel", headers=signed_in(member)))
            assert refused(await ask(app, "POST", "/v1/nodes/here/drain", headers=signed_in(member), body={}))
            gone = f"c={tokens.sessions.begin(time.time(), 'bin')}"
            assert (await ask(app, "GET", "/jobs", headers=signed_in(gone))).status == 401, "not a member any more"

    asyncio.run(scenario())


def test_a_job_remembers_whether_its_packages_were_chosen_by_the_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            for caller, whose in ((ANN, Whose.OTHER), (OPERATOR, Whose.OTHER), (OWNER, Whose.OWNER)):
                made = await submitted(api, caller, f"of-{caller.user}", package=["numpy"])
                kept = (await agent.store.jobs.find(str(made["id"]))).spec.environment
                assert kept is not None
                assert kept.whose is whose, caller.user
                assert kept.user == ("" if whose is Whose.OWNER else caller.user)

    asyncio.run(scenario())


def test_a_member_does_not_learn_which_files_there_are(tmp_path: Path) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    for folder in (far, near):
        folder.mkdir()
    (tmp_path / "secret.py").touch()
    there, missing = (str(tmp_path / name).removeprefix("/") for name in ("secret.py", "none.py"))

    async def said(api: FastAPI, caller: Caller, where: str, **fields: Any) -> str:
        body = {"user": "", "key": "plan", "fields": fields, "here": where, "env": {}}
        found = await ask(api, "POST", "/v1/jobs/plan", caller=caller, body=body)
        return found.body.decode()

    async def on_another_machine() -> None:
        cluster = CLUSTER.replace("here: {transport: local}", "far: {transport: ['false']}")
        async with running_agent(far, cluster) as (_, api):
            answers = [await said(api, ANN, "/", command=[name]) for name in (there, missing)]
            assert answers[0].replace("secret", "none") == answers[1]
            assert "is not sent to the nodes" in await said(api, OWNER, "/", command=[there])
            for command in ([f"/{there}"], ["python3", f"/{there}"]):  # as if it were a script to be sent
                other = [word.replace("secret", "none") for word in command]
                answers = [await said(api, ANN, str(far), command=words) for words in (command, other)]
                assert answers[0].replace("secret", "none") == answers[1]

    async def on_this_machine() -> None:
        async with running_agent(near) as (_, api):
            for where in (str(tmp_path), str(tmp_path / "no-folder")):
                answer = await said(api, ANN, where, script="secre.py", sync=False)
                assert "no such" not in answer
                assert "did you mean" not in answer
            answer = await said(api, OWNER, str(tmp_path), script="secre.py", sync=False)
            assert "did you mean secret.py?" in answer

    asyncio.run(on_another_machine())
    asyncio.run(on_this_machine())


def test_the_agent_reads_no_files_for_other_accounts(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "job.yaml").write_text("command: [hush]\n")
    (secret / "requirements.txt").write_text("hush-package\n")
    body = job("reads")
    plain: dict[str, Any] = body["fields"]
    sends = {"name": "reads", "command": ["true"], "workdir": str(secret)}

    def with_fields(**fields: Any) -> dict[str, Any]:
        return {**body, "fields": {**plain, **fields}}

    requests: tuple[tuple[str, Any], ...] = (
        ("/v1/jobs", {**body, "file": str(secret / "job.yaml"), "fields": {}}),
        ("/v1/jobs", {**body, "fields": sends}),
        ("/v1/jobs/plan", {**body, "fields": sends}),
        ("/v1/jobs", with_fields(folder={"data": str(secret)})),
        ("/v1/jobs", with_fields(requirements=str(secret / "requirements.txt"))),
        ("/v1/jobs", with_fields(requirements=f"a\n--find-links {secret}\n")),
        ("/v1/jobs", with_fields(requirements=f"a\n--index-url file://{secret}\n")),
        ("/v1/sync", {"folder": str(secret)}),
        ("/v1/services", {"submit": {**body, "fields": {}}, "model": str(secret)}),
        ("/v1/recipes/launch", {"submit": {**body, "fields": {}}, "model": str(secret), "dataset": "wikitext"}),
    )

    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            for path, request in requests:
                found = await ask(api, "POST", path, caller=ANN, body=request)
                assert found.status >= 400, (path, request, found.body)
                assert b"hush" not in found.body
                assert b"does not read" in found.body or b"machine cannot be named" in found.body, found.body
            assert (await ask(api, "GET", "/v1/jobs", caller=OWNER)).document["jobs"] == []

    asyncio.run(scenario())
