"""An older state is put back while jobs run: nothing ends or runs twice, no id is used twice, the user decides."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.proof.faults import root_of
from tests.proof.place import Place
from tests.rig.agent import end_agent, environment
from tests.rig.engine import gated
from tests.rig.engines import on_each
from tests.rig.inside import call
from tests.rig.judge import Task
from tests.rig.older_state import RECORDS, put_back, saved
from tests.rig.sshd import SshdFarm
from tests.rig.stores import use_engine
from ugro.features.safe_mode.model import SafeMode
from ugro.features.safe_mode.operations import ReconcileAgent
from ugro.kernel.agent.operations import DrainNode, ResumeNode
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.operations import CancelJob, ExplainJob
from ugro.kernel.store.standing import BLOCK
from ugro.kernel.support.errors import InSafeMode, NotAllowed
from ugro.kernel.support.process import RECONCILE_POINTS

LATE = Task("late")
NEWER = Task("newer", lines=200, pause_s=0.05)


def submit_gated(place: Place, name: str, **fields: object) -> Job:
    """It ends when ``opened``."""
    script = f"echo {name} begins; {gated(place.folder / name)}; echo {name} ends"
    wanted = {"name": name, "command": ["sh", "-c", script], "cwd": "/", **fields}
    job = place.ask(lambda client: client.jobs.submit(fields=wanted, env={}, key=name))
    place.wait(lambda: in_state(place, job, "running"), f"{name} to run")
    return job


def submit(place: Place, key: str) -> Job:
    return place.ask(lambda client: client.jobs.submit(fields={"command": ["true"], "cwd": "/"}, env={}, key=key))


def saved_with_a_queue(place: Place, nodes: list[str]) -> Path:
    """A copy in which a job waits that has ended, and is gone from its node, since then."""
    for node in nodes:
        place.ask(lambda client, node=node: client.ask(DrainNode(node)))  # type: ignore[misc]
    place.submit(LATE)
    copy = saved(place.home, place.folder / "copy.db")
    for node in nodes:
        place.ask(lambda client, node=node: client.ask(ResumeNode(node)))  # type: ignore[misc]
    place.wait(lambda: place.job("late").is_final, "the queued job to end")
    run = f".ugro/agents/*/runs/{place.book.jobs['late']}.1"
    place.wait(lambda: not [path for root in place.roots for path in root.glob(run)], "its run to be removed")
    return copy


def opened(place: Place, *names: str) -> None:
    for name in names:
        (place.folder / name).touch()


def in_state(place: Place, job: Job, state: str) -> bool:
    return place.ask(lambda client: client.jobs.get(job.id)).state == state


def safe_mode(place: Place) -> SafeMode:
    """Once every node has said what it runs."""

    def seen() -> SafeMode | None:
        found = place.ask(lambda client: client.agent().safe_mode)
        return found if found is not None and not found.not_asked else None

    found = place.wait(seen, "safe mode")
    assert found is not None
    return found


def ended_well(place: Place, job: Job, name: str) -> None:
    place.wait(lambda: in_state(place, job, "succeeded"), f"{name} to succeed")
    found = place.ask(lambda client: client.jobs.get(job.id))
    assert (found.id, found.attempt, found.spec.name) == (job.id, 1, name)
    log = b"".join(piece.content for piece in place.ask(lambda client: list(client.jobs.logs(job.id))))
    assert log.decode() == f"{name} begins\n{name} ends\n"


def command(place: Place, *words: str) -> tuple[int, str, str]:
    done = call(["--cluster", str(place.cluster), *words], environment(place.home), place.folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.proof
def test_an_older_state_ends_nothing_and_catches_up_with_what_runs(tmp_path: Path) -> None:
    with Place(1) as place, SshdFarm(tmp_path, count=2) as farm:
        place.cluster, place.roots = farm.cluster_yaml(), [root_of(node) for node in farm.nodes]
        assert place.agent().wait_ready()
        known = submit_gated(place, "known")
        copy = saved_with_a_queue(place, [node.name for node in farm.nodes])
        newer = submit_gated(place, "newer")
        put_back(place.home, copy)

        mode = safe_mode(place)
        assert [(run.job, run.attempt, run.name) for run in mode.runs] == [(newer.id, 1, "newer")]
        with pytest.raises(InSafeMode, match="takes no jobs"):
            submit(place, "no")
        with pytest.raises(InSafeMode, match="ends no jobs"):
            place.ask(lambda client: client.ask(CancelJob(str(known.id))))
        shown_everywhere(place, newer)

        code, out, _ = command(place, "agent", "reconcile", "--adopt")
        assert code == 0
        assert f"job {newer.id}  recorded: attempt 1 on {mode.runs[0].node}" in out
        assert "recorded as succeeded in attempt 1: it ended after this state was saved" in out
        code, out, error = command(place, "agent", "reconcile", "--adopt")
        assert (code, out) == (6, "")
        assert "the agent is not in safe mode" in error
        opened(place, "known", "newer")
        ended_well(place, known, "known")
        ended_well(place, newer, "newer")
        assert submit(place, "after").id > BLOCK
        assert [entry.event for entry in place.ledger.entries() if entry.token == "late"].count("begin") == 1
        finals = place.finals()
        assert (finals["late"].state, finals["late"].attempt) == ("succeeded", 1)


def shown_everywhere(place: Place, newer: Job) -> None:
    for words in (("status",), ("why", "late"), ("doctor",), ("agent", "status")):
        _, out, error = command(place, *words)
        assert "safe mode" in error, words
        assert "ugro agent reconcile" in error, words
    assert f"attempt 1 of job {newer.id}" in out
    _, out, _ = command(place, "why", "late")
    assert "the agent is in safe mode" in out
    _, out, _ = command(place, "status", "--json")
    document = json.loads(out)
    assert document["safe_mode"]["runs"][0]["job"] == newer.id
    assert {job["reason"] for job in document["jobs"] if job["state"] == "queued"} == {
        "the agent is in safe mode: it starts nothing"
    }
    code, out, _ = command(place, "doctor")
    assert code == 1
    assert "agent\tstate" in out
    code, _, error = command(place, "agent", "reconcile", "--adopt", "--forget")
    assert (code, "exclude each other" in error) == (2, True)
    _, out, _ = command(place, "agent", "reconcile")
    assert "ugro agent reconcile --forget:" in out
    assert f"job {newer.id}  ended and removed: attempt 1" in out
    assert f"the next job gets id {BLOCK + 1}" in out


@pytest.mark.proof
def test_a_log_that_was_followed_is_whole_although_its_end_is_in_a_later_state() -> None:
    """Of small commands it is recorded with their end. What is in files is whole by then, or goes with that record."""
    with Place(1) as place:
        assert place.agent().wait_ready()
        small = submit_gated(place, "small")
        file = place.home / f"jobs/{small.id}/attempt_1/logs/rank_0.log"
        place.wait(lambda: file.exists() and file.read_text() == "small begins\n", "what it wrote so far")
        copy = saved(place.home, place.folder / "copy.db")
        opened(place, "small")
        place.wait(lambda: in_state(place, small, "succeeded"), "it to end")
        run = f".ugro/agents/*/runs/{small.id}.1"
        place.wait(lambda: not [path for root in place.roots for path in root.glob(run)], "its run to be removed")
        put_back(place.home, copy)
        safe_mode(place)
        place.ask(lambda client: client.ask(ReconcileAgent("adopt")))
        ended_well(place, small, "small")


@pytest.mark.proof
def test_what_is_forgotten_is_ended_and_its_id_is_not_used_again() -> None:
    with Place(2) as place:
        assert place.agent().wait_ready()
        known = submit_gated(place, "known")
        copy = saved(place.home, place.folder / "copy.db")
        place.submit(NEWER)
        place.wait_begun("newer")
        put_back(place.home, copy)
        assert [run.job for run in safe_mode(place).runs] == [place.book.jobs["newer"]]
        done = place.ask(lambda client: client.ask(ReconcileAgent("forget")))
        assert [change.what for change in done.forget] == ["end"]
        place.wait(lambda: not place.ledger.alive(), "its rank to be gone")
        place.wait(lambda: len(list(place.folder.glob("n*/.ugro/agents/*/runs/*"))) == 1, "its folder to be removed")
        opened(place, "known")
        ended_well(place, known, "known")
        assert submit(place, "after").id == done.first_id > place.book.jobs["newer"]


@pytest.mark.proof
def test_nodes_that_have_met_later_generations_are_heard_and_obey_after_the_decision() -> None:
    """The records on this machine are lost as well: what the nodes keep is enough."""
    with Place(2) as place:
        assert place.agent().wait_ready()
        copy = saved(place.home, place.folder / "copy.db")
        for _ in range(3):
            place.ask(lambda client: client.restart_agent())
        newer = submit_gated(place, "newer")
        met = place.ask(lambda client: client.agent().generation)
        put_back(place.home, copy, without=RECORDS)
        mode = safe_mode(place)
        assert mode.generation == met
        assert any(f"has met generation {met} of this agent" in reason for reason in mode.reasons)
        assert [run.job for run in mode.runs] == [newer.id]
        log = place.home / "agent.log"
        place.wait(lambda: log.read_text().count("is not probed") == 2, "the nodes that refuse us to be left alone")
        assert place.ask(lambda client: client.ask(ReconcileAgent("adopt"))).generation == met + 1
        opened(place, "newer")
        ended_well(place, newer, "newer")
        assert submit_gated(place, "after").id > BLOCK
        opened(place, "after")


@pytest.mark.proof
def test_a_job_that_ended_meanwhile_is_not_run_again_although_only_nodes_remember_it() -> None:
    with Place(2) as place:
        assert place.agent().wait_ready()
        copy = saved_with_a_queue(place, [root.name for root in place.roots])
        newer = submit_gated(place, "newer")
        put_back(place.home, copy, without=RECORDS)
        safe_mode(place)
        place.ask(lambda client: client.ask(ReconcileAgent("adopt")))
        assert "how is not known" in place.job("late").reason
        opened(place, "newer")
        ended_well(place, newer, "newer")
        assert [entry.event for entry in place.ledger.entries() if entry.token == "late"].count("begin") == 1


@pytest.mark.proof
def test_safe_mode_that_no_node_has_a_reason_for_ends_by_itself_with_ids_above_all_reserved_ones() -> None:
    with Place(1) as place:
        assert place.agent().wait_ready()
        known = submit_gated(place, "known")
        put_back(place.home, saved(place.home, place.folder / "copy.db"), without=RECORDS)
        place.wait(lambda: place.ask(lambda client: client.agent().safe_mode) is None, "safe mode to end")
        assert submit_gated(place, "after").id > BLOCK
        opened(place, "known", "after")
        ended_well(place, known, "known")


@pytest.mark.proof
def test_no_job_of_a_whole_directory_that_was_put_back_starts_before_the_node_that_runs_it_has_answered() -> None:
    """The records are as old as the state: only the node knows, and it takes longer than the other one."""
    with Place(2) as place:
        slow = place.folder / "slow"
        late_to_answer(place, "n1", slow)
        assert place.agent().wait_ready()
        for node in ("n1", "n2"):
            place.ask(lambda client, node=node: client.ask(DrainNode(node)))  # type: ignore[misc]
        script = f"echo >>{place.folder}/begun; {gated(place.folder / 'late')}"
        wanted = {"name": "late", "command": ["sh", "-c", script], "cwd": "/"}
        late = place.ask(lambda client: client.jobs.submit(fields=wanted, env={}, key="late"))
        place.ask(lambda client: client.stop_agent())
        copy = Path(shutil.copytree(place.home, place.folder / "copy"))
        place.ask(lambda client: client.ask(ResumeNode("n1")))
        place.wait(lambda: (place.folder / "begun").exists(), "the job to run on n1")
        end_agent(place.home)
        shutil.rmtree(place.home)
        copy.rename(place.home)
        with closing(sqlite3.connect(place.home / "state.db")) as db, db:
            db.execute("DELETE FROM drained_nodes")
        slow.touch()
        assert place.agent().wait_ready()
        said = place.ask(lambda client: client.ask(ExplainJob(str(late.id))))
        assert said.text == "was queued before the agent started: waits until it is known what runs on n1"
        later = submit(place, "later")
        place.wait(lambda: in_state(place, later, "succeeded"), "a job of this agent's time to succeed")
        slow.unlink()
        assert [run.job for run in safe_mode(place).runs] == [late.id]
        place.ask(lambda client: client.ask(ReconcileAgent("adopt")))
        opened(place, "late")
        place.wait(lambda: in_state(place, late, "succeeded"), "it to succeed")
        assert (place.folder / "begun").read_text() == "\n"


def late_to_answer(place: Place, node: str, while_there: Path) -> None:
    python = place.folder / "python"
    python.write_text(f'#!/bin/sh\nwhile [ -e {while_there} ]; do sleep 0.1; done\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cluster = yaml.safe_load(place.cluster.read_text())
    cluster["nodes"][node]["python"] = str(python)
    place.cluster.write_text(yaml.safe_dump(cluster))


@pytest.mark.proof
def test_nodes_obey_the_newer_state_when_it_is_put_back_instead() -> None:
    """However often an agent was started with the older one."""
    with Place(1) as place:
        assert place.agent().wait_ready()
        copy = saved(place.home, place.folder / "copy.db")
        newer = submit_gated(place, "newer")
        newest = saved(place.home, place.folder / "newest.db")
        put_back(place.home, copy)
        safe_mode(place)
        for _ in range(2):
            place.ask(lambda client: client.restart_agent())
            safe_mode(place)
        put_back(place.home, newest)
        assert place.ask(lambda client: client.agent().safe_mode) is None
        opened(place, "newer")
        ended_well(place, newer, "newer")


@pytest.mark.proof
def test_a_leased_job_is_kept_alive_in_safe_mode() -> None:
    """Otherwise its node would end it for want of a word from the agent."""
    with Place(1) as place:
        assert place.agent().wait_ready()
        copy = saved(place.home, place.folder / "copy.db")
        newer = submit_gated(place, "newer", on_lost="restart", lost_after=20)
        put_back(place.home, copy)
        safe_mode(place)
        for _ in range(2):
            until_ms = renewed_ms(place.roots[0])
            place.wait(lambda until_ms=until_ms: renewed_ms(place.roots[0]) > until_ms, "its lease to be renewed")  # type: ignore[misc]
        place.ask(lambda client: client.ask(ReconcileAgent("adopt")))
        opened(place, "newer")
        ended_well(place, newer, "newer")


def renewed_ms(root: Path) -> int:
    [lease] = root.glob(".ugro/agents/*/lease")
    return int(lease.read_text().split()[1])


@pytest.mark.proof
@on_each
@pytest.mark.parametrize("how", ["adopt", "forget"])
@pytest.mark.parametrize("point", RECONCILE_POINTS)
def test_a_decision_that_is_cut_short_is_made_as_a_whole_or_not_at_all(point: str, how: str, engine: str) -> None:
    with Place(1) as place:
        use_engine(place.home)
        assert place.agent().wait_ready()
        copy = saved(place.home, place.folder / "copy.db")
        newer = submit_gated(place, "newer")
        put_back(place.home, copy)
        armed = place.agent(point)
        assert armed.wait_ready()
        safe_mode(place)
        command(place, "agent", "reconcile", f"--{how}")
        place.wait(lambda: armed.was_killed, "the agent to die")
        if point == "reconcile.recorded":
            with pytest.raises(NotAllowed, match="not in safe mode"):
                place.ask(lambda client: client.ask(ReconcileAgent("adopt")))
        else:
            safe_mode(place)
            place.ask(lambda client: client.ask(ReconcileAgent("adopt" if how == "adopt" else "forget")))
        opened(place, "newer")
        if how == "adopt":
            ended_well(place, newer, "newer")
        place.wait(lambda: not list(place.folder.glob("n*/.ugro/agents/*/runs/*")), "every run to be removed")
