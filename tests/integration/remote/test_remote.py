"""A laptop that uses the agent of a master, over a real sshd: code goes there, results come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.rig.machines import DECOY, Machines

TRAIN = """
import os, pathlib
data = pathlib.Path(os.environ["UGRO_FOLDER_DATA"], "numbers.txt").read_text()
print("laptop", pathlib.Path("inner/words.txt").read_text(), data, flush=True)
pathlib.Path("made.bin").write_bytes(bytes(range(256)) * 1000)
"""


@pytest.fixture(autouse=True)
def project(pair: Machines) -> None:
    """The laptop's project; and on the master other files under the same names."""
    for folder, script, word in ((pair.files, TRAIN, "new"), (pair.project, DECOY, "MASTER")):
        if folder is pair.project and pair.project == pair.files:
            continue
        shutil.rmtree(folder / "inner", ignore_errors=True)
        (folder / "inner").mkdir(parents=True)
        (folder / "data").mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        (folder / "inner" / "words.txt").write_text(word)
        (folder / "data" / "numbers.txt").write_text(f"{word}-data")
        (folder / "job.yaml").write_text(f"script: train.py\nname: {word.lower()}\nfolders: {{data: data}}\n")


def test_a_job_file_its_code_and_its_folder_are_those_of_the_laptop(pair: Machines, tmp_path: Path) -> None:
    done = pair.ugro("--master", "n001", "launch", "-f", "job.yaml")
    assert (done.returncode, done.stdout) == (0, "laptop new new-data\n"), done.stderr
    pulled = pair.ugro("--master", "n001", "--json", "results", "last", "--pull", str(tmp_path))
    assert pulled.returncode == 0, pulled.stderr
    document = json.loads(pulled.stdout)["job"]
    assert document["name"] == "new"
    assert document["results"]["folder"].startswith("n001:")
    assert (tmp_path / "made.bin").read_bytes() == bytes(range(256)) * 1000
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "laptop new new-data\n"


@pytest.mark.proof
def test_a_script_elsewhere_on_the_laptop_is_sent_with_its_folder(pair: Machines) -> None:
    elsewhere = pair.laptop / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "words.txt").write_text("found")
    (elsewhere / "plain.py").write_text("print(open('words.txt').read())\n")
    (pair.files / "other.yaml").write_text(f"script: {elsewhere}/plain.py\n")
    named = str(elsewhere / "plain.py")
    for words in (["launch", named], ["run", "--", "python3", named], ["launch", "-f", "other.yaml"]):
        done = pair.ugro("--master", "n001", *words)
        assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


@pytest.mark.proof
def test_an_edit_is_sent_and_results_are_pulled_again_only_where_they_differ(pair: Machines, tmp_path: Path) -> None:
    first = pair.ugro("--master", "n001", "launch", "-f", "job.yaml")
    assert first.returncode == 0, first.stderr
    (pair.files / "inner" / "words.txt").write_text("edited")
    done = pair.ugro("--master", "n001", "launch", "-f", "job.yaml")
    assert (done.returncode, done.stdout) == (0, "laptop edited new-data\n"), done.stderr
    got = tmp_path / "got"
    pulled = pair.ugro("--master", "n001", "--json", "results", "last", "--pull", str(got))
    assert pulled.returncode == 0, pulled.stderr
    document = json.loads(pulled.stdout)["job"]
    assert (got / "logs" / "rank_0.log").read_text() == "laptop edited new-data\n"
    # What is complete is skipped; what differs is not overwritten.
    again = json.loads(pair.ugro("--master", "n001", "--json", "results", "last", "--pull", str(got)).stdout)
    assert (again["job"]["pulled"]["copied"], again["job"]["pulled"]["same"]) == (0, document["pulled"]["copied"])
    (got / "made.bin").write_text("mine")
    refused = pair.ugro("--master", "n001", "results", "last", "--pull", str(got))
    assert refused.returncode == 1
    assert "made.bin" in refused.stderr
    assert (got / "made.bin").read_text() == "mine"
    forced = pair.ugro("--master", "n001", "results", "last", "--pull", str(got), "--force")
    assert forced.returncode == 0, forced.stderr
    assert (got / "made.bin").stat().st_size == 256_000


def test_login_is_remembered_and_what_belongs_to_the_master_is_refused_by_name(pair: Machines) -> None:
    done = pair.ugro("login", "n001")
    assert done.returncode == 0, done.stderr
    assert "using n001 from now on" in done.stderr
    try:
        assert "on n001" in pair.ugro("status").stderr
        for words in (["agent", "stop"], ["lab", "up"]):
            refused = pair.ugro(*words)
            assert refused.returncode == 6, (words, refused.stderr)
            assert "--master local" in refused.stderr
    finally:
        assert "n001 is not used any more" in pair.ugro("logout").stderr
    assert not (pair.laptop / ".ugro" / "master.json").exists()


def test_a_login_that_fails_says_what_to_try_and_remembers_nothing(pair: Machines) -> None:
    pair.master.refuse_keys()
    try:
        refused = pair.ugro("login", "n001", env={"UGRO_HOME": str(pair.laptop / "other")})
    finally:
        pair.master.accept_keys()
    assert refused.returncode == 6
    assert "error: n001: login refused\nhint:  try: ssh n001" in refused.stderr
    lost = pair.ugro("login", "n001", "--master-ugro", "/nowhere/ugro")
    assert lost.returncode == 4
    assert "--master-ugro PATH" in lost.stderr
    assert not (pair.laptop / ".ugro" / "master.json").exists()


@pytest.mark.proof
@pytest.mark.parametrize("words", [["init"], ["allow"], ["agent", "logs"], ["--cluster", "x.yaml", "status"]])
def test_all_that_belongs_to_the_master_is_refused_by_name(pair: Machines, words: list[str]) -> None:
    refused = pair.ugro("--master", "n001", *words)
    assert refused.returncode == 6, refused.stderr
    assert "--master local" in refused.stderr


@pytest.mark.proof
@pytest.mark.parametrize(
    ("key", "error", "hint"),
    [
        ("unknown", "its host key is not known", "compare the fingerprint and accept it: ssh n001"),
        ("changed", "its host key has changed", "someone may be in between"),
    ],
)
def test_a_host_key_that_is_not_the_known_one_is_refused(pair: Machines, key: str, error: str, hint: str) -> None:
    known = pair.farm.known_hosts.read_text()
    others = known.replace(pair.master.public_key, pair.jump.public_key)  # another key for the same host
    assert others != known
    pair.farm.known_hosts.write_text("" if key == "unknown" else others)
    other = pair.laptop / "other"
    try:
        refused = pair.ugro("login", "n001", env={"UGRO_HOME": str(other)})
    finally:
        pair.farm.known_hosts.write_text(known)
    assert refused.returncode == 6
    assert f"error: n001: {error}\nhint:  {hint}" in refused.stderr
    assert not (other / "master.json").exists()


@pytest.mark.proof
def test_a_master_behind_a_jump_host_is_used_and_the_jump_is_named_when_it_fails(
    pair: Machines, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    own = pair.farm.ssh_config.read_text()
    inner = own[: own.index("Host n002")].replace("Host n001", "Host inner") + f"  ProxyJump {pair.jump.name}\n"
    config.write_text(inner + own)
    env = {"UGRO_MASTER_SSH_CONFIG": str(config)}
    done = pair.ugro("--master", "inner", "launch", "-f", "job.yaml", env=env)
    assert (done.returncode, done.stdout) == (0, "laptop new new-data\n"), done.stderr
    pair.jump.refuse_keys()
    try:
        # Without the connection that the last command left open.
        refused = pair.ugro("--master", "inner", "status", env={**env, "UGRO_HOME": str(pair.laptop / "another")})
    finally:
        pair.jump.accept_keys()
    assert refused.returncode == 6
    assert "error: inner: on the way to it (its jump host or proxy): login refused" in refused.stderr
    assert "hint:  try: ssh inner" in refused.stderr
