"""``ugro init``: from hosts that answer to a cluster file that works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.terminal import Screen
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(3)


@pytest.fixture(scope="module")
def shared() -> Iterator[Ugro]:
    """Its agent serves no file, and ``init`` must not make it serve one."""
    with commands() as ugro:
        yield ugro


@pytest.fixture
def ugro(shared: Ugro, tmp_path: Path) -> Iterator[Ugro]:
    """In a folder of its own, with a home folder of its own."""
    shutil.rmtree(shared.home / "cwd")
    shutil.rmtree(shared.home / "user")
    (shared.home / "cwd").mkdir()
    (shared.home / "user" / ".ssh").mkdir(parents=True)
    yield shared
    agent = json.loads(shared("agent", "status", "--json").stdout)["agent"]
    assert agent is None or agent["cluster_file"] is None  # some tests need no agent


def written(ugro: Ugro) -> Path:
    return ugro.home / "cwd" / "cluster.yaml"


def nodes(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["nodes"]
    return found


def this_machine() -> str:
    return os.uname().nodename


def test_hosts_of_the_ssh_configuration_that_answer_become_nodes(ugro: Ugro, farm: SshdFarm) -> None:
    farm["n002"].stop()
    config = ugro.home / "user" / ".ssh" / "config"
    config.write_text(f"Host github.com\n  User git\nHost *.lan\n  Port 22\n{farm.ssh_config.read_text()}")
    answer = ugro("init", "--here", "--ssh-config", str(config))
    farm["n002"].start()
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.splitlines()[-1] == "wrote cluster.yaml; next: ugro health"
    text = written(ugro).read_text()
    here = {"transport": "local", "role": "master"}
    assert nodes(written(ugro)) == {this_machine(): here, "n001": None, "n003": None}
    assert "n002" not in text
    assert "not added: n002; to try again: ugro init" in answer.stderr
    assert f"  n001:  # no GPU; {os.cpu_count()} cores, " in text
    assert yaml.safe_load(text)["ssh"] == {"config_file": str(config)}
    table = [line.split("\t")[:2] for line in answer.stdout.splitlines()[1:]]
    assert table == [["n001", "healthy"], ["n002", "unreachable"], ["n003", "healthy"]]


def test_a_second_name_for_a_machine_is_written_as_a_comment(ugro: Ugro, farm: SshdFarm) -> None:
    config = farm.directory / "two_names"
    one = farm.ssh_config.read_text().split("Host n002")[0]
    config.write_text(one + one.replace("Host n001", "Host n001-lan"))
    answer = ugro("init", "--here", "--no-local", "--ssh-config", str(config))
    assert answer.returncode == 0, answer.stderr
    assert nodes(written(ugro)) == {"n001": None}
    assert "  # n001-lan: the same machine as n001\n" in written(ugro).read_text()
    assert "not added: n001-lan is the same machine as n001" in answer.stderr


def test_named_hosts_are_all_written_and_the_result_works_as_it_is(ugro: Ugro, farm: SshdFarm) -> None:
    one, two = farm["n001"], farm["n002"]
    words = [f"{farm.user}@{one.host}:{one.port}", "n003", f"{two.host}:{two.port}", "nobody@127.0.0.1:1"]
    config = farm.directory / "init_config"
    keys = [line for line in farm.ssh_config.read_text().split("Host n002")[0].splitlines()[1:] if " Host" not in line]
    by_address = "\n".join(["Host 127.0.*", *(line for line in keys if "Port" not in line)])
    config.write_text(f"{farm.ssh_config.read_text()}{by_address}\n")
    answer = ugro("init", "--here", "--no-local", "--ssh-config", str(config), *words)
    assert answer.returncode == 0, answer.stderr
    assert nodes(written(ugro)) == {
        one.host: {"user": farm.user, "port": one.port},
        "n003": None,
        two.host: {"port": two.port},
        "127.0.0.1": {"user": "nobody", "port": 1},
    }
    with commands(written(ugro)) as other:
        reports = json.loads(other("health", "--json").stdout)["nodes"]
        assert [report["cause"] for report in reports] == ["refused", None, None, None]


def test_a_name_that_ssh_does_not_find_is_not_written(ugro: Ugro, farm: SshdFarm) -> None:
    config = ugro.home / "user" / "config"
    behind = "  ProxyJump n001\n  StrictHostKeyChecking no\n"
    config.write_text(
        f"Host nowhere\n  HostName none.invalid\n{behind}Host there\n  HostName 127.0.0.1\n  Port 1\n{behind}"
        f"Host silent\n  HostName 127.0.0.1\n  Port 1\n{farm.ssh_config.read_text()}"
    )
    init = ("init", "--here", "--no-local", "--ssh-config", str(config))
    refused = ugro(*init, "gpu9.invalid")
    assert (refused.returncode, written(ugro).exists()) == (4, False), refused.stderr
    assert "no such host name: gpu9.invalid\n" in refused.stderr
    answer = ugro(*init, "gpu9.invalid", "nowhere", "silent", "there", "n001")
    assert answer.returncode == 4, answer.stderr
    assert "not added: no such host name: gpu9.invalid, nowhere; correct it" in answer.stderr
    assert list(nodes(written(ugro))) == ["silent", "there", "n001"], "what does not answer now may do so later"
    again = ugro("init", "gpu9.invalid")
    assert (again.returncode, "nothing was written" in again.stderr) == (4, True), again.stderr
    assert ugro("init", "n002").returncode == 0
    with commands(written(ugro)) as other:
        late = other("node", "add", "gpu9.invalid")
        assert (late.returncode, list(nodes(written(ugro)))[-1]) == (5, "gpu9.invalid"), late.stderr


@pytest.mark.proof
def test_the_same_address_twice_makes_two_names(ugro: Ugro, farm: SshdFarm) -> None:
    words = ("127.0.0.1:1", "127.0.0.1:2", "[::1]:3", "127.0.0.1:1")
    answer = ugro("init", "--no-local", "--output", "other.yaml", *words)
    assert answer.returncode == 0, answer.stderr
    assert nodes(ugro.home / "cwd" / "other.yaml") == {
        "127.0.0.1": {"port": 1},
        "127.0.0.1-2": {"host": "127.0.0.1", "port": 2},
        "node-1": {"host": "::1", "port": 3},
    }
    with commands(ugro.home / "cwd" / "other.yaml") as other:
        assert other("agent", "start").returncode == 0, "what was written can be read"


def test_without_any_host_this_machine_is_the_cluster(ugro: Ugro) -> None:
    alone = ugro("init", "--here")
    assert (alone.returncode, alone.stdout) == (0, "")
    assert "no hosts in ~/.ssh/config; the file has this machine only\n" in alone.stderr
    assert nodes(written(ugro)) == {this_machine(): {"transport": "local", "role": "master"}}
    nothing = ugro("init", "--here", "--no-local", "--force")
    assert (nothing.returncode, nothing.stdout) == (4, "")
    assert "no hosts in ~/.ssh/config" in nothing.stderr
    assert "hint:  name some: ugro init gpu1" in nothing.stderr


def test_when_nobody_answers_the_file_is_still_a_good_one(ugro: Ugro) -> None:
    config = ugro.home / "user" / "config"
    config.write_text("Host gone\n  HostName 127.0.0.1\n  Port 1\n")
    answer = ugro("init", "--here", "--no-local", "--ssh-config", str(config))
    assert answer.returncode == 0, answer.stderr
    assert "gone" in answer.stdout
    assert list(nodes(written(ugro))) == [this_machine()]


def test_a_broken_file_is_not_written_over_unasked(ugro: Ugro) -> None:
    written(ugro).write_text("nodes: [mine\n")
    refused = ugro("init")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "cluster.yaml:" in refused.stderr
    assert refused.stderr.endswith("hint:  correct it, or overwrite it: ugro init --force\n")
    assert written(ugro).read_text() == "nodes: [mine\n"
    assert ugro("init", "--force").returncode == 0
    assert list(nodes(written(ugro))) == [this_machine()]


def test_what_to_type_next_is_of_the_file_that_was_meant(ugro: Ugro) -> None:
    first = ugro("init", "--output", "my nodes.yaml")
    assert first.stderr.endswith("wrote my nodes.yaml; next: ugro --cluster 'my nodes.yaml' health\n")
    again = ugro("init", "--output", "my nodes.yaml")
    assert again.stderr.endswith("nothing to add to my nodes.yaml; next: ugro --cluster 'my nodes.yaml' health\n")
    (ugro.home / "cwd" / "my nodes.yaml").write_text("nodes")
    again = ugro("init", "--output", "my nodes.yaml")
    assert again.stderr.endswith("overwrite it: ugro init --force --output 'my nodes.yaml'\n")
    again = ugro("--cluster", "my nodes.yaml", "init")
    assert again.stderr.endswith("overwrite it: ugro --cluster 'my nodes.yaml' init --force\n")
    assert ugro("init", "--here").stderr.endswith("wrote cluster.yaml; next: ugro health\n")
    lab = ugro.home / "lab" / "cluster.yaml"
    lab.parent.mkdir()
    lab.write_text("nodes: {lab1: {transport: local}}\n")
    try:
        said = ugro("init", "--here", "--force").stderr
        assert said.endswith("wrote cluster.yaml; next: ugro --cluster cluster.yaml health\n")
    finally:
        shutil.rmtree(lab.parent)


@pytest.mark.parametrize("words", [(), ("127.0.0.1:1",)])
def test_an_ssh_configuration_that_is_not_there_is_refused(ugro: Ugro, words: tuple[str, ...]) -> None:
    answer = ugro("init", "--ssh-config", "missing", *words)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("error: --ssh-config missing: no such file\nhint:  ")
    assert ugro("init", "--ssh-config", str(ugro.home), *words).returncode == 2
    assert not written(ugro).exists()


def test_names_in_the_ssh_configuration_that_are_no_hosts_are_passed_over(ugro: Ugro) -> None:
    config = ugro.home / "user" / ".ssh" / "config"
    config.write_text('Host "q q" a;b me@there gpu:22 -x gone\n  HostName 127.0.0.1\n  Port 1\n')
    answer = ugro("init", "--here", "--ssh-config", str(config), "--json")
    assert answer.returncode == 0, answer.stderr
    assert [report["name"] for report in json.loads(answer.stdout)["nodes"]] == ["gone"]


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "me@", "gpu1:99999", "gpu1:x", "a;b", ""])
def test_a_host_that_cannot_be_one_is_refused_and_nothing_is_written(ugro: Ugro, host: str) -> None:
    answer = ugro("init", "--here", "--", host)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "is not a host" in answer.stderr
    assert not written(ugro).exists()


def test_where_nothing_can_be_written_it_says_so(ugro: Ugro) -> None:
    nowhere = ugro.home / "nowhere"
    (ugro.home / "cwd" / "file").touch()
    places = {"no/such/folder/it.yaml": "no such file or directory", "file/it.yaml": "not a directory"}
    for place, problem in {**places, "../cwd": "is a directory"}.items():
        answer = ugro("init", "--force", "--output", place, "127.0.0.1:1", env={"UGRO_HOME": str(nowhere)})
        assert answer.returncode == 1
        assert f"{place} cannot be written: {problem}" in answer.stderr
    assert not nowhere.exists(), "and no host was tried before"


def test_the_users_file_for_all_folders_is_the_default_and_can_be_the_first_thing_written(
    ugro: Ugro, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    made = ugro("init", env={"UGRO_HOME": str(state)})
    try:
        assert made.returncode == 0, made.stderr
        assert made.stderr.endswith(f"wrote {state / 'cluster.yaml'}; next: ugro health\n")
        assert not written(ugro).exists()
    finally:
        ugro("agent", "stop", env={"UGRO_HOME": str(state)})


def test_the_environment_names_the_file_to_write(ugro: Ugro) -> None:
    target = ugro.home / "user" / "mine.yaml"
    assert ugro("init", env={"UGRO_CLUSTER": str(target)}).returncode == 0
    assert list(nodes(target)) == [this_machine()]


def test_json_is_the_health_of_what_was_tried(ugro: Ugro) -> None:
    answer = ugro("init", "--here", "--json", "127.0.0.1:1")
    assert answer.returncode == 0
    [report] = json.loads(answer.stdout)["nodes"]
    assert (report["name"], report["cause"]) == ("127.0.0.1:1", "refused")


def test_what_a_node_calls_its_gpu_cannot_break_the_file(ugro: Ugro, farm: SshdFarm, tmp_path: Path) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("not installed: a C compiler")
    library = build_nvml_stub(tmp_path / "lib")
    write_gpus(tmp_path / "gpus", [SimulatedGpu("RTX\x1b[2J\x07 9000")])
    script = farm["n001"].directory / "session"
    before = script.read_text()
    variables = f"UGRO_NVML_LIBRARY={library} UGRO_PRETEND_GPUS={tmp_path / 'gpus'}"
    script.write_text(before.replace("env -i ", f"env -i {variables} "))
    try:
        answer = ugro("init", "--here", "--no-local", "--ssh-config", str(farm.ssh_config), "n001")
    finally:
        script.write_text(before)
    assert answer.returncode == 0, answer.stderr
    assert "  n001:  # RTX�[2J� 9000; " in written(ugro).read_text()
    assert nodes(written(ugro)) == {"n001": None}


def test_after_init_the_next_command_uses_what_was_written(farm: SshdFarm) -> None:
    with commands() as ugro:
        before = ugro("init", "--user", "--ssh-config", str(farm.ssh_config), "n001", "n002")
        assert before.returncode == 0, before.stderr
        after = ugro("health")
        assert after.returncode == 0, after.stderr
        _expect_the_home_folder_to_stay_here(ugro)
        assert {line.split("\t")[0] for line in after.stdout.splitlines()[1:]} == {"n001", "n002", this_machine()}
        agent = json.loads(ugro("agent", "status", "--json").stdout)["agent"]
        assert (agent["cluster_file"], agent["generation"]) == (str(ugro.home / "cluster.yaml"), 1)


def _expect_the_home_folder_to_stay_here(ugro: Ugro) -> None:
    """In front of nodes that are other machines, a script there would only fail."""
    user = ugro.home / "user"
    (user / "s.py").write_text("print(42)\n")
    for words in (("launch", "s.py"), ("run", "--", "python3", "s.py"), ("run", "./s.py")):
        refused = ugro(*words, cwd=user)
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert f"s.py is not sent to the nodes: {user} is your home folder, and is never sent" in refused.stderr
        assert "--workdir DIR" in refused.stderr
    for words in (("launch", str(user / "s.py")), ("run", "--", "python3", "../user/s.py")):
        refused = ugro(*words)
        assert refused.returncode == 2
        assert f"s.py is not sent to the nodes: {user} is your home folder, and is never sent" in refused.stderr
    assert "where is it on the nodes?" in ugro("launch", "--no-sync", "s.py", cwd=user).stderr
    assert ugro("run", "--dry-run", "--", "echo", "s2.py", "x" * 9000, cwd=user).returncode == 0


# --- again, and keys that are not known -----------------------------------------------------------------------------


@pytest.fixture
def strangers(ugro: Ugro, farm: SshdFarm, tmp_path: Path) -> Path:
    """An ssh configuration for the farm's nodes that knows none of their keys; n003 is behind n002."""
    config = tmp_path / "ssh_config"  # a jump fails if its path has a space: ssh does not quote it
    text = farm.ssh_config.read_text().replace(str(farm.known_hosts), str(tmp_path / "known hosts"))
    config.write_text(text.replace("Host n003\n", "Host n003\n  ProxyJump n002\n"))
    return config


def known(tmp_path: Path, farm: SshdFarm) -> list[str]:
    file = tmp_path / "known hosts"
    text = file.read_text() if file.exists() else ""
    return [node.name for node in farm.nodes if node.public_key in text]


def test_without_a_terminal_no_key_is_accepted_and_it_says_how(
    ugro: Ugro, farm: SshdFarm, strangers: Path, tmp_path: Path
) -> None:
    answer = ugro("init", "--here", "--ssh-config", str(strangers))
    assert answer.returncode == 0, answer.stderr
    assert list(nodes(written(ugro))) == [this_machine()]
    assert known(tmp_path, farm) == []
    assert f"n001 ([{farm['n001'].host}]:{farm['n001'].port}) sends the host key\n    SHA256:" in answer.stderr
    assert "add the hosts: ugro init --accept-new n001 n002 n003, or in a terminal: ugro init\n" in answer.stderr
    assert answer.stderr.count("SHA256:") == 2, "that of n003 is seen once n002 is trusted"


def test_accepted_hosts_are_added_to_what_is_there_and_nothing_else_changes(
    ugro: Ugro, farm: SshdFarm, strangers: Path, tmp_path: Path
) -> None:
    mine = f"# mine\nnodes:\n  me:    {{transport: local}}  # here\nssh: {{config_file: '{strangers}'}}  # how\n"
    written(ugro).write_text(mine)
    (ugro.home / "cwd" / "src").mkdir()
    refused = ugro("init", "--accept-new", cwd=ugro.home / "cwd" / "src")
    assert (refused.returncode, "until you allow it" in refused.stderr) == (2, True), "it names an ssh configuration"
    assert ugro("allow", "--yes").returncode == 0
    answer = ugro("init", "--accept-new", cwd=ugro.home / "cwd" / "src")
    assert answer.returncode == 0, answer.stderr
    assert known(tmp_path, farm) == ["n001", "n002", "n003"], "the jump host first, then the one behind it"
    assert answer.stderr.count("    accepted, and added to ") == 3
    added = "".join(f"  n00{number}:\n" for number in (1, 2, 3))
    assert written(ugro).read_text() == mine.replace("# here\n", f"# here\n{added}")
    assert f"added 3 to {written(ugro)}; next: ugro health\n" in answer.stderr
    again = ugro("init")
    assert again.stderr == f"nothing to add to {written(ugro)}; next: ugro health\n"
    assert ugro("init", "ann@127.0.0.1:1").returncode == 0
    assert nodes(written(ugro))["127.0.0.1"] == {"user": "ann", "port": 1}, "a host that is named need not answer"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux draws the terminal, and is not installed")
def test_a_person_is_asked_where_it_applies_and_about_each_key(
    ugro: Ugro, farm: SshdFarm, strangers: Path, tmp_path: Path
) -> None:
    screen = Screen(ugro, tmp_path, 100, 40)
    try:
        screen.type(f"cd {ugro.home / 'cwd'} && ugro init --ssh-config {strangers} n001 n002; echo code=$?")
        screen.wait_for(r"Use this cluster in all folders\?.*\[Y/n\]:$")
        screen.type("n")
        screen.wait_for(r"n001 .*sends the host key\n    SHA256:[^$]*Accept it\? \[y/N\]:$")
        screen.type("y")
        screen.wait_for(r"n002 .*sends the host key\n    SHA256:[^$]*Accept it\? \[y/N\]:$")
        screen.type("n")
        screen.wait_for("not added: n002; to try again: ugro init\nwrote cluster.yaml; next: ugro health\ncode=0")
    finally:
        screen.close()
    assert known(tmp_path, farm) == ["n001"]
    assert list(nodes(written(ugro))) == [this_machine(), "n001"]


def test_a_host_that_is_no_node_can_be_trusted(ugro: Ugro, farm: SshdFarm, strangers: Path, tmp_path: Path) -> None:
    env = {"UGRO_HOME": str(tmp_path / "state"), "UGRO_SSH_CONFIG_FILE": str(strangers)}
    try:
        accepted = ugro("node", "trust", "n001", "--yes", env=env)
        assert accepted.returncode == 0, accepted.stderr
        assert known(tmp_path, farm) == ["n001"]
        assert ugro("node", "trust", "n404", "--yes", env=env).returncode == 4
        behind = ugro("node", "trust", "n003", "--yes", env=env)
        assert (behind.returncode, "accept it first: ugro node trust n002" in behind.stderr) == (5, True)
    finally:
        ugro("agent", "stop", env=env)
