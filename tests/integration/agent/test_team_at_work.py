"""Four people share three nodes: three on the master, one on another machine. Real accounts, sshds and a cut cable."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.rig import team as rig
from tests.rig.netns import Way
from tests.rig.team import AWAY, PEOPLE, Team
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof

SECRET = "hush-4711"
# argv: a name, and a file that it waits for. Each GPU has a lock of the test's: who finds it taken writes that down.
WORK = """
umask 0
exec 9>>"$LEDGER/gpu-$UGRO_NODE"
flock -n 9 || echo "clash $1" >>"$LEDGER/lines"
echo "begin $1 $(id -un) $UGRO_NODE" >>"$LEDGER/lines"
until [ -e "$LEDGER/$2.go" ]; do sleep 0.1; done
echo "end $1" >>"$LEDGER/lines"
"""
TRAIN = "import getpass, pathlib, words\nprint(words.SAID, getpass.getuser(), flush=True)\n"
TRAIN += "pathlib.Path('made.txt').write_text(words.SAID)\n"


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    if (reason := rig.available()) is not None:
        pytest.skip(reason)
    quotas = {"default": {"gpus": 2, "max_priority": "normal"}, "users": {"bob": {"gpus": 1}}}
    roles = {"team": {"roles": {"cho": "operator"}}}
    with rig.team(Path(tempfile.mkdtemp(prefix="t")), quotas=quotas, **roles) as made:
        yield made
        lines = made.lines()
        assert [line for line in lines if line[0] == "clash"] == []
        begins = Counter(line[1] for line in lines if line[0] == "begin")
        assert [name for name, count in begins.items() if count > 1] == [], "each job ran once"


def work(team: Team, person: str, name: str, gate: str, *words: str) -> int:
    common = ("--no-sync", "--gpus-per-node", "1", f"--env=LEDGER={team.ledger}", "--name", name, *words)
    return team.submit(person, *common, "--", "sh", "-c", WORK, "sh", name, gate)


def test_everybody_is_who_they_are_and_their_jobs_run_in_their_own_accounts(team: Team) -> None:
    team.go("first")
    jobs = {person: work(team, person, f"first-{person}", "first") for person in PEOPLE}
    for person, job in jobs.items():
        found = team.until(job, "succeeded", "failed")
        assert (found["state"], found["user"]) == ("succeeded", person), team.owner("why", str(job)).stdout
        assert [node["account"] for node in found["nodes"]] == [person]
    assert {line[2] for line in team.lines() if line[0] == "begin"} == set(PEOPLE)


def test_a_quota_holds_and_is_named_and_what_can_never_fit_is_refused_at_once(team: Team) -> None:
    jobs = [work(team, "bob", f"quota-{number}", "quota") for number in range(3)]
    team.wait_for("begin quota-0")
    why = team("bob", "why", str(jobs[1])).stdout
    assert "quota gpus of bob: 1 of 1 GPUs are in use" in why.replace("\n", " "), why
    team.go("quota")
    team.wait_for("end quota-2")
    spans = [(line[0], line[1]) for line in team.lines() if line[1].startswith("quota-")]
    assert all((first[0], second[0]) != ("begin", "begin") for first, second in pairwise(spans)), spans
    script = ("launch", "--no-sync", "--nodes", "2", "--gpus-per-node", "1", "--detach", "/x.py")
    refused = team("bob", *script)
    assert refused.returncode == 6, (refused.stdout, refused.stderr)
    assert "quota" in refused.stderr
    urgent = team("ann", "run", "--no-sync", "--priority", "urgent", "--", "true")
    assert urgent.returncode == 6, urgent.stderr


def test_who_came_first_with_many_jobs_gets_no_more_than_the_others_from_then_on(team: Team) -> None:
    """Ann fills the queue first, and uses all that her quota gives while the others come."""
    for number in range(12):
        work(team, "ann", f"fair-ann-{number}", "fair")
    team.wait_for("begin fair-ann-1")
    others = ("cho", AWAY)
    for number in range(4):
        for person in others:
            work(team, person, f"fair-{person}-{number}", "fair")
    team.go("fair")
    for name in ("ann-11", *(f"{person}-3" for person in others)):
        team.wait_for(f"end fair-{name}")
    began = [line[1] for line in team.lines() if line[0] == "begin" and line[1].startswith("fair-")]
    last = max(began.index(f"fair-{person}-3") for person in others)
    got = Counter(name.split("-")[1] for name in began[2 : last + 1])  # she had two before they came
    assert got["ann"] <= 6, f"of ten that waited before any of theirs: {began}"
    used = {row["name"]: row["gpu_hours"] for row in json.loads(team.owner("usage", "--json").stdout)["usage"]["users"]}
    assert all(used[person] > 0 for person in ("ann", *others)), used


def test_nobody_sees_the_secrets_of_another_in_ugro_or_on_a_node(team: Team) -> None:
    held = work(team, "ann", "secret", "never", f"--env=MOTTO={SECRET}", "--private")
    team.wait_for("begin secret")
    node = team.job(held)["nodes"][0]["name"]
    for person in ("bob", "cho", AWAY):
        for words in (["status", "--json"], ["status", str(held), "--json"], ["events", "--json"], ["why", str(held)]):
            done = team(person, *words)
            assert SECRET not in done.stdout + done.stderr, (person, words)
        assert (team(person, "status", str(held)).returncode == 0) is (person == "cho"), "an operator sees that it is"
    assert SECRET in team("ann", "status", str(held), "--json").stdout
    # On the node, the kernel keeps them apart: neither variables nor files of ann can be read.
    look = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; cat ~ann/grid_workspace/.ugro/agents/*/runs/*/* 2>&1"
    spy = team.submit("bob", "--no-sync", "--gpus-per-node", "0", "--only", node, "--", "bash", "-c", look)
    team.until(spy, "succeeded", "failed")
    seen = team("bob", "logs", str(spy)).stdout
    assert "UGRO_JOB" in seen, "it can read its own"
    assert SECRET not in seen
    refused = team("bob", "cancel", str(held))
    assert refused.returncode in (4, 6), refused.stderr
    assert team("ann", "cancel", str(held)).returncode == 0
    team.until(held, "cancelled")


def test_a_viewers_token_can_do_nothing_but_look(team: Team) -> None:
    made = team("ann", "token", "create", "--role", "viewer", "--name", "wall", "--json")
    assert made.returncode == 0, made.stderr
    token = json.loads(made.stdout)["secret"]
    team.write_cluster(api={"bind": "127.0.0.1:0"})
    status = ("agent", "status", "--json")
    address = wait_until(lambda: json.loads(team.owner(*status).stdout)["agent"].get("api_url"), 30, "the API")
    assert [ask(address, token, "GET", path) for path in ("/jobs", "/nodes", "/whoami")] == [200] * 3
    for path in ("/jobs", "/jobs/1/cancel", "/jobs/1/retry", "/exec", "/nodes/n001/drain", "/nodes"):
        assert ask(address, token, "POST", path) == 403, path
    assert ask(address, "ugro_" + "x" * 40, "GET", "/jobs") == 401


def ask(address: str, token: str, method: str, path: str) -> int:
    head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(f"{address.rstrip('/')}{path}", body, head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_from_another_machine_code_goes_there_and_a_cut_cable_loses_nothing(team: Team) -> None:
    project = team.project(AWAY)
    (project / "train.py").write_text(TRAIN)
    (project / "words.py").write_text("SAID = 'from the laptop'\n")
    done = team(AWAY, "launch", "--gpus-per-node", "0", "train.py")
    assert (done.returncode, done.stdout) == (0, f"from the laptop {AWAY}\n"), done.stderr
    pulled = team(AWAY, "results", "last", "--pull", str(project / "got"))
    assert pulled.returncode == 0, pulled.stderr
    assert (project / "got" / "made.txt").read_text() == "from the laptop"

    count = "for i in $(seq 1 400); do echo line $i; sleep 0.02; done"
    job = team.submit(AWAY, "--no-sync", "--gpus-per-node", "0", "--", "sh", "-c", count)
    with team.following(AWAY, "logs", "-f", str(job)) as logs:
        assert logs.stdout is not None
        got = [logs.stdout.readline() for _ in range(20)]
        team.master.cable.cut(Way.BOTH)
        wait_until(lambda: team.job(job)["state"] == "succeeded", 60, "the job to end meanwhile")
        team.master.cable.heal()
        got += logs.stdout.readlines()
    assert got == [f"line {number}\n" for number in range(1, 401)]


def test_the_owner_sees_who_did_what(team: Team) -> None:
    team.go("audit")
    jobs = {person: work(team, person, f"audit-{person}", "audit") for person in PEOPLE}
    assert team("bob", "cancel", str(jobs["ann"])).returncode == 6
    entries = json.loads(team.owner("audit", "--json").stdout)["audit"]
    who = {(entry["user"], entry["action"], entry["outcome"].partition(":")[0]) for entry in entries}
    assert {(person, "submit", "done") for person in PEOPLE} <= who
    assert ("bob", "cancel", "refused") in who
