"""Who did what: which requests are recorded, under which name, and what of them is not."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

import ugro
from tests.rig.stores import sql, store_at
from ugro.kernel.access import store as audit_store
from ugro.kernel.access.model import AuditEntry
from ugro.kernel.access.service import AuditLog, RefusalLimit
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.kernel.jobs.operations import CancelJob, RetryJob, SubmitJob, SubmitJobs, Submitted, SubmittedMany
from ugro.kernel.operations.audit_rules import bounded, refusal, rule_for, subject, tunnel_end
from ugro.kernel.operations.audit_trail import AuditTrail
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import Needs, Request
from ugro.kernel.store.database import Store

WHO = ("ann", "pid 7")
ADDED = ("add node", "a host=h labels=x")


def entry(number: int = 0, *, user: str = "ann", at: str = "2030-01-01") -> AuditEntry:
    return AuditEntry(at, user, "pid 1", "cancel", str(number), "done")


def about(method: str, path: str, request: Any = None, answer: str = "") -> tuple[str, str | None] | None:
    found = rule_for(method, path)
    if found is None:
        return None
    return found[0].action, subject(*found, json.dumps(request).encode(), answer.encode())


def made(number: int) -> Job:
    return Job(number, JobSpec("train", ("true",)), "ann", JobState.QUEUED, "", "")


@pytest.mark.parametrize(
    ("method", "path", "request_body", "answer", "found"),
    [
        ("POST", "/v1/jobs/batch", {}, "", ("submit", "")),
        ("POST", "/v1/jobs/last/cancel", {}, "", ("cancel", "last")),
        ("POST", "/v1/sync", {"folder": "/code", "nodes": ["gpu1", "gpu2"]}, "", ("sync", "/code gpu1 gpu2")),
        ("POST", "/jobs/7/again", {}, '{"id":8}', ("launch again", "7 → 8")),
        ("POST", "/v1/nodes/gpu1/drain", {"reason": "hot"}, "", ("drain", "gpu1 hot")),
        ("POST", "/v1/nodes", {"name": "a", "fields": {"host": "h", "labels": ["x"]}}, "", ADDED),
        ("DELETE", "/v1/nodes/gpu1", None, "", ("remove node", "gpu1")),
        ("POST", "/v1/exec", {"nodes": ["@all"], "argv": ["x", "--token=hush"]}, "", ("exec", "@all x '--token=***'")),
        ("PUT", "/v1/cluster", {"path": "/x/cluster.yaml"}, "", ("use cluster file", "/x/cluster.yaml")),
        ("PUT", "/v1/something/new", {"secret": "hush"}, "", ("PUT /v1/something/new", "")),
        ("POST", "/v1/exec", "not a map", "", ("exec", "")),
        ("POST", "/v1/jobs/plan", {}, "", None),
        ("GET", "/v1/jobs/7", None, "", None),
    ],
)
def test_what_a_request_is_called_and_about(
    method: str, path: str, request_body: Any, answer: str, found: tuple[str, str | None] | None
) -> None:
    assert about(method, path, request_body, answer) == found


@pytest.mark.parametrize(
    ("asked", "answer", "said"),
    [
        (SubmitJob("", "k"), Submitted(made(7)), "7"),
        (SubmitJob("", "k"), Needs(("HF_TOKEN",)), ""),
        (SubmitJobs(()), SubmittedMany((made(7), made(8), made(9))), "7 to 9"),
        (SubmitJobs(()), SubmittedMany((made(7),)), "7"),
        (CancelJob("last"), made(7), "7"),
        (RetryJob("7", "k", ""), made(8), "7 → 8"),
    ],
)
def test_what_a_request_was_about_is_known_by_its_answer(asked: Request[Any], answer: Any, said: str) -> None:
    assert asked.about(answer) == said



def test_a_record_is_short_and_printable_and_names_no_password() -> None:
    assert len(bounded("x" * 1000)) == 300
    assert bounded("a\x1b]0;b") == "a�]0;b"
    assert refusal(404, b'{"error":{"message":"no node a"}}') == "refused: no node a"
    assert refusal(400, b'{"error":{"message":"redis://:hush@h is bad"}}') == "refused: redis://:***@h is bad"
    assert (refusal(401, b"<html>"), refusal(499, b"")) == ("refused: 401", "the client left")


def test_secrets_of_a_node_and_what_nests_without_end_are_not_recorded() -> None:
    adding, _ = rule_for("POST", "/v1/nodes") or pytest.fail("no rule")
    request = b'{"name": "gpu1", "fields": {"user": "ann", "env": {"HF_TOKEN": "hunter2", "A": "b"}}}'
    assert subject(adding, "", request, b"") == "gpu1 user=ann env=HF_TOKEN=*** A=b"
    for nested in (b"[" * 60_000, b'{"fields":' + b'{"a":' * 900 + b"1" + b"}" * 901):
        assert subject(adding, "", nested, b"") == ""


def test_every_changing_route_has_a_name_of_its_own() -> None:
    """A new one would be recorded by its path, which is only better than nothing."""
    root = Path(ugro.__file__).parent
    sources = [path for part in ("kernel", "features", "web") for path in sorted((root / part).rglob("*.py"))]
    routes = [
        (method.upper(), re.sub(r"\{[^}]*\}", "1", path))
        for source in sources
        for method, path in re.findall(r'@app\.(post|put|delete|patch)\("([^"]+)"', source.read_text())
    ]
    declared = [(one.operation.method, re.sub(r"\{[^}]*\}", "1", one.operation.path)) for one in requests()]
    routes += [route for route in declared if route[0] != "GET"]
    assert len(routes) > 40
    found = [rule_for(*route) for route in routes]
    assert [one[0].action for one in found if one is not None and one[0].action.startswith(one[0].method)] == []


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    status = scope["status"]
    if status is None:
        raise RuntimeError("a bug")
    await send({"type": "http.response.start", "status": status, "headers": scope.get("answer_headers", [])})
    await send({"type": "http.response.body", "body": scope.get("answer", b"")})


class Calls:
    """Requests to an application that answers as each of them says."""

    def __init__(self, store: Store) -> None:
        self.audit = AuditLog(store.audit)
        self._trail = AuditTrail(
            _answer, self.audit, lambda scope: scope.get("who", WHO), lambda scope: bool(scope.get("stranger"))
        )

    async def __call__(self, method: str, path: str, status: int | None = 200, body: bytes = b"", **scope: Any) -> None:
        parts = iter([body[:5], body[5:]])
        left = 2

        async def receive() -> Message:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": next(parts), "more_body": left > 0}

        async def send(message: Message) -> None:
            pass

        scope = {"type": "http", "method": method, "path": path, "headers": [], "status": status, **scope}
        try:
            await self._trail(scope, receive, send)
        except RuntimeError:
            assert status is None

    async def recorded(self) -> list[tuple[str, str, str]]:
        return [(one.action, one.subject, one.outcome) for one in await self.audit.newest(100, "", None)]


def test_requests_are_recorded_with_their_outcome_and_reading_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        call = Calls(store)
        await call("POST", "/v1/exec", body=b'{"nodes": ["a"], "argv": ["env", "HF_TOKEN=hush"]}')
        await call("GET", "/v1/jobs")
        await call("POST", "/v1/nodes/a/drain", 404, answer=b'{"error":{"message":"no node a"}}', body=b"{}")
        await call("DELETE", "/v1/nodes/a", None)
        await call("POST", "/login", 303, answer_headers=[(b"set-cookie", b"x")], stranger=True)
        assert await call.recorded() == [
            ("exec", "a env 'HF_TOKEN=***'", "done"),
            ("drain", "a", "refused: no node a"),
            ("remove node", "a", "no answer"),
            ("sign in", "", "done"),
        ]
        [first, *_] = await store.audit.newest(10)
        assert (first.user, first.via, first.at[:2]) == (*WHO, "20")
        await store.close()

    asyncio.run(main())


def test_strangers_cannot_fill_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        call = Calls(store)
        for _ in range(200):
            await call("POST", "/login", 401, stranger=True)
            await call("POST", "/v1/jobs/1/cancel", 401, stranger=True)
            await call("GET", "/", 401, stranger=True, headers=[(b"authorization", b"Bearer x")])
            await call("GET", "/", 401, stranger=True)
        # A minute may end meanwhile.
        assert 10 <= len(await call.recorded()) <= 20
        await store.close()

    asyncio.run(main())


def test_what_is_left_out_is_counted() -> None:
    limit = RefusalLimit()
    within = [limit.counted(entry(), 30.0) for _ in range(25)]
    assert [one is not None for one in within] == [True] * 10 + [False] * 15
    later = limit.counted(entry(), 90.0)
    assert later is not None
    assert later.outcome == "done; 15 more before it"
    assert limit.counted(entry(), 91.0) == entry()


def test_refusals_of_one_user_do_not_count_for_another() -> None:
    limit = RefusalLimit()
    assert [limit.counted(entry(), 30.0) is not None for _ in range(11)] == [True] * 10 + [False]
    assert limit.counted(entry(user="bob"), 30.0) == entry(user="bob")


def test_nobody_fills_the_log_with_what_is_refused_and_all_changes_are_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        call = Calls(store)
        for _ in range(200):
            await call("POST", "/v1/agent/stop", 403, answer=b'{"error":{"message":"no"}}', who=("vic", "token x"))
        for number in range(25):
            await call("POST", f"/v1/nodes/n{number}/resume")
        found = await call.audit.newest(1000, "", None)
        assert 10 <= len([one for one in found if one.user == "vic"]) <= 20  # a minute may end meanwhile
        assert len([one for one in found if one.outcome == "done"]) == 25
        await store.close()

    asyncio.run(main())


def test_what_is_refused_is_recorded_also_if_it_would_have_changed_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        call, refused = Calls(store), b'{"error":{"message":"this needs the role operator"}}'
        for _ in range(3):  # a page asks again and again
            await call("GET", "/v1/audit", 403, answer=refused)
        await call("GET", "/v1/audit", 403, answer=refused, who=("bob", "pid 9"))
        await call("GET", "/v1/jobs/7", 404)
        await call("POST", "/v1/jobs/plan", 403, answer=refused)
        await call("POST", "/v1/tunnel", 403, query_string=b"node=gpu1&port=80", answer=refused)
        await call("POST", "/v1/tunnel", 503, query_string=b"node=gpu1&job=7&socket=talk", answer=b"")
        await call("POST", "/v1/tunnel", 200, query_string=b"node=gpu1&port=80")
        why = "refused: this needs the role operator"
        assert await call.recorded() == [
            ("read", "/v1/audit", why),
            ("read", "/v1/audit", why),
            ("POST /v1/jobs/plan", "", why),
            ("tunnel", "gpu1 port 80", why),
            ("tunnel", "gpu1 talk of job 7", "refused: 503"),
        ]
        await store.close()

    asyncio.run(main())


def test_the_end_of_a_tunnel_is_short_and_printable() -> None:
    assert tunnel_end(b"node=gpu1&port=8265") == "gpu1 port 8265"
    assert tunnel_end(b"node=a%1b%5d&port=" + b"9" * 1000).startswith("a�] port 9")
    assert len(tunnel_end(b"node=" + b"x" * 1000)) == 300


def test_who_does_most_pushes_out_their_own_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_store, "MOST_ENTRIES", 50)

    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        await store.audit.add([entry(number, user="bob") for number in range(20)])
        for first in range(0, 400, 40):
            await store.audit.add([entry(number) for number in range(first, first + 40)])
        kept = await store.audit.newest(1000)
        assert [one.subject for one in kept if one.user == "bob"] == [str(number) for number in range(20)]
        assert [one.subject for one in kept if one.user == "ann"] == [str(number) for number in range(370, 400)]
        await store.close()

    asyncio.run(main())


def test_the_log_is_bounded_and_read_by_time_and_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_store, "MOST_ENTRIES", 50)

    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        for first in range(0, 120, 40):
            await store.audit.add([entry(number) for number in range(first, first + 40)])
        kept = await store.audit.newest(1000)
        assert [one.subject for one in kept] == [str(number) for number in range(70, 120)]
        assert [one.subject for one in await store.audit.newest(2)] == ["118", "119"]
        await store.audit.add([entry(500, user="bob", at="2031-05-01")])
        assert [one.subject for one in await store.audit.newest(10, user="bob")] == ["500"]
        assert [one.subject for one in await store.audit.newest(10, since="2031")] == ["500"]
        assert await store.audit.remove("2031", 30) == 30
        assert await store.audit.remove("2031", 30) == 19
        assert [one.subject for one in await store.audit.newest(10)] == ["500"]
        await store.close()

    asyncio.run(main())


def test_entries_survive_a_database_that_cannot_be_written_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        audit = AuditLog(store.audit)
        sql(tmp_path / "state.db", "ALTER TABLE audit RENAME TO elsewhere")
        audit.note(entry(1))
        await audit.flush()
        sql(tmp_path / "state.db", "ALTER TABLE elsewhere RENAME TO audit")
        audit.note(entry(2))
        assert [one.subject for one in await audit.newest(10, "", None)] == ["1", "2"]
        await store.close()

    asyncio.run(main())
