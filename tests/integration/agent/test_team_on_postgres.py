"""A team whose state is in PostgreSQL: what members submit, use and hide, and the tokens they make."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_team_at_work import ask, work
from tests.rig import postgres
from tests.rig import team as rig
from tests.rig.stores import on_engine
from tests.rig.team import AWAY, PEOPLE, Team
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof

SECRET = "hush-4711"


@pytest.fixture
def team() -> Iterator[Team]:
    if (reason := rig.available()) is not None:
        pytest.skip(reason)
    postgres.needed()
    more = {"quotas": {"users": {"bob": {"gpus": 1}}}, "api": {"bind": "127.0.0.1:0"}}
    with on_engine("postgres"), rig.team(Path(tempfile.mkdtemp(prefix="t")), **more) as made:
        yield made


def test_a_team_works_with_its_state_in_postgresql(team: Team) -> None:
    assert json.loads(team.owner("store", "status", "--json").stdout)["store"]["kind"] == "postgresql"
    jobs = {person: work(team, person, f"first-{person}", "first") for person in PEOPLE}
    second = work(team, "bob", "second-bob", "first")
    team.wait_for("begin first-bob")
    why = team("bob", "why", str(second)).stdout.replace("\n", " ")
    assert "quota gpus of bob: 1 of 1 GPUs are in use" in why, why
    team.go("first")
    for person, job in (*jobs.items(), ("bob", second)):
        found = team.until(job, "succeeded", "failed")
        assert (found["state"], found["user"]) == ("succeeded", person), team.owner("why", str(job)).stdout
    used = {row["name"]: row["gpu_hours"] for row in json.loads(team.owner("usage", "--json").stdout)["usage"]["users"]}
    assert all(used[person] > 0 for person in PEOPLE), used

    hidden = work(team, "ann", "hidden", "first", f"--env=MOTTO={SECRET}", "--private")
    assert SECRET in team("ann", "status", str(hidden), "--json").stdout
    for person in ("bob", AWAY):
        assert team(person, "status", str(hidden)).returncode != 0
        listed = team(person, "status", "--json").stdout
        assert (SECRET in listed, f'"id":{jobs["ann"]},' in listed.replace(" ", "")) == (False, True), listed
    team.until(hidden, "succeeded")

    made = team("bob", "token", "create", "--role", "viewer", "--name", "wall", "--json")
    assert made.returncode == 0, made.stderr
    token = json.loads(made.stdout)["secret"]
    status = ("agent", "status", "--json")
    address = wait_until(lambda: json.loads(team.owner(*status).stdout)["agent"].get("api_url"), 30, "the API")
    paths = ("/jobs", f"/jobs/{second}", f"/jobs/{hidden}")
    assert [ask(address, token, "GET", path) for path in paths] == [200, 200, 404]
    assert ask(address, token, "POST", f"/jobs/{second}/cancel") == 403
    assert team("bob", "token", "revoke", "wall").returncode == 0
    done = {(one["user"], one["action"]) for one in json.loads(team.owner("audit", "--json").stdout)["audit"]}
    assert {(person, "submit") for person in PEOPLE} <= done
