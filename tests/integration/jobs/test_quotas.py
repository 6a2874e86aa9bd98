"""Quotas and usage with a real agent: what waits and for how long, what is refused, and what is on the books."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.jobs.test_jobs_cli import job_of, submitted
from tests.integration.sharing import commands
from tests.rig import needs
from tests.rig.engine import EngineRig, gated, in_loop, is_final, running, soon
from tests.rig.ports import free_port
from tests.rig.service import SERVER
from tests.rig.waiting import wait_until
from ugro.features.quotas.model import DAY_S
from ugro.features.quotas.service import UsageService
from ugro.features.training.rules_energy import Price
from ugro.kernel.jobs.model import Job, JobSpec, Resources
from ugro.kernel.jobs.moves import charge
from ugro.kernel.jobs.scheduling.why import why
from ugro.kernel.support.moments import Instant

CLUSTER = """
nodes:
  here: {transport: local, remote_root: %s/root}
quotas:
  default: {cpus: %d, queued_jobs: 2, max_priority: normal, max_time_limit: 1h}
"""
SHORT = ("--time-limit", "10m", "--cpus", "1", "--no-sync")


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        ugro.cluster = ugro.home / "cluster.yaml"
        yield ugro


def allow_cores(ugro: Ugro, cores: int) -> None:
    assert ugro.cluster is not None
    ugro.cluster.write_text(CLUSTER % (ugro.home, cores))


def test_a_job_above_a_quota_waits_is_explained_and_starts_when_there_is_room(ugro: Ugro) -> None:
    allow_cores(ugro, 1)
    gate = ugro.home / "go"
    wait = ("--", "sh", "-c", gated(gate))
    first = submitted(ugro, "run", *SHORT, *wait)
    until_running(ugro, first)
    second, third = (submitted(ugro, "run", *SHORT, *wait) for _ in range(2))
    text = ugro("why", str(second)).stdout
    assert "quota cpus of " in text
    assert f"1 of 1 cores are in use, and the job needs 1; waits for job {first}, for " in text
    told = json.loads(ugro("why", str(second), "--json").stdout)["why"]
    assert told["quota"].startswith("quota cpus of ")
    assert told["quota_until"] is not None
    assert told["blocked_by"] == [first]

    refused = ugro("run", *SHORT, "--", "true")
    assert (refused.returncode, "2 jobs of at most 2 already in the queue" in refused.stderr) == (6, True)
    check_usage(ugro)
    allow_cores(ugro, 2)  # the agent applies the edit
    until_running(ugro, second)
    gate.touch()
    for job in (first, second, third):
        assert ugro("wait", str(job)).returncode == 0
    ended = only_user(ugro)
    assert ended["jobs"] == 3
    assert ended["cpu_hours"] > 0
    assert ugro("agent", "restart").returncode == 0
    again = only_user(ugro)
    assert (again["jobs"], again["cpu_hours"]) == (3, ended["cpu_hours"])
    assert f'ugro_usage_jobs_total{{user="{again["name"]}"}} 3' in ugro("metrics").stdout


def until_running(ugro: Ugro, job: int) -> None:
    wait_until(lambda: job_of(ugro, "status", str(job))["state"] == "running", 60, f"job {job} to run")


def only_user(ugro: Ugro) -> dict[str, Any]:
    [user] = json.loads(ugro("usage", "--json").stdout)["usage"]["users"]
    return dict(user)


def check_usage(ugro: Ugro) -> None:
    """While one job runs and two wait."""
    user = only_user(ugro)
    quota = {one["limit"]: (one["used"], one["most"]) for one in user["quota"]}
    of_each_job = {"max_priority": (None, 50), "max_time_limit": (None, 3600)}
    assert quota == {"cpus": (1.0, 1), "queued_jobs": (2.0, 2), **of_each_job}
    assert (user["jobs"], user["queued"], user["cpus"]) == (1, 2, 1)
    assert "cpus 1/1" in ugro("usage").stdout


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (("--priority", "urgent", *SHORT), "priority 90, and the highest is 50", "use --priority 50"),
        (("--no-sync",), "it has no time limit, and the longest is 1h", "use --time-limit 1h"),
        (("--time-limit", "2h", "--no-sync"), "time limit 2h, and the longest is 1h", "use --time-limit 1h"),
        (("--cpus", "2", "--time-limit", "1m", "--no-sync"), "needs 2 cores, and the most is 1 core", "ask for less"),
    ],
)
def test_what_a_quota_never_allows_is_refused_at_once(
    ugro: Ugro, options: tuple[str, ...], error: str, hint: str
) -> None:
    allow_cores(ugro, 1)
    for dry in ((), ("--dry-run",)):
        refused = ugro("run", *options, *dry, "--", "true")
        assert refused.returncode == 6
        assert error in refused.stderr
        assert hint in refused.stderr


SERVE = ("serve", "--detach", "--name", "web", "--no-sync")
SLEEP = ("--", "sh", "-c", "sleep 600 # {port}")


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("sweep", "train.py", "-d", "--lr", "1,2"), "it has no time limit", "use --time-limit 1h"),
        (("sweep", "train.py", "-d", "--study", "--time-limit", "2h"), "the longest is 1h", "use --time-limit 1h"),
        ((*SERVE, *SLEEP), "it has no time limit", "it runs until it is stopped"),
        ((*SERVE, "--priority", "urgent", *SLEEP), "priority 90", "use --priority 50"),
        (("cluster", "start"), "it has no time limit", "use --time-limit 1h"),
        (("cluster", "start", "--time-limit", "30m", "--cpus", "2"), "needs 2 cores, and the most is 1", "for less"),
        (
            ("cluster", "start", "--time-limit", "30m", "--cpus", "1", "--workers-per-node", "2"),
            "the cluster needs 2 cores, and the most is 1",
            "for less",
        ),
    ],
)
def test_what_would_make_jobs_that_a_quota_never_allows_is_refused_at_once(
    ugro: Ugro, words: tuple[str, ...], error: str, hint: str
) -> None:
    allow_cores(ugro, 1)
    (ugro.home / "cwd" / "train.py").write_text("print(1)\n")
    refused = ugro(*words)
    assert (refused.returncode, error in refused.stderr, hint in refused.stderr) == (6, True, True), refused.stderr
    assert json.loads(ugro("sweep", "ls", "--json").stdout)["sweeps"] == []
    assert json.loads(ugro("serve", "ls", "--json").stdout)["services"] == []
    assert json.loads(ugro("cluster", "status", "--all", "--json").stdout)["clusters"] == []


@pytest.mark.proof
def test_a_ray_cluster_with_a_time_limit_that_its_quota_allows_starts(ugro: Ugro) -> None:
    pytest.importorskip("ray")
    assert ugro.cluster is not None
    with_ray = CLUSTER.replace("transport: local", f"transport: local, python: {sys.executable}")
    ugro.cluster.write_text(with_ray % (ugro.home, 1))
    words = ("--nodes", "1", "--cpus", "1", "--memory", "600MB", "--time-limit", "30m", "--name", "short")
    started = ugro("cluster", "start", *words, timeout=180)
    assert started.returncode == 0, started.stderr
    scaled = ugro("cluster", "scale", "2", "short")
    assert (scaled.returncode, "the cluster needs 2 cores" in scaled.stderr) == (6, True), scaled.stderr
    assert ugro("cluster", "stop", "short", timeout=120).returncode == 0


@pytest.mark.proof
@needs.programs("haproxy")
def test_the_door_of_a_service_has_no_quota(ugro: Ugro) -> None:
    assert ugro.cluster is not None
    ugro.cluster.write_text(CLUSTER.replace("max_priority: normal, max_time_limit: 1h", "max_priority: batch") % (
        ugro.home, 1
    ))  # fmt: skip
    (ugro.home / "cwd" / "server.py").write_text(SERVER)
    words = ("--name", "quiet", "--priority", "batch", "--cpus", "1", "--health", "/health")
    command = ("--", "{python}", "server.py", "{port}", "one")
    started = ugro("serve", *words, "--port", str(free_port()), *command, timeout=120)
    assert started.returncode == 0, started.stderr
    assert ugro("serve", "stop", "quiet", timeout=60).returncode == 0


class TeamRig(EngineRig):
    def _write(self) -> None:
        super()._write()
        with self.file.open("a") as file:
            file.write("quotas: {groups: {students: {members: [ann, bob], cpus: 1}}}\n")


def test_a_group_shares_its_quota_and_others_are_not_held_up(tmp_path: Path) -> None:
    place = TeamRig(tmp_path, 1)
    gate = tmp_path / "go"

    async def work() -> None:
        async with place.agent() as (store, engine):

            async def submit(user: str, *argv: str) -> Job:
                spec = JobSpec("job", argv, resources=Resources(cpus=1))
                job = (await store.jobs.submit(spec, user, user)).job
                engine.wake()
                return job

            ann = await submit("ann", "sh", "-c", gated(gate))
            await running(store, ann)
            bob = await submit("bob", "true")
            await soon(store, await submit("eve", "true"), is_final)
            view = await place.scheduler_input.take(engine.live)
            assert why(view, bob.id, engine.live.queue).quota == "quota cpus of group students"
            gate.touch()
            await soon(store, bob, is_final)
            usage = UsageService(store.usage, engine.live, place.scheduler_input, lambda: Price(0.3, "EUR"))
            report = await usage.report(0.0)
            assert {row.name: row.jobs for row in report.users} == {"ann": 1, "bob": 1, "eve": 1}
            [group] = report.groups
            assert (group.jobs, group.members, group.cost) == (2, ("ann", "bob"), 0.0)
            mine = await usage.report(0.0, "eve")
            assert ([row.name for row in mine.users], mine.groups) == (["eve"], ())

    try:
        in_loop(work())
    finally:
        place.end()


def test_who_has_used_less_lately_is_first_although_the_other_came_first(tmp_path: Path) -> None:
    """Neither holds anything when the node is free again: only what is on the books tells them apart."""
    place, gate, order = EngineRig(tmp_path, 1), tmp_path / "go", tmp_path / "order"

    async def work() -> None:
        async with place.agent() as (store, engine):

            async def submit(user: str, cpus: int, script: str) -> Job:
                spec = JobSpec("job", ("sh", "-c", script), resources=Resources(cpus=cpus))
                job = (await store.jobs.submit(spec, user, user)).job
                engine.wake()
                return job

            eves, _ = await running(store, await submit("eve", 1, gated(gate)))
            begun = eves.attempt_started
            assert begun is not None
            ended = Instant(begun.wall_s, begun.boot_id, begun.boot_s + 4 * DAY_S)
            # As if ann had done the same, for four days.
            await store._database.run(lambda db: charge(db, replace(eves, user="ann"), ended))
            [node] = (await place.scheduler_input.take(engine.live)).nodes
            waiting = [await submit(user, node.cores, f"echo {user} >> {order}") for user in ("ann", "bob")]
            gate.touch()
            for job in waiting:
                await soon(store, job, is_final)
            assert order.read_text().split() == ["bob", "ann"]

    try:
        in_loop(work())
    finally:
        place.end()
