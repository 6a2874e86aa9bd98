"""What a new user types: words of other tools, misspelt options, and too few nodes. All of it is answered."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from ugro.kernel.config.load import parse_config


@pytest.fixture(scope="module")
def ugro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ugro]:
    """Three nodes of this machine."""
    folder = tmp_path_factory.mktemp("nodes")
    here = ["sh", "-c", 'exec "$@"', "sh"]
    entries = {name: {"transport": here, "remote_root": f"{folder}/{name}"} for name in ("n1", "n2", "n3")}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"nodes": entries}))
    with commands(file) as ugro:
        project = ugro.home / "cwd"
        (project / "bin.py").write_text("import sys\nprint('ran', len(sys.stdin.read()))\n")
        (project / "parses.py").write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--node')\n")
        (project / "any.py").write_text("import sys\nprint(sys.argv[1:])\n")
        yield ugro


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("help", "ugro --help"),
        ("ls", "ugro status (jobs), ugro node ls (nodes)"),
        ("ps", "ugro status"),
        ("jobs", "ugro status"),
        ("stop", "ugro cancel JOB"),
        ("kill", "ugro cancel JOB"),
        ("submit", "ugro launch train.py"),
        ("trust", "ugro node trust HOST"),
        ("drain", "ugro node drain NODE"),
        ("sbatch", "ugro launch train.py"),
        ("start", "ugro launch train.py"),
        ("squeue", "ugro status"),
        ("attach", "ugro logs JOB -f"),
        ("remove", "ugro cancel JOB (a job), ugro node rm NODE"),
        ("restart", "ugro retry JOB; the agent: ugro agent restart"),
        ("undrain", "ugro node resume NODE"),
        ("setup", "ugro init (your SSH hosts), ugro node setup"),
        ("statsu", "did you mean: ugro status?"),
    ],
)
def test_a_command_of_another_tool_leads_to_the_right_one(ugro: Ugro, word: str, hint: str) -> None:
    refused = ugro(word, "x")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: no such command: {word}\nhint:  {hint}")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("launch", "--gpus", "2", "bin.py"), "--gpus-per-node"),
        (("run", "--gpus", "2", "--", "true"), "--gpus-per-node"),
        (("run", "--node", "n1", "--", "true"), "--only"),
        (("run", "--memroy", "1GB", "--", "true"), "--memory"),
        (("launch", "-N", "2", "bin.py"), "--nodes"),
        (("run", "-c", "2", "--", "true"), "--cpus"),
    ],
)
def test_an_option_that_there_is_not_leads_to_the_one_that_is_meant(
    ugro: Ugro, words: tuple[str, ...], meant: str
) -> None:
    refused = ugro(*words)
    assert refused.returncode == 2
    assert f"hint:  did you mean {meant}?\n" in refused.stderr


def test_a_command_on_several_nodes_leads_to_launch_and_an_unlike_option_to_the_help(ugro: Ugro) -> None:
    for name in ("--nodes", "--nnodes", "-N"):
        refused = ugro("run", name, "2", "--", "true")
        assert (refused.returncode, f"error: {name}: a command runs on one node\n" in refused.stderr) == (2, True)
        assert "hint:  a script on several nodes: ugro launch train.py --nodes 3\n" in refused.stderr
    refused = ugro("launch", "--partition", "x", "bin.py")
    assert refused.stderr == "error: no such option: --partition\nhint:  see: ugro launch --help\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("launch", "bin.py", "--ndoes", "3"), "--nodes"),
        (("launch", "bin.py", "--node=2"), "--nodes"),
        (("launch", "bin.py", "--gpus", "2"), "--gpus-per-node"),
        (("launch", "bin.py", "--dryrun"), "--dry-run"),
        (("launch", "bin.py", "--NODES", "3"), "--nodes"),
        (("launch", "bin.py", "-nodes", "3"), "--nodes"),
        (("launch", "bin.py", "\u2014nodes=3"), "--nodes"),
        (("launch", "bin.py", "-N", "3"), "--nodes"),
        (("launch", "parses.py", "-n", "3"), "--nodes"),
        (("launch", "bin.py", "--ndoe", "3"), "--nodes"),
        (("launch", "bin.py", "--jsno"), "--json"),
        (("launch", "bin.py", "--retry", "3"), "--retries"),
        (("plan", "bin.py", "--ndoes", "3"), "--nodes"),
        (("sweep", "bin.py", "--lr", "1,2", "--trails", "3"), "--trials"),
    ],
)
def test_a_misspelt_option_behind_a_script_that_cannot_know_it_is_refused(
    ugro: Ugro, words: tuple[str, ...], meant: str
) -> None:
    refused = ugro(*words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"no option of {words[1]}, and none of ugro {words[0]}" in refused.stderr
    assert f"did you mean {meant}?" in refused.stderr
    assert "put it behind a --: ugro " in refused.stderr


def test_an_option_that_the_script_may_know_is_passed_to_it(ugro: Ugro) -> None:
    for words, said in {
        ("any.py", "--ndoes", "3"): "note: --ndoes is passed to any.py; if you meant ugro's own option: --nodes",
        ("none-here.py", "--node", "3", "--setup", "true"): "note: --node is passed to none-here.py",
    }.items():
        passed = ugro("launch", *words, "--dry-run")
        assert passed.returncode == 0, passed.stderr
        assert said in passed.stderr
        assert f"{words[0]} {words[1]} 3" in passed.stdout
    for quiet in (("parses.py", "--node", "3"), ("bin.py", "--", "--ndoes", "3"), ("bin.py", "--epochs", "3"),
                  ("bin.py", "-lr", "3"), ("bin.py", "-3"), ("bin.py", "-"), ("any.py", "-n", "3")):  # fmt: skip
        passed = ugro("launch", *quiet, "--dry-run")
        assert passed.returncode == 0, passed.stderr
        assert "is passed to" not in passed.stderr


def test_a_script_on_one_of_several_nodes_is_said_and_all_are_taken_if_asked(ugro: Ugro) -> None:
    alone = ugro("launch", "any.py", "--dry-run")
    assert "note: 1 of 3 nodes; all: --nodes all\n" in alone.stderr
    (ugro.home / "cwd" / "job.yaml").write_text("script: any.py\nresources: {nodes: all}\n")
    for words in (("any.py", "--nodes", "all"), ("any.py", "--nodes", "1"), ("any.py", "--only", "n2")):
        assert "1 of 3 nodes" not in ugro("launch", *words, "--dry-run").stderr, words
    for text, is_said in {"": True, "# nodes: 1": True, "resources: {nodes: 1}": False}.items():
        (ugro.home / "cwd" / "one.yaml").write_text(f"script: any.py\n{text}\n")
        assert ("1 of 3 nodes" in ugro("launch", "-f", "one.yaml", "--dry-run").stderr) == is_said, text
    for asked in ("any.py --nodes all", "-f job.yaml"):
        planned = json.loads(ugro("launch", *asked.split(), "--dry-run", "--json").stdout)
        assert [share["node"] for share in planned["placement"]["shares"]] == ["n1", "n2", "n3"]
    assert ugro("node", "drain", "n2").returncode == 0
    fewer = ugro("launch", "any.py", "--nodes", "all", "--dry-run")
    assert ugro("node", "resume", "n2").returncode == 0
    assert "nodes    n1, n3\n" in fewer.stdout
    assert "note: 2 of 3 nodes can take it; see: ugro health" in fewer.stderr
    labelled = ugro("launch", "any.py", "--nodes", "all", "--only", "n1", "--only", "n2", "--dry-run")
    assert "nodes    n1, n2\n" in labelled.stdout, labelled.stderr
    refused = ugro("launch", "any.py", "--nodes", "al")
    assert "a range such as 2..4, or all" in refused.stderr
    (ugro.home / "cwd" / "job.yaml").write_text("command: [ls]\nresources: {nodes: all}\n")
    assert "a command runs on one node, got all" in ugro("launch", "-f", "job.yaml").stderr


def test_an_experiment_and_a_sweep_take_all_nodes(ugro: Ugro) -> None:
    compared = ugro("experiment", "run", "balance", "--models", "gpt", "--seeds", "1", "--dry-run")
    lacking = "balance-1 would not start: n1, n2 and n3 lack torch" in compared.stderr
    assert lacking or "the first trial would start now on n1, n2, n3" in compared.stdout, compared.stderr
    searched = ugro("sweep", "any.py", "--lr", "1,2", "--nodes", "all", "--dry-run")
    assert "on n1, n2, n3" in searched.stdout, searched.stderr


def test_exec_all_leads_to_the_group(ugro: Ugro) -> None:
    refused = ugro("exec", "all", "--", "true")
    assert (refused.returncode, "hint:  did you mean @all?" in refused.stderr) == (4, True), refused.stderr


def test_mistakes_in_a_file_are_shown_all_at_once(ugro: Ugro, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n  gpu1: {prot: 3}\n  gpu2: {port: x}\nssh: {usr: 1}\n")
    with commands(file) as other:
        refused = other("health")
    assert refused.returncode == 2
    for line in (
        f"error: {file}:2: nodes.gpu1.prot: unknown key (and 2 more)\nhint:  did you mean port?\n",
        f"error: {file}:3: nodes.gpu2.port: expected a whole number from 1 to 65535, got \"x\"\nhint:  for example: ",
        f"error: {file}:4: ssh.usr: unknown key\nhint:  ",
    ):
        assert line in refused.stderr
    (ugro.home / "cwd" / "job.yaml").write_text("script: any.py\nnme: x\nresources: {nodes: 0}\n")
    refused = ugro("launch", "-f", "job.yaml", "--cpus", "x")
    assert [line.split(": ")[1].rpartition("/")[2] for line in refused.stderr.splitlines() if "error" in line] == [
        "--cpus"
    ]
    refused = ugro("--json", "launch", "-f", "job.yaml")
    [other] = json.loads(refused.stdout)["error"]["others"]
    assert other[0].endswith("job.yaml:3: resources.nodes: expected a number of nodes such as 3, a range such as 2..4, "
                             "or all, got 0")  # fmt: skip


@pytest.mark.parametrize("text", ["$(whoami)", "${USER}", "$USER", "`whoami`"])
def test_the_current_user_may_be_written_as_for_a_shell(text: str) -> None:
    config = parse_config(f'nodes:\n  gpu1: {{user: "{text}"}}\n', Path("cluster.yaml"), {"USER": "somebody"})
    assert config.nodes[0].user == pwd.getpwuid(os.geteuid()).pw_name
