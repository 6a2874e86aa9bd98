"""A cluster file that is wrong: one error, with the file, the line, the key, what was expected and a hint."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ugro.kernel.config.load import MAX_FILE_BYTES, load_config, parse_config
from ugro.kernel.support.errors import ConfigError


def error_of(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Path("cluster.yaml"), {})
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "nodes: [a]\nssh:\n  timeout: 3\n  conect_timeout: 5\n",
            "cluster.yaml:4: ssh.conect_timeout: unknown key",
            "did you mean connect_timeout?",
        ),
        (
            'nodes:\n  gpu1:\n    ip: 10.0.0.1\n    port: "twenty-two"\n',
            'cluster.yaml:4: nodes.gpu1.port: expected a whole number from 1 to 65535, got "twenty-two"',
            "for example: port: 22",
        ),
        (
            "nodes: [a]\nhealthcheck: {}\n",
            "cluster.yaml:2: healthcheck: unknown key",
            "did you mean health_check?",
        ),
        (
            "nodes: [a]\nstore: {url: postgresql://ugro@db/ugro}\n",
            "cluster.yaml:2: store: unknown key",
            "it stands in store.yaml of the state directory, ~/.ugro; ugro store migrate --to URL writes it",
        ),
        ("# the nodes\nnode: [a]\n", "cluster.yaml:2: node: unknown key", "did you mean nodes?"),
        (
            "nodes:\n  a: {zzz: 1}\n",
            "cluster.yaml:2: nodes.a.zzz: unknown key",
            "the keys of a node are ip, host",
        ),
        ("nodes: [a]\nssh: 5\n", "cluster.yaml:2: ssh: expected a map", "for example: ssh: {timeout: 10}"),
        (
            "nodes:\n  a: 10.0.0.1\n",
            "cluster.yaml:2: nodes.a: expected a map",
            "a: {ip: 192.168.1.11, user: ann}",
        ),
        (
            "nodes:\n  a:\n    owner: {when: always}\n",
            "cluster.yaml:3: nodes.a.owner.when: expected never, active or gpu_busy, got \"always\"",
            "for example: when: active",
        ),
        ("nodes:\n- a\n- 7\n", "cluster.yaml:3: nodes: expected a node's name", 'put it in quotes: "7"'),
        ("nodes:\n- no\n", "cluster.yaml:2: nodes: expected a node's name", "put it in quotes"),
        ("nodes:\n- a\n- {ip: b}\n", "cluster.yaml:3: nodes: expected a node's name", "map form"),
        ("nodes:\n- ann@gpu1\n", "cluster.yaml:2: nodes: expected a node's name", "user: ann"),
        (
            "nodes: []\n",
            "cluster.yaml:1: nodes: expected a list of names or a map of nodes",
            "nodes: [gpu1, gpu2]",
        ),
        ("nodes:\n", "cluster.yaml:1: nodes: expected a list of names or a map", "nodes: [gpu1, gpu2]"),
        ("nodes: gpu1\n", "cluster.yaml:1: nodes: expected a list of names or a map", "nodes: [gpu1, gpu2]"),
        ("ssh: {timeout: 3}\n", "cluster.yaml:1: nodes: expected a list of names", "nodes: [gpu1, gpu2]"),
        ("", "cluster.yaml:1: the file is empty", "nodes: [gpu1, gpu2]"),
        ("# nothing\n\n", "cluster.yaml:1: the file is empty", "nodes: [gpu1, gpu2]"),
        ("- a\n", "cluster.yaml:1: expected a map of keys to values, got a list", "nodes: [gpu1, gpu2]"),
        (
            "nodes: {a: {role: boss}}",
            'cluster.yaml:1: nodes.a.role: expected master or worker, got "boss"',
            "for example: role: worker",
        ),
        (
            "nodes:\n  a: {role: master}\n  b:\n    role: master\n",
            "cluster.yaml:4: nodes.b.role: a second master; a is one already, in line 2",
            "worker",
        ),
        (
            "nodes:\n  a:\n    ip: 10.0.0.1\n    host: gpu1\n",
            'cluster.yaml:4: nodes.a.host: "gpu1" is not the ip, "10.0.0.1"',
            "give one of them",
        ),
        (
            "nodes: [a]\nsync:\n  exclude_patterns:\n    - .git\n    - 5\n",
            "cluster.yaml:5: sync.exclude_patterns: expected a pattern, got 5",
            'put it in quotes: "5"',
        ),
        ("nodes: {a: {labels: [x, x]}}", 'cluster.yaml:1: nodes.a.labels: "x" is given twice', "remove one"),
        (
            "nodes: {a: {transport: telnet}}",
            "cluster.yaml:1: nodes.a.transport: expected ssh, local, podman, docker, kubernetes, or a command",
            "[docker, exec, -i, NAME]",
        ),
        (
            "nodes: [a]\nenergy: {price_per_kwh: cheap}\n",
            'cluster.yaml:2: energy.price_per_kwh: expected a number from 0 to 1000000, got "cheap"',
            "for example: price_per_kwh: 0.32",
        ),
        ("nodes: !foo [a]\n", "cluster.yaml:1: nodes: the tag !foo is not supported", "remove it"),
        ("nodes: [a]\nx: {<<: 3}\n", "cluster.yaml:2: x: expected a map after <<", ""),
        ("? [a]\n: b\n", "cluster.yaml:1: expected a word before the ':'", ""),
    ],
)
def test_a_mistake_is_named_with_its_line_its_key_and_a_hint(text: str, message: str, hint: str) -> None:
    error = error_of(text)
    assert str(error).startswith(message)
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("nodes: [a]\nssh: {}\nray: {}\nssh: {}\n", (2, 4)),
        ("nodes:\n  a: {}\n  b:\n  a:\n", (2, 4)),
        ("nodes:\n  - a\n  - b\n  - a\n", (2, 4)),
        ("nodes:\n  a:\n    port: 1\n    port: 2\n", (3, 4)),
        ('nodes:\n  a:\n    port: 1\n    "port": 2\n', (3, 4)),
    ],
)
def test_what_is_given_twice_is_refused_with_both_lines(text: str, lines: tuple[int, int]) -> None:
    message = str(error_of(text))
    assert message.startswith(f"cluster.yaml:{lines[1]}: ")
    assert f"given twice, in line {lines[0]} and in line {lines[1]}" in message


def test_several_mistakes_are_one_error_about_the_first_line() -> None:
    error = error_of("ray: {dashboard_port: 0}\nnodes: {a: {port: 0}, b: {bogus: 1}}\nssh: {timeout: 0}\n")
    assert str(error).startswith("cluster.yaml:1: ray.dashboard_port: ")
    assert str(error).endswith("(and 3 more)")


@pytest.mark.parametrize(
    "fields",
    [
        "port: 0",
        "port: 70000",
        "port: -1",
        "port: 22.0",
        "port: true",
        'port: "22"',
        "port: 0x16",
        "port: 22:22",
        "port: [22]",
        "user: -oProxyCommand=x",
        "user: a b",
        'user: "a\\nb"',
        "user: 1000",
        'user: ""',
        "host: -oProxyCommand=x",
        "host: ann@gpu1",
        "host: ssh://gpu1",
        'host: "a b"',
        'host: "a\\tb"',
        'host: "a\\e[1mb"',
        'host: "\\ud800"',
        'host: "$(x)"',
        "ip: true",
        "gpu: 4070",
        "vram_gb: -1",
        "vram_gb: 0",
        "vram_gb: .nan",
        'vram_gb: "12"',
        "vram_gb: a lot",
        "labels: fast",
        "labels: [3070]",
        'labels: ["a b"]',
        'labels: ["a,b"]',
        'labels: [""]',
        "python: -c",
        'python: ""',
        "remote_root: /",
        'remote_root: "~"',
        "remote_root: ~/",
        "remote_root: work",
        "remote_root: /data/../etc",
        'remote_root: "/a\\nb"',
        "transport: []",
        "transport: [-x]",
        'transport: [""]',
        "transport: [docker, 5]",
        'transport: ["a\\0b"]',
        "env: [A]",
        "env: {A: 1}",
        'env: {"A B": x}',
        'env: {"A=B": x}',
        'env: {A: "\\0"}',
        "role: null",
    ],
)
def test_nonsense_in_a_node_is_refused(fields: str) -> None:
    message = str(error_of(f"nodes:\n  gpu1: {{{fields}}}\n"))
    key = fields.partition(":")[0]
    assert message.startswith(f"cluster.yaml:2: nodes.gpu1.{key}")
    assert "expected" in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["-a", ".a", "a b", "a/b", "a@b", "a" * 65, "ä", "", "a:b"])
def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    for text in (f'nodes: ["{name}"]', f'nodes: {{"{name}": {{}}}}'):
        assert "expected a node's name" in str(error_of(text))


@pytest.mark.parametrize(
    "setting",
    [
        "ssh: {timeout: 0}",
        "ssh: {timeout: -1}",
        "ssh: {timeout: true}",
        "ssh: {timeout: null}",
        "ssh: {timeout: 1:30}",
        "ssh: {timeout: 2d}",
        "ssh: {timeout: .inf}",
        "ssh: {timeout: [1]}",
        "ssh: {max_retries: -1}",
        "ssh: {max_retries: 1.5}",
        "ssh: {max_retries: true}",
        "ssh: {pool_size: 0}",
        "ssh: {key_file: id_ed25519}",
        "ssh: {config_file: ''}",
        "health_check: {max_workers: 0}",
        "health_check: {cpu_weight: -1}",
        "health_check: {cpu_weight: .nan}",
        "health_check: {cpu_weight: '1'}",
        f"health_check: {{cpu_weight: {'9' * 400}}}",
        f"health_check: {{cpu_weight: {'9' * 5000}}}",
        "health_check: {refresh_interval: -1}",
        "sync: {exclude_patterns: .git}",
        "sync: {exclude_patterns: ['']}",
        "sync: {use_checksums: 1}",
        "sync: {use_checksums: 'true'}",
        "sync: {max_parallel_transfers: 0}",
        "ray: {dashboard_port: 65536}",
        "ray: {log_level: loud}",
        "ray: {namespace: ''}",
        "cluster: {master_port: 0}",
        "cluster: {master_ip: '-x'}",
        "cluster: {name: 5}",
        "training: {batch_size_per_gpu: 0}",
        "training: {default_model: 7}",
    ],
)
def test_nonsense_in_a_setting_is_refused(setting: str) -> None:
    section, _, rest = setting.partition(": {")
    message = str(error_of(f"nodes: [a]\n{setting}\n"))
    assert message.startswith(f"cluster.yaml:2: {section}.{rest.partition(':')[0]}: expected")


def test_a_value_of_a_nodes_environment_is_never_shown() -> None:
    assert "123456" not in f"{(error := error_of('nodes: {a: {env: {TOKEN: 123456}}}'))} {error.hint}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:\n\t- a\n", "cluster.yaml:2: a tab cannot indent"),
        ("nodes: [a\n", "cluster.yaml:2: not valid YAML"),
        ("nodes: [a]\nsync: {exclude_patterns: [*.pyc]}\n", "cluster.yaml:2: a value that begins with *"),
        ("nodes: [a]\nssh: *gone\n", "cluster.yaml:2: a value that begins with *"),
        ("nodes: [a]\n---\nnodes: [b]\n", "cluster.yaml:2: a second document"),
        ("nodes: [a]\nssh: timeout: 3\n", "cluster.yaml:2: a second ':'"),
        ('nodes: [a]\nx: "\\U99999999"\n', "cluster.yaml:2: not valid YAML"),
        ("nodes: [a]\nx: \x01\n", "cluster.yaml:2: a character that YAML does not allow"),
        ("%YAML 9" + "9" * 5000 + ".1\n---\nnodes: [a]\n", "cluster.yaml:1: not valid YAML"),
    ],
)
def test_text_that_is_not_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    assert str(error_of(text)).startswith(message)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefghi"
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]}}\n" for name in "bcdefghi"
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LAUGHS, id="aliases that multiply"),
        pytest.param(MERGES, id="merges that multiply"),
        pytest.param("a: &a [*a]\nnodes: [b]\n", id="a list in itself"),
        pytest.param("nodes:\n  a: &a {<<: *a}\n", id="a map merged into itself"),
        pytest.param("[" * 500_000, id="deep brackets"),
        pytest.param("- " * 500_000, id="deep dashes"),
        pytest.param("? " * 500_000, id="deep keys"),
        pytest.param("- a\n" * 250_000, id="many items"),
        pytest.param("nodes: [" + "a, " * 300_000 + "]", id="many names"),
    ],
)
def test_a_hostile_file_is_refused_quickly(text: str) -> None:
    started = time.process_time()
    assert len(str(error_of(text))) < 300
    assert time.process_time() - started < 10


@pytest.mark.parametrize("content", [b"nodes: [a]\nx: \xff\n", "nodes: [a]\nx: ü\n".encode("latin-1")])
def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: not UTF-8 text"):
        load_config(path, {})


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"nodes: [a]\n" + b"#" * MAX_FILE_BYTES)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_config(path, {})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for path in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "loop",
        tmp_path / "gone",
        Path("nul\0"),
        tmp_path / "x/y",
    ):
        with pytest.raises(ConfigError):
            load_config(path, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [a]")
    path.chmod(0)
    with pytest.raises(ConfigError, match="permission denied"):
        load_config(path, {})


# Pieces of YAML and of the schema, so that much of it gets past the first character.
CHARACTERS = list(" :-?[]{},#|>'\"=~*a1\n\r\t\\\x85\ufeff\u2028")
WORDS = ["nodes", "ssh", "timeout", "ip", "env", "-1", "1.5", ".nan", "null", "true", "2001-99-99"]
MARKS = ["!!int", "!x", ": ", "- ", "&a ", "*a", "<<", "\\0", "\\U99999999", "\n  ", "%YAML 1.1\n", "---\n"]
PIECES = st.one_of(st.sampled_from(CHARACTERS), st.sampled_from(WORDS), st.sampled_from(MARKS))

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
KEYS = st.sampled_from(["nodes", "ssh", "sync", "remote_root", "timeout", "exclude_patterns", "a", "env", "ip"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def complaint_about(text: str) -> str:
    """What a user would be told; anything but a ConfigError goes through and fails the test."""
    try:
        parse_config(text, Path("cluster.yaml"), {})
    except ConfigError as error:
        return f"{error} {error.hint}"
    return "cluster.yaml: nothing"


@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)))
@example("nodes: 2001-99-99")
@example("nodes: !!binary x")
@example("nodes: !!python/object:os.system {}")
@example("!!set {nodes}")
@example("nodes: {? {a: b} : c}")
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    complaint = complaint_about(text)
    assert complaint.startswith("cluster.yaml:")
    assert "pydantic" not in complaint
    assert "https://" not in complaint


@given(st.dictionaries(KEYS, TREES))
def test_no_tree_of_values_raises_anything_but_a_configuration_error(tree: dict[str, object]) -> None:
    assert complaint_about(yaml.safe_dump(tree, allow_unicode=True)).startswith("cluster.yaml:")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_configuration_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        load_config(path, {})
