"""The agent's state on disk: backed up and restored by commands, refused when it is damaged or missing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, InProcess, Ugro
from tests.rig.agent import holder
from tests.rig.damage import clean_state, garbage_in_page_of, zero_page_of
from tests.rig.waiting import is_alive, processes_with, wait_until
from ugro.client.client import Client
from ugro.kernel.agent.backups import refuse_if_missing
from ugro.kernel.support.errors import Damaged, NotAllowed
from ugro.kernel.support.state_dir import StateDir

END_S = 15


@pytest.fixture
def ugro(ugro: Ugro) -> Ugro:
    """Most calls need no process of their own."""
    return InProcess(ugro.home)


def document(ugro: Ugro, *words: str) -> Any:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def job_ids(ugro: Ugro) -> list[int]:
    return sorted(job["id"] for job in document(ugro, "status")["jobs"])


@pytest.mark.proof
def test_a_state_is_backed_up_damaged_refused_and_restored(ugro: Ugro) -> None:
    state = ugro.home / "state.db"
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    made = document(ugro, "agent", "backup")["backup"]  # while the agent runs
    assert (made["jobs"], made["newest_job"], made["problem"]) == (1, 1, None)
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert "an agent runs" in ugro("agent", "restore", "--latest").stderr
    elsewhere = ugro.home / "cwd" / "mine.db"
    assert ugro("agent", "stop").returncode == 0
    assert document(ugro, "agent", "backup", str(elsewhere))["backup"]["jobs"] == 2  # without an agent
    assert ugro("agent", "backup", str(elsewhere)).returncode == 6  # nothing is overwritten
    assert "there is no folder /nowhere" in ugro("agent", "backup", "/nowhere/x.db").stderr

    zero_page_of("events")(state)
    damaged = state.read_bytes()
    for words in (("status",), ("run", "--", "true"), ("agent", "backup")):
        error, hint = ugro(*words).stderr.strip().splitlines()[-2:]
        assert error.startswith(f"error: {state} is damaged: ")
        assert Path(made["path"]).name in hint
        assert "ugro agent restore --latest" in hint
    assert state.read_bytes() == damaged

    key = ugro.home / "agent.key"
    own = key.read_bytes()
    key.write_bytes(b"another key")
    restored = document(ugro, "agent", "restore", "--latest")["restored"]
    assert restored["backup"]["path"] == made["path"]
    assert Path(restored["aside"][0]).read_bytes() == damaged
    assert Path(restored["aside"][-1]).read_bytes() == b"another key"
    assert key.read_bytes() == own
    assert job_ids(ugro) == [1]
    assert document(ugro, "agent", "restore", "mine.db", "--yes")["restored"]["backup"]["jobs"] == 2
    assert job_ids(ugro) == [1, 2]


@pytest.mark.proof
def test_a_missing_state_is_said_and_begun_again_only_when_asked_for(ugro: Ugro) -> None:
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert ugro("agent", "stop").returncode == 0
    (ugro.home / "state.db").unlink()
    with Client(home=ugro.home) as client:
        with pytest.raises(Damaged, match="missing or empty, but the folder has 1 folder of a job") as caught:
            client.jobs.newest()
        assert "ugro agent restore --empty" in str(caught.value.hint)
        assert client.backups.all() == []
        assert client.backups.begin_empty().backup is None
        assert client.jobs.newest() == []
        with pytest.raises(NotAllowed, match="an agent runs"):
            client.backups.begin_empty()
    assert ugro("agent", "restore", "nothing.db", "--yes").returncode == 4
    assert ugro("agent", "status").returncode == 0  # it was not stopped for nothing
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert job_ids(ugro) == [2]  # the folder of job 1 is there


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "name one FILE"),
        (("--latest", "--empty"), 2, "name one FILE"),
        (("nothing.db",), 4, "there is no backup nothing.db"),
        (("--latest",), 4, "there is no good backup"),
        ((".",), 4, ". is a folder"),
        (("text.db",), 1, "is damaged"),
        (("empty.db",), 1, "it is empty"),
    ],
)
def test_a_wrong_backup_is_one_clear_error_and_nothing_changes(
    ugro: Ugro, words: tuple[str, ...], code: int, said: str
) -> None:
    (ugro.home / "cwd" / "text.db").write_text("no database")
    (ugro.home / "cwd" / "empty.db").touch()
    answer = ugro("agent", "restore", *words)
    assert answer.returncode == code
    error, hint = answer.stderr.strip().splitlines()
    assert said in error
    assert hint.startswith("hint:")
    assert not list(ugro.home.glob("state.db*"))


@pytest.mark.proof
def test_damage_that_is_met_while_the_agent_runs_is_said_everywhere_and_jobs_run_on(ugro: Ugro) -> None:
    assert ugro("run", "--no-sync", "-d", "--", "sleep", "987.5").returncode == 0
    wait_until(lambda: processes_with(b"987.5"), END_S, "the job to run")
    assert document(ugro, "agent", "backup")["backup"]["jobs"] == 1
    assert ugro("agent", "restart").returncode == 0  # what it has read of its file is forgotten
    garbage_in_page_of("sqlite_autoindex_jobs_1")(ugro.home / "state.db")
    first = ugro("run", "--no-sync", "--", "true")
    assert first.returncode == 1
    assert "state.db is damaged: " in first.stderr
    for words in (("status",), ("doctor",), ("agent", "status"), ("cancel", "1")):
        said = ugro(*words)
        text = said.stdout + said.stderr
        assert "state.db is damaged: " in text, words
        assert "ugro agent restore --latest" in text, words
    assert document(ugro, "agent", "status")["agent"]["state_error"]
    [rank] = [pid for pid in processes_with(b"987.5") if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    assert is_alive(rank)
    assert document(ugro, "agent", "restore", "--latest", "--yes")["restored"]["backup"]["jobs"] == 1
    wait_until(lambda: ugro("agent", "reconcile", "--adopt").returncode == 0, END_S, "the agent to leave safe mode")
    assert ugro("cancel", "1").returncode == 0
    wait_until(lambda: not is_alive(rank), END_S, "the job to end")


@pytest.mark.proof
def test_an_agent_whose_home_was_removed_ends_and_leaves_the_next_one_alone(ugro: Ugro, farm_of: Farms) -> None:
    ugro.cluster = farm_of(1).cluster_yaml()
    assert ugro("run", "--no-sync", "-d", "--", "sleep", "876.5").returncode == 0
    wait_until(lambda: processes_with(b"876.5"), END_S, "the job to run")
    [rank] = [pid for pid in processes_with(b"876.5") if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    old = holder(ugro.home)
    assert old is not None
    shutil.rmtree(ugro.home)
    for folder in ("cwd", "user"):
        (ugro.home / folder).mkdir(parents=True)
    assert ugro("agent", "start").returncode == 0
    new = holder(ugro.home)
    assert new not in (None, old)
    there = {path.name for path in ugro.home.iterdir()}
    wait_until(lambda: not is_alive(old), END_S, "the old agent to end")
    assert is_alive(rank)
    assert {"agent.sock", "state.db"} <= there <= {path.name for path in ugro.home.iterdir()}
    assert ugro("status").returncode == 0
    assert holder(ugro.home) == new
    os.kill(rank, signal.SIGKILL)


@pytest.mark.proof
def test_an_agent_whose_lock_was_removed_ends(ugro: Ugro) -> None:
    assert ugro("agent", "start").returncode == 0
    agent = holder(ugro.home)
    assert agent is not None
    (ugro.home / "agent.lock").unlink()
    wait_until(lambda: not is_alive(agent), END_S, "the agent to end")
    assert "was removed or replaced" in (ugro.home / "agent.log").read_text()
    assert ugro("agent", "start").returncode == 0


def test_a_restore_that_is_cut_short_leaves_no_state_without_its_key(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    clean_state(tmp_path)
    home.key.write_bytes(b"k" * 32)
    assert recovery(home, "backup", "copy.db")["backup"]
    home.key.unlink()
    blocked = tmp_path / "agent.key.part"
    blocked.mkdir()
    assert recovery(home, "restore", "copy.db")["error"]
    assert not home.database.exists()
    with pytest.raises(Damaged, match="1 earlier state"):
        refuse_if_missing(home)
    blocked.rmdir()
    assert recovery(home, "restore", "copy.db")["restored"]
    assert home.key.read_bytes() == b"k" * 32
    assert home.database.exists()


def recovery(home: StateDir, *words: str) -> Any:
    """As clients start it."""
    program = [sys.executable, "-m", "ugro.kernel.agent.backups", "--home", str(home.path), *words]
    return json.loads(subprocess.run(program, cwd=home.path, check=True, stdout=subprocess.PIPE, timeout=END_S).stdout)
