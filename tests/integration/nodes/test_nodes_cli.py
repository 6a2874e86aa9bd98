"""``ugro node`` on real nodes: what it shows, what it writes into the cluster file, and whose host keys it accepts."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import wait_until
from ugro.kernel.links.operations import GetHostKey, TrustHostKey


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(3)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    """Serves n001 and n002; n003 is there to be added."""
    with commands(farm.cluster_yaml()) as ugro:
        assert ugro.cluster is not None
        tree = yaml.safe_load(ugro.cluster.read_text())
        root = tree["nodes"].pop("n003")["remote_root"]
        ugro.cluster.write_text(yaml.safe_dump({**tree, "remote_root": root}, sort_keys=False))
        yield ugro


def document(ugro: Ugro, *words: str) -> Any:
    return json.loads(ugro(*words, "--json").stdout)


# --- ls and show ---------------------------------------------------------------------------------------------------


def test_ls_shows_how_each_node_is_reached_and_what_it_is(ugro: Ugro, farm: SshdFarm) -> None:
    answer = ugro("node", "ls")
    assert answer.returncode == 0
    header, *rows = [line.split("\t") for line in answer.stdout.splitlines()]
    assert header == ["node", "status", "role", "target", "cores", "memory", "gpus", "labels", "note"]
    assert [row[:4] for row in rows] == [[name, "healthy", "worker", name] for name in ("n001", "n002")]
    assert all(int(row[4]) == os.cpu_count() for row in rows)
    assert [node["name"] for node in document(ugro, "node", "ls")["nodes"]] == ["n001", "n002"]


def test_show_tells_all_of_one_node(ugro: Ugro, farm: SshdFarm) -> None:
    answer = ugro("node", "show", "n002")
    assert answer.returncode == 0
    # Not the score itself: on a busy machine the link's latency costs some of it.
    for text in ("n002  healthy, score ", "target     n002", f"root       {farm['n002'].home}", "load ", "link "):
        assert text in answer.stdout
    shown = document(ugro, "node", "show", "n002")["node"]
    assert shown["machine"]["root"] == str(farm["n002"].home / "grid_workspace")


def test_show_takes_one_name(ugro: Ugro) -> None:
    unknown = ugro("node", "show", "n02")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    assert "hint:  did you mean n002?" in unknown.stderr
    group = ugro("node", "show", "@all")
    assert group.returncode == 2
    assert "ugro health @all" in group.stderr


@pytest.mark.parametrize("name", ["", "a/b", "..", "?x=1", "a b", "ü"])
def test_odd_names_are_unknown_names(ugro: Ugro, name: str) -> None:
    for words in (("show", name), ("drain", name), ("resume", name), ("rm", name), ("trust", name)):
        answer = ugro("node", *words)
        assert answer.returncode == 4, answer.stderr
        assert answer.stderr.startswith("error: no node ")


# --- add and rm ----------------------------------------------------------------------------------------------------


def test_a_node_is_added_and_removed_in_the_file_with_its_comments_and_no_other_link_is_touched(
    ugro: Ugro, farm: SshdFarm
) -> None:
    assert ugro.cluster is not None
    text = "# ours\n" + ugro.cluster.read_text().replace("  n002:\n", "  n002: # the loud one\n")
    ugro.cluster.write_text(text)
    assert ugro("health").returncode == 0
    before = {node.name: node.sessions() for node in farm.nodes}
    added = ugro("node", "add", "n003", "--user", farm.user, "--label", "new", "--label", "slow")
    assert added.returncode == 0, added.stderr
    assert f"n003 is in {ugro.cluster}" in added.stderr
    assert added.stdout.splitlines()[1].startswith("n003\thealthy\t")
    edited = ugro.cluster.read_text()
    assert "# ours" in edited
    assert "# the loud one" in edited
    assert yaml.safe_load(edited)["nodes"]["n003"] == {"user": farm.user, "labels": ["new", "slow"]}
    assert document(ugro, "node", "show", "n003")["node"]["labels"] == ["new", "slow"]
    assert ugro("exec", "@new", "--", "true").returncode == 0
    removed = ugro("node", "rm", "n003")
    assert removed.returncode == 0
    assert removed.stderr == "n003 is no longer part of the cluster\n"
    assert ugro.cluster.read_text() == text
    wait_until(lambda: not farm["n003"].processes(), 5, "its node program to end")
    after = {node.name: node.sessions() for node in farm.nodes}
    assert (after["n001"], after["n002"]) == (before["n001"], before["n002"])


SAID_OF_REMOVED = "n002 was removed from the cluster; its ranks may well go on there: put it back with ugro node add"


def _hold(ugro: Ugro, gate: Path) -> None:
    waits = f"until [ -e {gate} ]; do sleep 0.1; done"
    assert ugro("run", "-d", "--no-sync", "--only", "n002", "--", "sh", "-c", waits).returncode == 0
    wait_until(lambda: document(ugro, "status", "1")["job"]["state"] == "running", 30, "it to run")


def test_a_node_with_jobs_is_removed_by_force_alone_and_why_says_so(farm_of: Farms, tmp_path: Path) -> None:
    with commands(farm_of(2).cluster_yaml()) as ugro:
        _hold(ugro, tmp_path / "go")
        refused = ugro("node", "rm", "n002")
        assert refused.returncode == 6
        assert "n002: job 1 runs there\nhint:  let it become empty: ugro node drain n002; " in refused.stderr
        assert "ugro cancel 1; or let it go on there, unseen: ugro node rm n002 --force" in refused.stderr
        assert ugro("node", "rm", "n002", "--force", "--if-idle").returncode == 2
        forced = ugro("node", "rm", "n002", "--force")
        assert forced.returncode == 0, forced.stderr
        assert SAID_OF_REMOVED in ugro("why", "1").stdout
        (tmp_path / "go").touch()
        assert ugro("cancel", "1").returncode == 0


@pytest.mark.proof
def test_a_node_removed_by_hand_is_named_and_its_job_is_found_when_it_is_back(farm_of: Farms, tmp_path: Path) -> None:
    file = farm_of(2).cluster_yaml()
    whole = file.read_text()
    without = yaml.safe_load(whole)
    del without["nodes"]["n002"]
    with commands(file) as ugro:
        _hold(ugro, tmp_path / "go")
        file.write_text(yaml.safe_dump(without))
        wait_until(lambda: SAID_OF_REMOVED in ugro("why", "1").stdout, 60, "why to say so")
        wait_until(lambda: document(ugro, "status", "1")["job"]["state"] == "unreachable", 60, "its node to be missed")
        assert SAID_OF_REMOVED in ugro("why", "1").stdout
        file.write_text(whole)
        (tmp_path / "go").touch()
        assert ugro("wait", "1", timeout=120).returncode == 0
        assert ugro("node", "rm", "n002").returncode == 0, "no job runs there"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("add", "n001"), 2, "there is a node named n001 already"),
        (("add", "-x"), 2, ""),
        (("add", "two words"), 2, "expected a node's name"),
        (("add", "n009", "--port", "0"), 2, "--port"),
        (("add", "n009", "--host=-oProxyCommand=touch x"), 2, "host"),
        (("add", "n009", "--label", "a b"), 2, "labels"),
        (("rm", "n009"), 4, "no node 'n009'"),
        (("drain", "n009"), 4, "no node 'n009'"),
        (("resume", "n009"), 4, "no node 'n009'"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    ugro: Ugro, words: tuple[str, ...], code: int, message: str
) -> None:
    assert ugro.cluster is not None
    before = ugro.cluster.read_text()
    answer = ugro("node", *words)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert message in answer.stderr.splitlines()[0]
    assert ugro.cluster.read_text() == before


def test_an_added_node_that_cannot_be_reached_is_in_the_file_and_the_exit_code_tells(ugro: Ugro) -> None:
    answer = ugro("node", "add", "n404", "--host", "127.0.0.1", "--port", "1", "--json")
    try:
        assert answer.returncode == 5
        [report] = json.loads(answer.stdout)["nodes"]
        assert (report["name"], report["cause"]) == ("n404", "refused")
        assert ugro.cluster is not None
        assert yaml.safe_load(ugro.cluster.read_text())["nodes"]["n404"] == {"host": "127.0.0.1", "port": 1}
    finally:
        assert json.loads(ugro("node", "rm", "n404", "--json").stdout) == {"removed": "n404"}


def test_an_added_name_for_a_machine_that_is_a_node_is_said_to_be_one(ugro: Ugro) -> None:
    try:
        assert ugro("node", "add", "n003").returncode == 0
        answer = ugro("node", "add", "n003-lan", "--host", "n003")
        assert answer.returncode == 0
        hint = "n003-lan: the same machine as n003: not used; remove the name: ugro node rm n003-lan"
        assert hint in answer.stderr.splitlines()
        assert "the same machine as n003: not used" in ugro("node", "show", "n003-lan").stdout
    finally:
        for name in ("n003", "n003-lan"):
            ugro("node", "rm", name)


def test_without_a_cluster_file_there_is_nothing_to_edit() -> None:
    with commands() as ugro:
        answer = ugro("node", "add", "gpu1")
        assert (answer.returncode, answer.stdout) == (2, "")
        assert "there is no cluster file to edit" in answer.stderr
        assert "hint:  write one from your hosts: ugro init" in answer.stderr


def test_a_broken_file_is_not_edited(ugro: Ugro) -> None:
    assert ugro.cluster is not None
    before = ugro.cluster.read_text()
    ugro.cluster.write_text("nodes: [n001, n002\n")
    try:
        answer = ugro("node", "add", "n003")
        assert answer.returncode == 2
        assert f"error: {ugro.cluster}:2: not valid YAML" in answer.stderr
        assert ugro.cluster.read_text() == "nodes: [n001, n002\n"
    finally:
        ugro.cluster.write_text(before)
    wait_until(lambda: "warning" not in ugro("health").stderr, 5, "the file to be good again")


# --- drain and resume ----------------------------------------------------------------------------------------------


def test_a_drain_is_shown_counts_at_once_and_outlives_the_agent(ugro: Ugro) -> None:
    drained = ugro("node", "drain", "n001", "--reason", "the fan\x1b[31m is loud")
    assert drained.returncode == 0
    assert drained.stderr == "n001 takes no new jobs; undo with: ugro node resume n001\n"
    ugro("agent", "stop")
    note = "drained: the fan�[31m is loud"
    for command in (("node", "ls"), ("health",)):
        shown = ugro(*command).stdout.splitlines()[1].split("\t")[-1]
        assert shown.partition("; network latency")[0] == note, "a busy machine may answer late, which is said after it"
    assert document(ugro, "node", "show", "n001")["node"]["drained"] == "the fan\x1b[31m is loud"
    assert document(ugro, "node", "resume", "n001") == {"node": {"name": "n001", "drained": None}}
    assert document(ugro, "node", "show", "n001")["node"]["drained"] is None
    assert document(ugro, "node", "drain", "n001") == {"node": {"name": "n001", "drained": ""}}
    assert ugro("node", "ls").stdout.splitlines()[1].endswith("\tdrained")
    ugro("node", "resume", "n001")


def test_a_removed_node_comes_back_undrained(ugro: Ugro) -> None:
    assert ugro("node", "add", "n003").returncode == 0
    ugro("node", "drain", "n003")
    ugro("node", "rm", "n003")
    ugro("node", "add", "n003")
    assert document(ugro, "node", "show", "n003")["node"]["drained"] is None
    ugro("node", "rm", "n003")


# --- trust ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def strangers(farm_of: Farms) -> Iterator[tuple[Ugro, SshdFarm]]:
    """Two nodes; the key of the first is not known."""
    farm = farm_of(2)
    farm.trust(farm.nodes[1:])
    with commands(farm.cluster_yaml()) as ugro:
        yield ugro, farm


def fingerprint(node: SshdNode) -> str:
    """As the administrator of the node would see it."""
    argv = ["ssh-keygen", "-lf", str(node.directory / "host_key.pub")]
    words = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    return f"{words[1]} {words[-1]}"


def test_an_unknown_key_is_shown_and_accepted_only_when_told_to(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    report = document(ugro, "node", "show", "n001")["node"]
    assert (report["status"], report["cause"]) == ("unreachable", "host-key-unknown")
    assert "ugro node trust n001" in report["hint"]
    before = farm.known_hosts.read_text()
    refused = ugro("node", "trust", "n001")
    assert refused.returncode == 2
    assert fingerprint(farm["n001"]) in refused.stderr
    assert "hint:  accept it without asking: --yes" in refused.stderr
    assert farm.known_hosts.read_text() == before
    accepted = ugro("node", "trust", "n001", "--yes")
    assert accepted.returncode == 0, accepted.stderr
    address = f"[{farm['n001'].host}]:{farm['n001'].port}"
    assert accepted.stderr.splitlines()[-1] == f"n001: accepted host key of {address}: {fingerprint(farm['n001'])}"
    assert farm.known_hosts.read_text() == f"{before}{address} {farm['n001'].public_key}\n"
    wait_until(lambda: ugro("node", "show", "n001").returncode == 0, 10, "the node to be reached")
    again = document(ugro, "node", "trust", "n001")["host_key"]
    assert again["is_trusted"]
    assert again["fingerprints"] == [fingerprint(farm["n001"])]


@pytest.mark.proof
def test_a_person_is_asked_also_when_talk_is_not_wanted(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    said = {b"n\n": "n001: not accepted; nothing was written", b"\x03": "", b"y\n": ""}
    for answer, code in ((b"n\n", 1), (b"\x03", 130), (b"y\n", 0)):
        ended, shown = at_a_terminal(ugro, answer, "-q", "node", "trust", "n001")
        assert ended == code, shown
        assert fingerprint(farm["n001"]) in shown
        assert "Accept it? [y/N]" in shown
        assert said[answer] in shown
        assert shown.endswith("\r\n"), shown
        assert (farm["n001"].public_key in farm.known_hosts.read_text()) == (code == 0)


@pytest.mark.proof
def test_a_program_gets_the_key_that_is_not_accepted_yet(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    farm["n002"].change_host_key()
    before = farm.known_hosts.read_text()
    for name, message in (("n001", "its host key is not accepted"), ("n002", "its host key has changed")):
        answer = ugro("node", "trust", name, "--json")
        key = json.loads(answer.stdout)["host_key"]
        assert (answer.returncode, key["is_trusted"]) == (6, False)
        assert key["fingerprints"] == [fingerprint(farm[name])]
        assert answer.stderr.startswith(f"error: {name}: {message}")
    assert farm.known_hosts.read_text() == before
    assert document(ugro, "node", "trust", "n001", "--yes")["host_key"]["is_trusted"]


def at_a_terminal(ugro: Ugro, typed: bytes, *words: str) -> tuple[int, str]:
    """Types when the command asks; its exit code and what was on the screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(ugro.argv()[0], list(ugro.argv(*words)), ugro.environment())
    shown = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1)
        try:
            part = os.read(terminal, 4096) if ready else b""
        except OSError:  # the other side is closed
            break
        shown += part
        if b"[y/N]: " in shown and typed:
            # Python loses a Ctrl-C between what it shows and its read; no hand is that quick
            wait_until(lambda: _state(pid) == "S", 10, "the command to wait for an answer")
            os.write(terminal, typed)
            typed = b""
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode(errors="replace")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.proof
def test_a_changed_key_needs_another_word(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    old = fingerprint(farm["n002"])
    farm["n002"].change_host_key()
    for words in (("--yes",), ()):
        refused = ugro("node", "trust", "n002", *words)
        assert refused.returncode == 6
        assert "its host key has changed" in refused.stderr
        assert old in refused.stderr
        assert fingerprint(farm["n002"]) in refused.stderr
        assert "--replace" in refused.stderr
    assert ugro("node", "trust", "n002", "--replace").returncode == 2, "and somebody must still say yes"
    assert ugro("node", "trust", "n002", "--replace", "--yes").returncode == 0
    known = farm.known_hosts.read_text()
    assert known == f"[{farm['n002'].host}]:{farm['n002'].port} {farm['n002'].public_key}\n"
    wait_until(lambda: ugro("node", "show", "n002").returncode == 0, 10, "the node to be reached")


@pytest.mark.proof
def test_a_hashed_file_is_read_and_stays_hashed(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    hash_file = ["ssh-keygen", "-q", "-H", "-f", str(farm.known_hosts)]
    subprocess.run(hash_file, check=True, capture_output=True)
    farm.ssh_config.write_text(f"HashKnownHosts yes\n{farm.ssh_config.read_text()}")
    assert document(ugro, "node", "trust", "n002")["host_key"]["is_trusted"]
    farm["n002"].change_host_key()
    assert ugro("node", "trust", "n002", "--yes").returncode == 6
    assert ugro("node", "trust", "n002", "--yes", "--replace").returncode == 0
    assert ugro("node", "trust", "n001", "--yes").returncode == 0
    lines = farm.known_hosts.read_text().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("|1|") for line in lines)
    wait_until(lambda: ugro("health").returncode == 0, 10, "both nodes to be reached")


def test_a_revoked_key_is_never_accepted(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    line = f"@revoked [{farm['n001'].host}]:{farm['n001'].port} {farm['n001'].public_key}\n"
    farm.known_hosts.write_text(line)
    answer = ugro("node", "trust", "n001", "--yes", "--replace")
    assert answer.returncode == 6
    assert "its host key is revoked" in answer.stderr
    assert farm.known_hosts.read_text() == line


@pytest.mark.proof
def test_the_last_line_of_the_file_may_lack_its_end(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    farm.known_hosts.write_text(farm.known_hosts.read_text().rstrip("\n"))
    assert ugro("node", "trust", "n001", "--yes").returncode == 0
    wait_until(lambda: ugro("health").returncode == 0, 10, "both nodes to be reached")
    assert len(farm.known_hosts.read_text().splitlines()) == 2


@pytest.mark.proof
def test_a_key_that_changes_between_look_and_word_is_refused(strangers: tuple[Ugro, SshdFarm]) -> None:
    from ugro.client.client import Client
    from ugro.kernel.support.errors import NotAllowed

    ugro, farm = strangers
    ugro("agent", "start")
    with Client(home=ugro.home, any_cluster=True) as client:
        seen = client.ask(GetHostKey("n001"))
        farm["n001"].change_host_key()
        before = farm.known_hosts.read_text()
        with pytest.raises(NotAllowed, match="differs from the one that was shown"):
            client.ask(TrustHostKey(seen.node, seen.fingerprints, replace=True))
        assert farm.known_hosts.read_text() == before


@pytest.mark.proof
def test_a_node_behind_a_jump_is_trusted_over_the_jump(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    block = farm.ssh_config.read_text().split("Host n002")[0]
    farm.ssh_config.write_text(farm.ssh_config.read_text().replace(block, f"{block.rstrip()}\n  ProxyJump n002\n"))
    shown = ugro("node", "trust", "n001")
    assert fingerprint(farm["n001"]) in shown.stderr
    assert ugro("node", "trust", "n001", "--yes").returncode == 0
    wait_until(lambda: ugro("health").returncode == 0, 10, "both nodes to be reached")
    farm.trust(farm.nodes[:1])
    unknown = ugro("node", "trust", "n001")
    assert unknown.returncode == 5
    assert "n002: the host key is not known or has changed, and n001 is reached through it" in unknown.stderr
    assert "hint:  accept it first: ugro node trust n002" in unknown.stderr


@pytest.mark.proof
def test_a_node_that_is_down_or_is_this_machine_has_no_key_to_show(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    farm["n001"].stop()
    down = ugro("node", "trust", "n001", "--yes")
    assert down.returncode == 5
    assert "n001: connection refused" in down.stderr
    with commands() as local:
        name = document(local, "node", "ls")["nodes"][0]["name"]
        answer = local("node", "trust", name)
        assert answer.returncode == 6
        assert "is not reached by ssh" in answer.stderr


@pytest.mark.proof
def test_without_a_place_for_keys_none_is_accepted(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    farm.ssh_config.write_text(farm.ssh_config.read_text().replace(f'"{farm.known_hosts}"', "/dev/null"))
    answer = ugro("node", "trust", "n001", "--yes")
    assert answer.returncode == 6
    assert "ssh is configured to store no host keys" in answer.stderr


@pytest.mark.proof
def test_a_file_whose_path_has_a_blank_is_found(strangers: tuple[Ugro, SshdFarm]) -> None:
    ugro, farm = strangers
    place = farm.directory / "my keys" / "known hosts"
    farm.ssh_config.write_text(farm.ssh_config.read_text().replace(str(farm.known_hosts), str(place)))
    assert ugro("node", "trust", "n001", "--yes").returncode == 0
    assert farm["n001"].public_key in place.read_text()
    shutil.rmtree(place.parent)
