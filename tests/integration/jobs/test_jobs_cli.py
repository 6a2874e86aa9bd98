"""The job commands as a user types them, on a real agent and nodes that are this machine; and once on a real sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ugro as package
from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.waiting import wait_until
from ugro.client.job_logs import LogChoice
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.errors import UgroError

CORES = os.cpu_count() or 1
SHOW = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:], flush=True)\n"


def cluster_file(folder: Path) -> Path:
    nodes = [f"  n{n}: {{transport: local, remote_root: {folder}/n{n}, labels: [l{n}]}}" for n in (1, 2, 3)]
    file = folder / "cluster.yaml"
    file.write_text("nodes:\n" + "\n".join(nodes) + "\n")
    return file


@pytest.fixture(scope="module")
def ugro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ugro]:
    with commands(cluster_file(tmp_path_factory.mktemp("nodes"))) as ugro:
        (ugro.home / "cwd" / "show.py").write_text(SHOW)
        yield ugro
        assert ugro("cancel", "--all").returncode == 0


@pytest.fixture(scope="module")
def gang(ugro: Ugro) -> str:
    """The name of a job that ran on all nodes."""
    assert ugro("launch", "show.py", "--nodes", "3", "--name", "gang").returncode == 0
    return "gang"


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def job_of(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    job: dict[str, Any] = json.loads(done.stdout)["job"]
    return job


def submitted(ugro: Ugro, *words: str) -> int:
    """The id of a job that was submitted detached."""
    done = ugro(words[0], "--json", *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    return int(json.loads(done.stdout)["job"]["id"])


def until_state(ugro: Ugro, job: int, state: str) -> None:
    wait_until(lambda: job_of(ugro, "status", str(job))["state"] == state, 20, f"job {job} to be {state}")


def test_run_shows_the_output_and_returns_the_exit_code(ugro: Ugro) -> None:
    done = ugro("run", "--", "sh", "-c", "echo out; pwd; exit 7")
    assert done.returncode == 7
    out, folder = done.stdout.splitlines()
    assert (out, Path(folder).name) == ("out", "work"), "it runs in a folder of its own"
    assert re.search(r"job \d+ echo failed: .*exit code 7", done.stderr)
    assert re.search(r"ugro logs \d+ · ugro events \d+ · ugro retry \d+", done.stderr)


def test_all_words_behind_the_command_are_its_own(ugro: Ugro) -> None:
    done = ugro("run", "echo", "--json", "-d", "--nodes", "x")
    assert (done.returncode, done.stdout) == (0, "--json -d --nodes x\n")
    wrong = ugro("run", "--nodez", "3", "--", "true")
    assert wrong.returncode == 2
    assert "--nodez" in wrong.stderr


def test_launch_divides_its_words_and_shows_rank_0(ugro: Ugro) -> None:
    done = ugro("launch", "show.py", "--epochs", "3", "--nodes", "3", "--name=three", "--", "--nodes", "9")
    assert (done.returncode, done.stdout) == (0, "rank 0 --epochs 3 --nodes 9\n"), done.stderr
    logs = ugro("logs", "three")
    nodes = [node["name"] for node in job_of(ugro, "status", "three")["nodes"]]
    lines = [f"rank {rank} {node} | rank {rank} --epochs 3 --nodes 9" for rank, node in enumerate(nodes)]
    assert sorted(logs.stdout.splitlines()) == lines
    assert ugro("logs", "three", "--rank", "1").stdout == "rank 1 --epochs 3 --nodes 9\n"
    assert ugro("logs", "three", "--node", nodes[2]).stdout == f"rank 2 {nodes[2]} | rank 2 --epochs 3 --nodes 9\n"
    found = documents(ugro("logs", "three", "-r", "0", "-r", "2", "--json").stdout)
    assert {(one["rank"], one["node"], one["attempt"]) for one in found} == {(0, nodes[0], 1), (2, nodes[2], 1)}


def test_a_script_that_is_made_by_its_set_up_need_not_be_there(ugro: Ugro) -> None:
    done = ugro("launch", "made.py", "--setup", "echo 'print(42)' >made.py", "--dry-run")
    assert done.returncode == 0, done.stderr


def test_a_node_that_has_done_its_part_of_a_job_lacks_nothing(ugro: Ugro, tmp_path: Path) -> None:
    go = tmp_path / "go"
    hold = f"while os.environ['RANK'] == '1' and not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
    (tmp_path / "uneven.py").write_text(f"import os, time\n{hold}")
    job = job_of(ugro, "launch", "uneven.py", "--workdir", str(tmp_path), "--nodes", "2", "--name", "uneven")

    reports: list[dict[str, Any]] = []

    def is_half_done() -> bool:
        nodes = job_of(ugro, "status", str(job["id"]))["nodes"] or []
        found = {one["name"]: one for one in json.loads(ugro("health", "--json").stdout)["nodes"]}
        reports[:] = [found[node["name"]] for node in nodes]
        return [one["facts"] and one["facts"]["rank_processes"] for one in reports] == [0, 1]

    wait_until(is_half_done, 30, "rank 0 to end, and rank 1 not to")
    go.touch()
    assert ugro("wait", "uneven").returncode == 0
    # A busy machine may be slow to answer; that is another matter.
    assert [reason for reason in reports[0]["reasons"] if reason["part"] != "network"] == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["logs", "gang", "--rank", "7"], 4, "its ranks are 0 to 2"),
        (["logs", "gang", "--node", "n9"], 4, "it ran on n1, n2, n3"),
        (["logs", "gang", "--attempt", "4"], 4, "has no attempt 4"),
        (["status", "gagn"], 4, "did you mean gang?"),
        (["why", "999"], 4, "there is no job 999"),
        (["launch"], 2, "a script or a job file is needed"),
        (["launch", "--epochs", "3", "show.py"], 2, "--epochs"),
        (["launch", "show.py", "--nodes", "9"], 3, "with --nodes 3 it would fit"),
        (["launch", "shwo.py"], 2, "did you mean show.py?"),
        (["run", "--time-limit", "soon", "true"], 2, "--time-limit: expected a duration"),
        (["run", "--after", "nobody", "true"], 2, "there is no job 'nobody'"),
        (["run", "--after", "999999", "true"], 2, "there is no job 999999"),
        (["cancel"], 2, "name the jobs"),
        (["events", "--since", "now-ish"], 2, "such as 10m"),
    ],
)
@pytest.mark.usefixtures("gang")
def test_what_cannot_be_is_said_in_one_line_with_a_hint(ugro: Ugro, words: list[str], code: int, text: str) -> None:
    done = ugro(*words)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_clone_is_a_job_file_that_gives_the_same_job(ugro: Ugro) -> None:
    """And what is secret is not in it."""
    words = ("--name", "first", "-e", "A=b", "-e", "HF_TOKEN=hush", "--retries", "2", "--time-limit", "1h")
    assert ugro("run", "-d", *words, "--", "sh", "-c", "echo $A").returncode == 0
    assert ugro("wait", "first").returncode == 0
    text = ugro("clone", "first").stdout
    assert "hush" not in text
    (ugro.home / "cwd" / "again.yaml").write_text(text)
    refused = ugro("launch", "-f", "again.yaml", "--dry-run")
    assert refused.returncode == 2
    assert "HF_TOKEN" in refused.stderr
    dry = ugro("launch", "-f", "again.yaml", "-e", "HF_TOKEN=hush", "--dry-run", "--json")
    first = json.loads(ugro("status", "first", "--json").stdout)["job"]["spec"]
    assert json.loads(dry.stdout)["spec"] | {"snapshot": None} == first | {"snapshot": None}
    (ugro.home / "cwd" / "again.yaml").unlink()


def test_a_dry_run_shows_the_plan_and_submits_nothing(ugro: Ugro) -> None:
    newest = ugro("status", "--json", "-n", "1").stdout
    (ugro.home / "cwd" / "job.yaml").write_text("script: show.py\nargs: --lr 'a b'\nresources: {nodes: 2}\n")
    words = ["launch", "-f", "job.yaml", "-e", "HF_TOKEN=abc", "-e", "A=b", "--dry-run"]
    shown = ugro(*words)
    assert shown.returncode == 0, shown.stderr
    assert "would start now" in shown.stdout
    for text in ("HF_TOKEN=***", "A=b", "WORLD_SIZE=2", "RANK=1", "show.py --lr 'a b'", f"{ugro.home}/cwd: 2 files"):
        assert text in shown.stdout
    assert "abc" not in shown.stdout
    document = json.loads(ugro(*words, "--json").stdout)
    assert document["starts_now"] is True
    [first, second] = document["plan"]["nodes"]
    assert (first["ranks"][0]["rank"], second["ranks"][0]["rank"]) == (0, 1)
    assert ["HF_TOKEN", "***"] in first["ranks"][0]["env"], "programs write what they read into logs"
    assert ugro("status", "--json", "-n", "1").stdout == newest


def test_a_job_that_waits_says_for_what(ugro: Ugro) -> None:
    whole = ["--label", "l1", "--cpus", str(CORES)]
    holder = submitted(ugro, "run", *whole, "sleep", "1000")
    until_state(ugro, holder, "running")
    waiting = submitted(ugro, "run", *whole, "--name", "later", "true")
    wait_until(lambda: f"job {holder}" in job_of(ugro, "status", "later")["reason"], 10, "the reason to be known")
    why = ugro("why", "later")
    assert (why.returncode, f"job {holder}" in why.stdout) == (0, True), why.stdout
    assert json.loads(ugro("why", "later", "--json").stdout)["why"]["blocked_by"] == [holder]
    assert f"job {holder}" in ugro("status", "--state", "queued").stdout
    assert re.search(r"is running: .*\n  on n1, for ", ugro("why", str(holder)).stdout)
    dry = ugro("run", *whole, "--dry-run", "true")
    assert "would wait: " in dry.stdout
    assert "if the cluster were idle" in dry.stdout
    assert "    true\n" in dry.stdout
    refused = ugro("retry", str(holder))
    assert (refused.returncode, f"ugro cancel {holder}" in refused.stderr) == (6, True)
    assert ugro("wait", "--timeout", "0.3", str(waiting)).returncode == 124
    assert ugro("cancel", str(holder)).returncode == 0
    ended = ugro("wait", str(holder), str(waiting))
    assert ended.returncode == 130, "of the first that did not succeed"
    assert f"job {waiting} later succeeded" in ended.stderr


def test_only_variables_that_a_job_asks_for_leave_the_callers_environment(ugro: Ugro) -> None:
    file = ugro.home / "cwd" / "env.yaml"
    file.write_text("command: [sh, -c, 'echo $ASKED $FLAG $OTHER.']\nenv:\n  ASKED:\n")
    words = ["launch", "-f", str(file), "-e", "FLAG"]
    missing = ugro(*words, env={"FLAG": "two"})
    assert missing.returncode == 2
    assert "env.yaml:3: env.ASKED: it has no value" in missing.stderr
    given = {"ASKED": "one", "FLAG": "two", "OTHER": "xyzzy-none-of-yours"}
    done = ugro(*words, env=given)
    assert (done.returncode, done.stdout) == (0, "one two .\n"), done.stderr
    for kept in ugro.home.glob("state.db*"):
        assert b"xyzzy" not in kept.read_bytes()


def test_the_one_who_failed_is_named_with_his_last_lines(ugro: Ugro) -> None:
    script = ugro.home / "cwd" / "break.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the disk is made of cheese')\n"
                      "time.sleep(1000)\n")
    done = ugro("launch", "break.py", "--nodes", "2", "--stop-grace", "1s")
    assert done.returncode == 1
    assert "rank 1 on n" in done.stderr
    assert "  | the disk is made of cheese" in done.stderr
    shown = ugro("status", "last").stdout
    assert "the disk is made of cheese" in shown
    assert re.search(r"next +ugro logs \d+ --rank 1", shown)
    assert "the disk is made of cheese" in ugro("why").stdout
    [attempt] = job_of(ugro, "status", "last")["attempts"]
    assert attempt["failure"]["rank"] == 1


def test_attempts_have_logs_of_their_own(ugro: Ugro) -> None:
    words = ["--retries", "1", "--retry-on", "rank_failed", "sh", "-c", "echo try $UGRO_ATTEMPT; [ $UGRO_ATTEMPT = 2 ]"]
    done = ugro("run", "--name", "twice", *words)
    assert (done.returncode, done.stdout) == (0, "try 1\ntry 2\n"), done.stderr
    assert "is in attempt 2: rank 0 on n" in done.stderr
    assert ugro("logs", "twice").stdout == "try 2\n"
    assert ugro("logs", "twice", "--attempt", "1").stdout == "try 1\n"
    assert ugro("logs", "twice", "--attempt", "all").stdout == "try 1\ntry 2\n"
    assert [attempt["number"] for attempt in job_of(ugro, "status", "twice")["attempts"]] == [1, 2]


def test_a_log_that_cannot_become_a_file_is_not_lost_and_says_why(ugro: Ugro) -> None:
    job = submitted(ugro, "run", "-d", "--", "echo", "kept")
    assert ugro("wait", str(job)).returncode == 0
    folder = ugro.home / "jobs" / str(job)
    assert not folder.exists(), "nobody has read it yet"
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("in the way")
    refused = ugro("logs", str(job))
    assert refused.returncode != 0
    assert f"the log of job {job} cannot be written" in refused.stderr
    assert "nothing is lost" in refused.stderr
    folder.unlink()
    assert ugro("logs", str(job)).stdout == "kept\n"


def test_the_tail_of_a_log_and_what_came_lately(ugro: Ugro) -> None:
    ugro("run", "--name", "lines", "seq", "1", "100")
    assert ugro("logs", "lines", "--tail", "2").stdout == "99\n100\n"
    assert ugro("logs", "lines", "--since", "1h").stdout.count("\n") == 100
    future = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    assert ugro("logs", "lines", "--since", future).stdout == ""


def test_a_job_is_run_again_with_the_same_settings(ugro: Ugro) -> None:
    ugro("run", "--name", "again", "-e", "A=7", "sh", "-c", "echo $A")
    first = job_of(ugro, "status", "again")
    done = ugro("retry", "again")
    assert (done.returncode, done.stdout) == (0, "7\n")
    second = job_of(ugro, "status", "again")
    assert second["id"] > first["id"]
    assert second["spec"] == first["spec"]
    events = documents(ugro("events", str(second["id"]), "--json").stdout)
    assert any(f"job {first['id']}" in one["event"]["text"] for one in events)


def test_a_note_and_tags_are_written_and_shown(ugro: Ugro) -> None:
    job = str(submitted(ugro, "run", "-d", "--", "true"))
    assert ugro("note", job, "larger batch", "--tag", "baseline").returncode == 0
    shown = ugro("note", job).stdout
    assert "larger batch" in shown
    assert "baseline" in shown
    assert ugro("wait", job).returncode == 0


def test_events_tell_all_of_a_job_in_order(ugro: Ugro) -> None:
    before = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    ugro("run", "true")
    kinds = [line.split("\t")[2] for line in ugro("events", "last").stdout.splitlines()]
    assert [kind for kind in kinds if kind != "running"] == ["queued", "starting", "stopping", "succeeded"]
    since = ugro("events", "--since", before, "--json")
    job = documents(ugro("events", "last", "--json").stdout)[0]["event"]["job"]
    since_then = [one["event"] for one in documents(since.stdout)]
    assert [event["kind"] for event in since_then if event["job"] == job] == kinds
    future = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    assert ugro("events", "--since", future).stdout == ""


def test_ctrl_c_detaches_and_the_job_goes_on(ugro: Ugro) -> None:
    attached = ugro.start("run", "--name", "on", "sh", "-c", "echo begun; exec sleep 1000")
    assert attached.stdout is not None
    assert attached.stdout.readline() == b"begun\n"
    attached.send_signal(signal.SIGINT)
    _, errors = attached.communicate(timeout=10)
    assert attached.returncode == 130
    assert re.search(rb"detached: job (\d+) keeps running; see: ugro logs \1 -f", errors)
    assert job_of(ugro, "status", "on")["state"] == "running"
    assert ugro("cancel", "--all").returncode == 0
    assert ugro("wait", "on").returncode == 130


def test_many_jobs_are_submitted_in_one_request(ugro: Ugro) -> None:
    with package.Client(home=ugro.home, cluster=ugro.cluster) as client:
        keys = [f"many {number}" for number in range(30)]
        fields = [{"command": ["echo", str(number)], "sync": False} for number in range(30)]
        jobs = client.jobs.submit_many(fields, keys=keys)
        again = client.jobs.submit_many(fields, keys=keys)
        assert [job.id for job in again] == [job.id for job in jobs]
        assert len({job.id for job in jobs}) == 30
        assert {client.jobs.wait(job.id).state for job in jobs} == {JobState.SUCCEEDED}
        assert [piece.content for piece in client.jobs.logs(jobs[29].id, LogChoice())] == [b"29\n"]
        with pytest.raises(UgroError, match="comand"):
            client.jobs.submit_many([*fields, {"comand": ["true"]}])
        assert len(client.jobs.newest(None)) == client.jobs.newest(1)[0].id


@pytest.mark.proof
def test_following_goes_on_when_the_agent_is_killed(tmp_path: Path) -> None:
    """Judged by the lines alone: each of them once, whoever was killed meanwhile."""
    wanted = [f"line {n} {'x' * (n % 50)}\n".encode() for n in range(300)]
    with commands(cluster_file(tmp_path)) as ugro:
        (ugro.home / "cwd" / "count.py").write_text(
            "import sys, time\nfor n in range(300):\n    print('line', n, 'x' * (n % 50), flush=True)\n"
            "    time.sleep(0.01)\nsys.exit(5)\n"
        )
        attached = ugro.start("launch", "count.py")
        assert attached.stdout is not None
        lines = [attached.stdout.readline() for _ in range(20)]
        for _ in range(2):
            # Lines that came before the agent was killed may be read while no other has been started yet.
            found = wait_until(lambda: json.loads(ugro("agent", "status", "--json").stdout)["agent"], 20, "an agent")
            os.kill(found["pid"], signal.SIGKILL)
            lines += [attached.stdout.readline() for _ in range(60)]
        lines += attached.stdout.readlines()
        _, errors = attached.communicate(timeout=20)
        assert lines == wanted, errors
        assert attached.returncode == 5, errors
        assert ugro("logs").stdout.encode() == b"".join(wanted)


@pytest.mark.proof
def test_a_script_goes_to_other_machines_or_has_a_place_there(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(2)
    with commands(farm.cluster_yaml()) as ugro:
        (ugro.home / "cwd" / "show.py").write_text(SHOW)
        sent = ugro("launch", "show.py", "--nodes", "2")
        assert (sent.returncode, sent.stdout) == (0, "rank 0\n"), sent.stderr
        refused = ugro("launch", "--no-sync", "show.py", "--nodes", "2")
        assert refused.returncode == 2
        assert "show.py: where is it on the nodes?" in refused.stderr
        assert "--cwd" in refused.stderr
        done = ugro("launch", "show.py", "--nodes", "2", "--cwd", str(ugro.home / "cwd"))
        assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr
        assert sorted(ugro("logs").stdout.split("\n")) == ["", "rank 0 n001 | rank 0", "rank 1 n002 | rank 1"]


def test_a_table_of_jobs_fits_a_narrow_terminal(ugro: Ugro) -> None:
    ugro("run", "--name", "a-job-with-quite-a-long-name-that-nobody-would-type", "sh", "-c", "exit 3")
    words = " ".join(ugro.argv("status", "-n", "3"))
    shell = ["script", "-qec", f"stty cols 80 rows 24 && exec {words}", "/dev/null"]
    done = subprocess.run(shell, env=ugro.environment(), capture_output=True, timeout=20, check=False)
    rows = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line).rstrip() for line in done.stdout.decode().splitlines()]
    assert "JOB" in rows[0]
    assert any("✗" in row for row in rows)
    assert max(map(len, rows)) <= 80


@pytest.mark.proof
def test_who_follows_is_told_that_the_agent_was_stopped_and_starts_no_other(tmp_path: Path) -> None:
    with commands(cluster_file(tmp_path)) as ugro:
        attached = ugro.start("run", "sh", "-c", "echo begun; exec sleep 1000")
        assert attached.stdout is not None
        assert attached.stdout.readline() == b"begun\n"
        following = ugro.start("logs", "-f")
        assert following.stdout is not None
        assert following.stdout.readline() == b"begun\n"
        assert ugro("agent", "stop").returncode == 0
        for process in (attached, following):
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 5
            assert b"the agent was stopped" in errors
        assert ugro("agent", "status").returncode != 0
        assert ugro("cancel", "last").returncode == 0
        assert ugro("wait").returncode == 130
