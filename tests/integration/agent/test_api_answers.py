"""What the API's description says of answers, against the answers of a running agent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rig.agent import AgentProcess, log_tail
from tests.rig.described import Checked, Step
from tests.rig.ports import free_port
from tests.rig.service import SERVER
from ugro.kernel.operations.access_rules import RULES
from ugro.kernel.operations.answers import ANSWERS
from ugro.kernel.support.state_dir import StateDir

# Prints, has a metric and leaves a file; fails at its first attempt if it is told to.
TRAINING = """
import json, os, pathlib, sys
print("hello", flush=True)
output = pathlib.Path(os.environ["UGRO_OUTPUT"])
with (output / "metrics.jsonl").open("a") as metrics:
    for step in range(5):
        metrics.write(json.dumps({"step": step, "loss": 1 / (step + 1), "odd": float("nan")}) + "\\n")
(output / "model.bin").write_bytes(b"weights")
sys.exit(3 if sys.argv[1:] == ["fails"] and os.environ["UGRO_ATTEMPT"] == "1" else 0)
"""
CLUSTER = """
remote_root: {folder}/grid
nodes: {{here: {{transport: local}}}}
dashboard: {{port: {port}}}
energy: {{price_per_kwh: 0.3, currency: EUR}}
quotas: {{default: {{gpus: 4, queued_jobs: 100}}}}
hooks: {{job_ended: {{call: ["true"]}}}}
"""


def job(name: str, *command: str, **fields: Any) -> dict[str, Any]:
    asked = {"name": name, "command": list(command), "sync": False, "cwd": "/", **fields}
    return {"user": "", "key": name, "fields": asked}


def of_jobs(folder: Path) -> list[Step]:
    made = job("made", sys.executable, str(folder / "train.py"))
    again = job("again", sys.executable, str(folder / "train.py"), "fails", retries=1)
    long = job("long", "sleep", "600", env={"SECRET": None})
    given = {**long, "env": {"SECRET": "s"}}
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "one.csv").write_text("1\n")
    return [
        Step("POST /v1/folders", body=job("reads", "true", folders={"data": str(folder / "data")})),
        Step("POST /v1/jobs/plan", body=made),
        Step("POST /v1/jobs", body=made),
        Step("POST /v1/jobs", body=long),
        Step("POST /v1/jobs", body=given),
        Step("POST /v1/jobs/batch", body={"jobs": [again]}),
        Step("GET /v1/jobs/{word}/wait", ("made",)),
        Step("GET /v1/jobs/{word}/wait", ("again",)),
        *(Step("GET /v1/jobs/{word}" + rest, (name,)) for name in ("made", "again", "long") for rest in OF_A_JOB),
        Step("GET /v1/jobs", query="limit=10&state=succeeded&state=running"),
        Step("GET /v1/compare", query="job=made&job=again"),
        Step("GET /v1/metrics", query="job=made"),
        Step("GET /v1/metrics", query="job=made&job=again&column=means&column=steps&digits=3"),
        Step("GET /v1/metrics/keys", query="job=made&job=again"),
        Step("GET /v1/headlines"),
        Step("GET /v1/advice", query="name=made&node=here"),
        Step("GET /v1/usage"),
        Step("GET /v1/events"),
        Step("GET /v1/changes", query="after=0", until=b'"nodes"'),
        Step("PUT /v1/jobs/{word}/notes", ("made",), body={"text": "good", "add": ["best"]}),
        Step("POST /v1/jobs/{word}/results/fetch", ("made",), body={}),
        Step("POST /v1/jobs/{word}/cancel", ("long",)),
        Step("POST /v1/jobs/{word}/retry", ("made",), body={"key": "retry", "user": ""}),
        Step("DELETE /v1/submissions/{key}", ("never",)),
        Step("DELETE /v1/submissions/{key}", ("retry",)),
        Step("DELETE /v1/jobs/{word}/results", ("again",)),
        Step("GET /v1/jobs/{word}/results", ("again",)),
    ]


OF_A_JOB = (
    "", "/file", "/why", "/results", "/results/brief", "/results/files", "/notes", "/steps", "/traces", "/headline",
    "/energy",
)  # fmt: skip


def of_nodes(folder: Path) -> list[Step]:
    return [
        Step("GET /v1/agent"),
        Step("GET /v1/health"),
        Step("GET /v1/best"),
        Step("GET /v1/nodes"),
        Step("GET /v1/nodes/{name}/history", ("here",)),
        Step("GET /v1/nodes/{name}/hardware", ("here",)),
        Step("GET /v1/hardware"),
        Step("POST /v1/bench", body={"mode": "quick", "parts": ["cpu"], "force": True}),
        Step("GET /v1/doctor"),
        Step("GET /v1/ssh-hosts", query="ssh_config=/dev/null"),
        Step("POST /v1/examine", body={"hosts": ["127.0.0.1:1"]}),
        Step("GET /v1/discovery"),
        Step("GET /v1/discovery/reports", query="node=none"),
        Step("GET /v1/sync"),
        Step("POST /v1/sync", body={"folder": str(folder), "dry_run": True}),
        Step("POST /v1/tidy", body={}),
        Step("GET /v1/environments"),
        Step("POST /v1/setup", body={}),
        Step("POST /v1/environments/gc", body={}),
        Step("POST /v1/nodes/{name}/drain", ("here",), body={"reason": "test"}),
        Step("POST /v1/nodes/{name}/resume", ("here",)),
        Step("GET /v1/cluster/file", query=f"path={folder / 'cluster.yaml'}"),
        Step("GET /v1/ray-clusters"),
    ]


def of_people(folder: Path) -> list[Step]:
    return [
        Step("GET /v1/whoami"),
        Step("POST /v1/tokens", body={"role": "user", "expires_s": 3600, "name": "ci"}),
        Step("GET /v1/tokens"),
        Step("DELETE /v1/tokens/{word}", ("ci",)),
        Step("GET /v1/audit"),
        Step("POST /v1/dashboard"),
        Step("GET /v1/alerts"),
        Step("POST /v1/alerts/test", body={"channels": ["log"]}),
        Step("GET /v1/hooks"),
        Step("POST /v1/hooks/{name}/test", ("job_ended",)),
        Step("GET /v1/hooks/deliveries"),
    ]


def of_sweeps(folder: Path) -> list[Step]:
    text = f"""
command: [{sys.executable}, {folder / "train.py"}, "${{args}}"]
metric: {{name: loss}}
method: random
parameters: {{lr: {{distribution: log_uniform_values, min: 0.001, max: 0.1}}, layers: {{values: [1, 2]}}}}
"""
    submit = {"user": "", "key": "sweep", "fields": {"name": "search", "sync": False, "cwd": "/"}}
    asked = {"submit": submit, "text": text, "budget": {"trials": 4}}
    return [
        Step("POST /v1/sweeps/plan", body=asked),
        Step("POST /v1/sweeps", body=asked),
        Step("GET /v1/sweeps/{word}/watch", ("search",)),
        Step("GET /v1/sweeps"),
        Step("GET /v1/sweeps/{word}", ("search",), query="history=true"),
        Step("GET /v1/sweeps/{word}/document", ("search",)),
        Step("GET /v1/sweeps/{word}/importance", ("search",)),
        Step("POST /v1/sweeps/{word}/launch", ("search",), body={"user": "", "key": "best"}),
        Step("POST /v1/sweeps/{word}/resume", ("search",), body={"trials": 40}),
        Step("POST /v1/sweeps/{word}/stop", ("search",)),
    ]


def of_services(folder: Path) -> list[Step]:
    fields = {"name": "echo", "command": ["{python}", "server.py", "{port}", "one"], "cwd": str(folder / "code")}
    options = {"port": free_port(), "probes.ready.path": "/health", "replicas": 1, "keys": True}
    asked = {"submit": {"user": "", "key": "echo", "fields": fields}, "options": options}
    changed = {"submit": {"user": "", "key": "new", "fields": {**fields, "command": [*fields["command"][:3], "two"]}}}
    return [
        Step("POST /v1/services", body=asked),
        Step("GET /v1/services/{name}/watch", ("echo",), until=b'"state":"ready"'),
        Step("GET /v1/services"),
        Step("GET /v1/services/{name}", ("echo",)),
        Step("POST /v1/services/{name}/keys", ("echo",), body={"label": "ci"}),
        Step("GET /v1/services/{name}/keys", ("echo",)),
        Step("POST /v1/services/{name}/scale", ("echo",), body={"replicas": 2}),
        Step("POST /v1/services/{name}/update", ("echo",), body={"request": changed, "canary": 0.5}),
        Step("POST /v1/services/{name}/decide", ("echo",), body={"promotes": False}),
        Step("DELETE /v1/services/{name}", ("echo",)),
        Step("GET /v1/services/{name}/watch", ("echo",), until=b'"state":"stopped"'),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "server.py").write_text(SERVER)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(folder=tmp_path, port=free_port()))
    return tmp_path


@pytest.fixture
def checked(folder: Path) -> Iterator[Checked]:
    home = folder / "home"
    home.mkdir(mode=0o700)
    with ExitStack() as ending:
        agent = AgentProcess(home, folder / "cluster.yaml")
        ending.callback(agent.stop)
        assert agent.wait_ready(), log_tail(home)
        yield Checked(StateDir(home).socket)


ROOMS = {"jobs": of_jobs, "nodes": of_nodes, "people": of_people, "sweeps": of_sweeps, "services": of_services}


LONG = ("sweeps", "services")


@pytest.mark.parametrize("room", [pytest.param(one, marks=[pytest.mark.proof] * (one in LONG)) for one in ROOMS])
def test_what_the_agent_answers_is_what_the_description_says(checked: Checked, folder: Path, room: str) -> None:
    for step in ROOMS[room](folder):
        checked.ask(step)


def test_operations_have_names_of_their_own_and_every_described_answer_is_tried(checked: Checked, folder: Path) -> None:
    assert set(ANSWERS) == set(RULES), "kernel/operations/answers.py names every route"
    names = [answer.name for answer in ANSWERS.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.islower() for name in names)
    for route, operation in checked.description.routes():
        assert operation["summary"], route
        assert {"401", "403", "default"} <= set(operation["responses"]), route
        assert "422" not in operation["responses"], route
    tried = {step.route for room in ROOMS.values() for step in room(folder)}
    assert checked.description.described() - tried == {
        "DELETE /v1/services/{name}/keys/{key}",  # the key's id is made by the agent
        # Only of a training that has reported steps: monitoring/test_profile_cli.py has one.
        "GET /v1/jobs/{word}/profile", "POST /v1/jobs/{word}/trace",
        # There are none here.
        "GET /v1/environments/{word}", "DELETE /v1/environments/{word}",
        "POST /v1/ray-clusters", "GET /v1/ray-clusters/{name}", "GET /v1/ray-clusters/{name}/access",
        "POST /v1/ray-clusters/{name}/scale", "DELETE /v1/ray-clusters/{name}",
        # Only in safe mode, and only of nodes behind ssh.
        "GET /v1/agent/reconcile", "POST /v1/agent/reconcile",
        "GET /v1/nodes/{name}/hostkey", "POST /v1/nodes/{name}/hostkey",
    }  # fmt: skip


def test_errors_have_one_document_and_a_log_is_read_as_text(checked: Checked, folder: Path) -> None:
    assert checked.refused(Step("GET /v1/jobs/{word}", ("none",))) == (404, "not_found")
    assert checked.refused(Step("GET /v1/jobs", query="limit=many")) == (400, "usage")
    assert checked.refused(Step("POST /v1/jobs", body=job("big", "true", gpus_per_node=99))) == (409, "unsatisfiable")
    assert checked.refused(Step("GET /v1/nothing")) == (404, "not_found")
    assert checked.refused(Step("PATCH /v1/jobs")) == (405, "usage")
    checked.ask(Step("POST /v1/jobs", body=job("again", sys.executable, str(folder / "train.py"), "fails", retries=1)))
    whole = checked.text(Step("GET /v1/jobs/{word}/log", ("again",), query="follow=true"))
    assert whole == "hello\n[attempt 2]\nhello\n"
    assert checked.text(Step("GET /v1/jobs/{word}/log", ("again",), query="attempt=1&tail=1")) == "hello\n"
    assert checked.refused(Step("GET /v1/jobs/{word}/log", ("again",), query="rank=1")) == (404, "not_found")
