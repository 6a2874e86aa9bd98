"""Code as a user sends it: jobs run what was submitted, and are told what goes along, what does not, and why."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.rig.agent import holder
from tests.rig.permissions import WITHOUT
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until, wait_until_dead
from ugro.client.client import Client
from ugro.kernel.files.operations import GetSyncTotals

HELD = "import os, time\nwhile not os.path.exists({go!r}):\n    time.sleep(0.02)\nprint(open('version').read())\n"


@pytest.fixture
def here(ugro: Ugro, tmp_path: Path) -> Path:
    """The folder that is sent; two nodes of this machine are the cluster."""
    ugro.cluster = tmp_path / "cluster.yaml"
    labels = {1: "[only]", 2: "[]"}
    entry = "  n{n}: {{transport: local, remote_root: {folder}/n{n}, labels: {labels}}}\n"
    nodes = "".join(entry.format(n=n, folder=tmp_path, labels=labels[n]) for n in (1, 2))
    ugro.cluster.write_text(f"sync: {{max_size: 1MB}}\nnodes:\n{nodes}")
    return ugro.home / "cwd"


def sync(ugro: Ugro, *words: str) -> dict[str, dict[str, object]]:
    done = ugro("sync", "--json", *words)
    return {str(one["node"]): one for one in json.loads(done.stdout)["nodes"]}


@pytest.mark.proof
def test_jobs_run_the_code_they_were_submitted_with_whatever_is_edited_later(ugro: Ugro, here: Path) -> None:
    go = ugro.home / "user" / "go"
    (here / "train.py").write_text(HELD.format(go=str(go)))
    (here / "sub").mkdir()
    for version in ("one", "two"):
        (here / "version").write_text(version)
        done = ugro("run", "-d", "--cpus", "0", "--name", version, "--", "python3", "train.py")
        assert done.returncode == 0, done.stderr
    (here / "version").write_text("three")
    (here / "train.py").unlink()
    go.touch()
    assert ugro("wait", "one", "two").returncode == 0
    assert [ugro("logs", name).stdout.strip() for name in ("one", "two")] == ["one", "two"]
    again = ugro("retry", "one")
    assert again.stdout.strip() == "one", again.stderr


@pytest.mark.proof
def test_a_script_that_stays_at_home_is_said_before_it_waits(ugro: Ugro, here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "train.py").write_text("print('trained')\n")
    (here / ".ugroignore").write_text("/sub/train.py\n")
    refused = ugro("launch", "sub/train.py")
    assert (refused.returncode, "sub/train.py is not sent" in refused.stderr) == (2, True), refused.stderr
    (here / ".ugroignore").unlink()
    done = ugro("launch", "sub/train.py", "--nodes", "1")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_script_outside_of_the_current_folder_is_sent_with_its_own(ugro: Ugro, here: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "words.py").write_text("SAID = open('words.txt').read()\n")
    (project / "words.txt").write_text("mine")
    (project / "bin.py").write_text("from words import SAID\nimport sys\nprint(SAID, *sys.argv[1:])\n")
    (project / "job.yaml").write_text("script: bin.py\n")
    (here / "job.yaml").write_text(f"script: {project}/bin.py\n")
    (here / "large").write_bytes(bytes(2_000_000))  # more than may be sent
    named = os.path.relpath(project / "bin.py", here)
    (here / "link.py").symlink_to(named)
    for words in (("launch", named), ("launch", "link.py"), ("run", "--", "python3", str(project / "bin.py"))):
        done = ugro(*words, "7")
        assert (done.returncode, done.stdout) == (0, "mine 7\n"), done.stderr
    assert f"the code is {project}, the folder of {project}/bin.py" in done.stderr
    for line in (f"sweep {named} --lr 1,2 --dry-run", f"plan {named}"):
        assert f"note: the code is {project}, the folder of {named}; not this one" in ugro(*line.split()).stderr, line
    by_file = ugro("launch", "-f", "job.yaml", "--nodes", "2", "--dry-run")
    assert f"code     {project}: 4 files" in by_file.stdout, by_file.stderr
    refused = ugro("launch", named, "--workdir", ".")
    assert (refused.returncode, "is not in " in refused.stderr) == (2, True), refused.stderr
    for text in (f"A=1 python3 {named} 8", f"python3 {named} 8 | cat"):
        (here / "text.yaml").write_text(f"command: {text}\n")
        done = ugro("launch", "-f", "text.yaml")
        expected = (2, "", True) if "|" in text else (0, "mine 8\n", False)
        assert (done.returncode, done.stdout, f"{named} is not in {here}" in done.stderr) == expected, done.stderr
    (here / "large").unlink()
    refused = ugro("launch", "--dry-run", "../none.py")
    assert (refused.returncode, "no such file" in refused.stderr) == (2, True), refused.stderr
    on_nodes = ugro("launch", "--dry-run", "--workdir", str(project), "/data/only/there.py")
    assert on_nodes.returncode == 0, on_nodes.stderr


@pytest.mark.proof
def test_every_attempt_has_a_folder_of_its_own_and_harms_no_other(ugro: Ugro, here: Path) -> None:
    (here / "data").write_text("as submitted\n")
    (here / "data").chmod(0o644)
    (here / "big").write_bytes(b"b" * 600_000)
    spoil = "cat data; head -c 3 big; echo; echo spoilt >data; echo xxx | dd of=big conv=notrunc 2>/dev/null; mkdir out"
    for _ in range(2):
        done = ugro("run", "--", "sh", "-c", spoil)
        assert (done.returncode, done.stdout) == (0, "as submitted\nbbb\n"), done.stderr
    failing = ugro("run", "--retries", "2", "--", "sh", "-c", f"{spoil} && exit 3")
    assert failing.returncode == 3
    logs = ugro("logs", "last", "--attempt", "3")
    assert logs.stdout == "as submitted\nbbb\n", "also what is tried again begins anew"
    assert (here / "data").read_text() == "as submitted\n"


def test_code_goes_over_ssh_to_every_node_of_a_launch(ugro: Ugro, cluster: SshdFarm) -> None:
    here = ugro.home / "cwd"
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text("NAME = 'mine'\n")
    (here / "train.py").write_text("import os, pkg\nprint(os.environ['RANK'], pkg.NAME, os.listdir('.'))\n")
    (here / "secret.env").write_text("x")
    (here / ".ugroignore").write_text("*.env\n")
    done = ugro("launch", "train.py", "--nodes", "3")
    assert done.returncode == 0, done.stderr
    lines = sorted(ugro("logs", "last").stdout.splitlines())
    assert len(lines) == 3
    assert all("mine" in line and "secret" not in line for line in lines), lines
    by_path = ugro("launch", str(here / "train.py"), "--nodes", "1")
    assert by_path.returncode == 0, by_path.stderr


def test_sync_says_what_travels_and_why(ugro: Ugro, here: Path) -> None:
    (here / "a.py").write_text("a" * 100)
    (here / "b.py").write_text("b" * 50)
    would = sync(ugro, "--dry-run")
    assert [(one["state"], one["files"]) for one in would.values()] == [("would", 2), ("would", 2)]
    assert {(one["state"], one["files"]) for one in sync(ugro, "n1").values()} == {("done", 2)}
    (here / "a.py").write_text("A" * 100)
    (here / "c.py").write_text("c")
    told = sync(ugro, "--dry-run", "n1")["n1"]["travels"]
    assert told == [{"path": "a.py", "bytes": 100, "why": "changed"}, {"path": "c.py", "bytes": 1, "why": "new"}]
    shown = ugro("sync")
    assert shown.returncode == 0
    rows = [line.split("\t")[:3] for line in shown.stdout.splitlines()[1:]]
    assert rows == [["n1", "done", "2"], ["n2", "done", "3"]]
    assert [one["files"] for one in sync(ugro).values()] == [0, 0]
    missing = ugro("sync", "nobody")
    assert missing.returncode == 4


@pytest.mark.proof
def test_too_much_code_is_not_sent_unless_it_is_forced(ugro: Ugro, here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "train.bin").write_bytes(bytes(2_000_000))
    for words in (["run", "--", "true"], ["sync"]):
        refused = ugro(*words)
        assert refused.returncode == 2
        assert "more than sync.max_size" in refused.stderr
        assert "1.9 MiB  data/train.bin" in refused.stderr
        assert "--force" in refused.stderr
    assert ugro("run", "--force", "--", "test", "-s", "data/train.bin").returncode == 0
    (here / ".ugroignore").write_text("/data/\n")
    assert ugro("run", "--", "sh", "-c", "! test -e data").returncode == 0
    assert ugro("run", "--no-sync", "--", "test", "-e", str(here / "data")).returncode == 0


@pytest.mark.proof
def test_nothing_goes_along_from_a_home_and_no_folder_is_made_up(ugro: Ugro, here: Path) -> None:
    home = ugro.home / "user"
    (home / "letter").write_text("private")
    done = ugro("run", "--", "pwd", cwd=home)
    assert done.stdout.strip() == str(home), "on nodes that are this machine it runs where it was typed"
    plan = json.loads(ugro("run", "--dry-run", "--json", "--", "true", cwd=home).stdout)
    assert plan["snapshot"] is None
    wrong = ugro("run", "--workdir", "nowhere", "--", "true")
    assert wrong.returncode == 2
    assert "nowhere: no such directory" in wrong.stderr


@pytest.mark.proof
def test_an_agent_that_is_stopped_while_it_takes_a_folder_ends_and_says_so(ugro: Ugro, here: Path) -> None:
    assert ugro("agent", "start").returncode == 0
    agent = holder(ugro.home)
    assert agent is not None
    for number in range(10_000):
        (here / "many" / str(number)).mkdir(parents=True)
    with ugro.start("run", "--", "true") as command:
        wait_until(lambda: _reads(agent, here), 60, "the agent to look at the folder")
        os.kill(agent, signal.SIGTERM)
        said = command.communicate(timeout=60)[1].decode()
    wait_until_dead([agent])
    assert "the agent is stopping" in said
    assert ugro("status", "--json").stdout.count('"id"') == 0


def _reads(process: int, folder: Path) -> bool:
    links = Path(f"/proc/{process}/fd").iterdir()
    with contextlib.suppress(FileNotFoundError):
        return any(os.readlink(link).startswith(str(folder)) for link in links)
    return False


@pytest.mark.proof
def test_tidying_up_takes_nothing_from_a_job_that_runs_or_waits(ugro: Ugro, here: Path, tmp_path: Path) -> None:
    go = ugro.home / "user" / "go"
    (here / "train.py").write_text(HELD.format(go=str(go)))
    (here / "version").write_text("mine")
    assert ugro("run", "-d", "--name", "runs", "--", "python3", "train.py").returncode == 0
    assert ugro("run", "-d", "--name", "waits", "--after", "runs", "--", "cat", "version").returncode == 0
    wait_until(lambda: "running" in ugro("status", "runs").stdout, 20, "the job to run")
    (here / "version").write_text("another")
    assert ugro("sync").returncode == 0
    for node in ("n1", "n2"):  # as if all of it had been used long ago
        for root in Path(tmp_path, node, ".ugro", "contents", "roots").iterdir():
            os.utime(root, (0, 0))
    for root in (ugro.home / "contents" / "roots").iterdir():
        os.utime(root, (0, 0))
    tidied = json.loads(ugro("node", "gc", "--all", "--json").stdout)["tidied"]
    assert {one["node"]: one["trees"] for one in tidied} == {"n1": 0, "n2": 0, None: 1}
    go.touch()
    assert ugro("wait", "runs", "waits").returncode == 0
    assert [ugro("logs", name).stdout.strip() for name in ("runs", "waits")] == ["mine", "mine"]


@pytest.mark.proof
def test_code_that_a_node_lost_is_sent_again_before_a_job_starts(ugro: Ugro, here: Path, tmp_path: Path) -> None:
    (here / "version").write_text("mine")
    assert ugro("run", "--", "cat", "version").stdout == "mine"
    for node in ("n1", "n2"):
        shutil.rmtree(tmp_path / node / ".ugro" / "contents", ignore_errors=True)
    assert ugro("run", "--", "cat", "version").stdout == "mine"


@pytest.mark.proof
def test_many_commands_of_one_folder_take_one_snapshot(ugro: Ugro, here: Path) -> None:
    (here / "word").write_text("hello")
    assert ugro("agent", "start").returncode == 0
    with Client(home=ugro.home, cluster=ugro.cluster) as client:
        fields = {"command": ["cat", "word"], "workdir": str(here), "cpus": "0"}
        jobs = client.jobs.submit_many([fields] * 200)
        assert len({job.spec.snapshot for job in jobs}) == 1
        for job in jobs:
            client.jobs.wait(job.id, timeout_s=60)
        assert {b"".join(piece.content for piece in client.jobs.logs(job.id)) for job in jobs[::20]} == {b"hello"}
        totals = client.ask(GetSyncTotals())
        assert totals.snapshots == 1
        assert totals.syncs <= 2, "once for each node"


@pytest.mark.proof
def test_a_setup_finds_the_code_and_runs_again_when_that_has_changed(ugro: Ugro, here: Path) -> None:
    seen_by_setup = ugro.home / "user" / "seen"
    setup = f"cat requirements.txt >> {seen_by_setup}; touch made-by-setup"
    for text in ("one\n", "one\n", "two\n"):
        (here / "requirements.txt").write_text(text)
        done = ugro("run", "--setup", setup, "--label", "only", "--", "sh", "-c", "cat requirements.txt; ls")
        assert (done.returncode, done.stdout) == (0, f"{text}requirements.txt\n"), done.stderr
    assert seen_by_setup.read_text() == "one\ntwo\n"


@pytest.mark.proof
def test_odd_things_in_the_folder_are_named_or_skipped_and_no_bare_failure(ugro: Ugro, here: Path) -> None:
    starter = Ugro(ugro.home)
    prefix = WITHOUT if os.geteuid() == 0 else ()
    subprocess.run([*prefix, *starter.argv("agent", "start")], env=starter.environment(), check=True)
    (here / "train.py").write_text("print('trained')\n")
    os.mkfifo(here / "pipe")
    os.mkdir(os.fsencode(here) + b"/\xff\n\x1b[2J")
    (here / "models").mkdir(0)
    for words in ("launch train.py", "run -- true", "run --dry-run -- true", "sync"):
        done = ugro(*words.split())
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "error: models/ cannot be read: permission denied\n"
            f"hint:  leave it out: echo '/models/' >> {here}/.ugroignore\n"
        )
    (here / ".ugroignore").write_text("/models/\n")
    done = ugro("launch", "train.py", "--nodes", "1")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "not sent: pipe is neither a file nor a folder" in ugro("sync").stderr
    refused = ugro("launch", "pipe")
    assert (refused.returncode, "pipe is neither a file nor a folder" in refused.stderr) == (2, True)
    odd = os.fsdecode(os.fsencode(here) + b"/\xff\n\x1b[2J")
    assert ugro("sync", "--workdir", odd).returncode == 0
    for workdir in ("x" * 300, "~no-such-user/x", "pipe"):
        refused = ugro("run", "--workdir", workdir, "--", "true")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 2), refused.stderr


def test_a_current_directory_that_is_gone_is_said(ugro: Ugro, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    argv = shlex.join(Ugro(ugro.home).argv("status"))
    words = ["sh", "-c", f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {argv}"]
    done = subprocess.run(words, env=ugro.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: the current directory no longer exists\nhint:  cd to another one\n"
