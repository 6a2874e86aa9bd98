"""The agent moves to another machine while a job runs: it goes on there, and the old agent has no say any more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proof.faults import root_of
from tests.proof.place import Place
from tests.rig.agent import end_agent, environment
from tests.rig.engine import gated
from tests.rig.inside import call
from tests.rig.judge import Task
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.features.safe_mode.operations import ReconcileAgent
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.agent.operations import DrainNode, ResumeNode
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import InSafeMode

pytestmark = pytest.mark.proof

LATE = Task("late")
MANY = 100_000  # lines: more than comes along with the end of a small command
_PATIENCE_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Two nodes behind real sshds, and the machine that the agent is moved from."""
    with Place(1) as place, SshdFarm(tmp_path, count=2) as farm:
        place.cluster, place.roots = farm.cluster_yaml(), [root_of(node) for node in farm.nodes]
        assert place.agent().wait_ready()
        yield place


def submit_gated(place: Place, name: str, lines: int = 1) -> Job:
    """It ends when the file with its name is there."""
    begin = f"{name} begins\n" * lines
    script = f"yes {name} begins | head -n {lines}; {gated(place.folder / name)}; echo {name} ends"
    wanted = {"name": name, "command": ["sh", "-c", script], "cwd": "/"}
    job = place.ask(lambda client: client.jobs.submit(fields=wanted, env={}, key=name))
    log = place.home / f"jobs/{job.id}/attempt_1/logs/rank_0.log"
    place.wait(lambda: log.exists() and log.read_text() == begin, f"{name} to begin")
    return job


def command(place: Place, home: Path, *words: str) -> str:
    done = call(["--cluster", str(place.cluster), *words], environment(home), place.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def backed_up(place: Place) -> Path:
    file = place.folder / "moved.db"
    command(place, place.home, "agent", "backup", str(file))
    return file


def restored(place: Place, file: Path) -> Path:
    """On another machine, as far as the agent can tell."""
    home = place.other_home()
    assert "restored 1 job" in command(place, home, "agent", "restore", str(file))
    assert place.agent(home=home).wait_ready()
    return home


def restored_without_cluster(place: Place, file: Path, nodes: list[str]) -> Path:
    """A command before the cluster file is there: the agent has this machine alone, and asks it."""
    home = place.other_home()
    command(place, home, "agent", "restore", str(file))

    def absent() -> list[str]:
        done = call(["agent", "status", "--json"], environment(home), Path("/"))
        mode = json.loads(done.stdout)["agent"]["safe_mode"] if done.returncode == 0 else None
        assert mode is None or mode["absent"] == sorted(nodes), mode
        return mode["not_asked"] if mode else []

    call(["status"], environment(home), Path("/"))
    wait_until(lambda: absent() == sorted(nodes), _PATIENCE_S, "this machine to be asked, and no other")
    return home


def status(place: Place, home: Path) -> AgentStatus:
    return place.ask(lambda client: client.agent(), home)


def wait_at_work(place: Place, home: Path) -> None:
    """Every node was asked whether it knows more."""
    wait_until(lambda: status(place, home).safe_mode is None, _PATIENCE_S, "the moved agent to go on")


def wait_fenced(place: Place, home: Path) -> None:
    def reasons() -> str:
        mode = status(place, home).safe_mode
        return "; ".join(mode.reasons) if mode else ""

    wait_until(lambda: "the agent was moved to another machine" in reasons(), _PATIENCE_S, "the old agent to say so")
    with pytest.raises(InSafeMode):
        place.ask(lambda client: client.jobs.submit(fields={"command": ["true"], "cwd": "/"}, env={}), home)


def log_of(place: Place, job: Job, home: Path) -> str:
    return b"".join(piece.content for piece in place.ask(lambda client: list(client.jobs.logs(job.id)), home)).decode()


def ended_well(place: Place, job: Job, name: str, home: Path) -> None:
    (place.folder / name).touch()

    def found() -> Job:
        return place.ask(lambda client: client.jobs.get(job.id), home)

    wait_until(lambda: found().is_final, _PATIENCE_S, f"{name} to end")
    assert (found().state, found().attempt) == ("succeeded", 1)
    assert log_of(place, job, home) == f"{name} begins\n{name} ends\n"


def works(place: Place, home: Path) -> None:
    def question(client: Client) -> Job:
        job = client.jobs.submit(fields={"command": ["true"], "cwd": "/"}, env={})
        return client.jobs.wait(job.id, timeout_s=_PATIENCE_S)

    assert place.ask(question, home).state == "succeeded"


def test_a_job_goes_on_when_the_old_machine_is_gone(place: Place) -> None:
    job = submit_gated(place, "moved")
    file = backed_up(place)
    end_agent(place.home)
    new = restored(place, file)
    wait_at_work(place, new)
    assert place.ask(lambda client: client.jobs.get(job.id), new).state == "running"
    ended_well(place, job, "moved", new)
    works(place, new)


def test_an_old_agent_that_still_runs_is_fenced_off_and_says_so(place: Place) -> None:
    job = submit_gated(place, "moved")
    old = status(place, place.home).generation
    new = restored(place, backed_up(place))
    wait_at_work(place, new)
    assert status(place, new).generation > old + 500
    wait_fenced(place, place.home)
    for _ in range(2):  # a generation more each time
        place.ask(lambda client: client.restart_agent())
        wait_fenced(place, place.home)
    ended_well(place, job, "moved", new)
    works(place, new)
    assert "safe mode" in command(place, place.home, "agent", "status")


def test_an_old_agent_that_was_restarted_since_the_backup_does_not_share_its_generation(place: Place) -> None:
    job = submit_gated(place, "moved")
    file = backed_up(place)
    place.ask(lambda client: client.restart_agent())
    new = restored(place, file)

    def decided() -> bool:
        """A node may say first that it has met the generation of that restart: then the user decides."""
        mode = status(place, new).safe_mode
        if mode is not None and not mode.not_asked and any("has met generation" in reason for reason in mode.reasons):
            place.ask(lambda client: client.ask(ReconcileAgent("adopt")), new)
        return status(place, new).safe_mode is None

    wait_until(decided, _PATIENCE_S, "the moved agent to go on")
    wait_fenced(place, place.home)
    ended_well(place, job, "moved", new)
    works(place, new)


@pytest.mark.parametrize("has_cluster_file", [True, False])
def test_what_has_run_since_the_backup_does_not_start_again(place: Place, has_cluster_file: bool) -> None:
    nodes = [root.parent.parent.name for root in place.roots]
    for node in nodes:
        place.ask(lambda client, node=node: client.ask(DrainNode(node)))  # type: ignore[misc]
    place.submit(LATE)
    file = backed_up(place)
    for node in nodes:
        place.ask(lambda client, node=node: client.ask(ResumeNode(node)))  # type: ignore[misc]
    place.wait(lambda: place.job("late").is_final, "the queued job to end")
    run = f".ugro/agents/*/runs/{place.book.jobs['late']}.1"
    place.wait(lambda: not [path for root in place.roots for path in root.glob(run)], "its run to be removed")
    end_agent(place.home)
    new = restored(place, file) if has_cluster_file else restored_without_cluster(place, file, nodes)

    def reasons() -> str:
        mode = status(place, new).safe_mode
        return "; ".join(mode.reasons) if mode and not mode.not_asked else ""

    wait_until(lambda: "has run in attempt 1 since" in reasons(), _PATIENCE_S, "the nodes to tell")
    command(place, new, "agent", "reconcile", "--adopt")
    found = place.job("late", new)
    assert (found.state, "how is not known" in found.reason) == ("failed", True)
    for node in nodes:
        place.ask(lambda client, node=node: client.ask(ResumeNode(node)), new)  # type: ignore[misc]
    works(place, new)
    assert [entry.event for entry in place.ledger.entries() if entry.token == "late"].count("begin") == 1


def test_a_folder_that_was_copied_as_a_whole_is_recognized_and_its_logs_continue_at_the_byte(place: Place) -> None:
    job = submit_gated(place, "moved", lines=MANY)
    place.ask(lambda client: client.stop_agent())
    new = place.other_home()
    new.rmdir()
    shutil.copytree(place.home, new, ignore=shutil.ignore_patterns("agent.sock", "agent.lock"))
    log = new / f"jobs/{job.id}/attempt_1/logs/rank_0.log"
    log.write_text("MOVED BEGINS\n" * MANY)  # bytes that no node has: they are not fetched again
    assert place.agent(home=new).wait_ready()
    wait_at_work(place, new)
    assert status(place, new).generation > 500
    (place.folder / "moved").touch()
    wait_until(lambda: place.ask(lambda client: client.jobs.get(job.id), new).is_final, _PATIENCE_S, "it to end")
    assert log_of(place, job, new) == "MOVED BEGINS\n" * MANY + "moved ends\n"
    wait_fenced(place, place.home)
