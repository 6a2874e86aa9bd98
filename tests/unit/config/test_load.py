"""A cluster file that is right: every key and default, both forms of nodes, and where the file is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest

from ugro.features.alerts.config import Channel
from ugro.features.power.model import OwnerRule, Then, When
from ugro.kernel.config.load import load_config, parse_config
from ugro.kernel.config.schema import Config, NodeEntry, Settings, Ssh
from ugro.kernel.config.section import Section
from ugro.kernel.links.model import NodeSpec, Role

FILE = Path("cluster.yaml")
ROOT = Path(__file__).resolve().parents[3]


def config_of(text: str, **env: str) -> Config:
    return parse_config(text, FILE, env)


def only_node(text: str) -> NodeSpec:
    (node,) = config_of(text).nodes
    return node


def test_every_default_is_the_promised_one() -> None:
    config = config_of("nodes: [gpu1]")
    hidden = ("nodes", "given_keys")
    shown = asdict(config, dict_factory=lambda pairs: {name: value for name, value in pairs if name not in hidden})
    assert shown == {
        "path": FILE,
        "remote_root": "~/grid_workspace",
        "ssh": {
            "timeout": 10,
            "connect_timeout": 5,
            "max_retries": 3,
            "pool_size": 10,
            "key_file": None,
            "config_file": None,
        },
        "health_check": {
            "timeout": 3,
            "max_workers": 20,
            "cpu_weight": 1.0,
            "gpu_weight": 3.0,
            "refresh_interval": 60,
        },
        "sync": {
            "exclude_patterns": (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next"),
            "use_checksums": True,
            "follow_symlinks": False,
            "max_parallel_transfers": 5,
            "max_size": 500_000_000,
            "store_limit": 10_000_000_000,
            "folder_limit": 100_000_000_000,
            "outside_links": "keep",
        },
        "ray": {
            "dashboard_port": 8265,
            "redis_port": 6379,
            "client_port": 10001,
            "head_bind_all": False,
            "namespace": "default",
            "log_level": "info",
        },
        "cluster": {"name": "default", "master_ip": None, "master_port": 29500},
        "training": {
            "batch_size_per_gpu": None,
            "gradient_accumulation": None,
            "default_model": None,
            "default_dataset": None,
        },
        "monitor": {
            "busy_interval": 5,
            "recent_interval": 10,
            "quiet_interval": 20,
            "idle_interval": 40,
            "breaker_failures": 3,
            "breaker_pause": 300,
        },
        "alerts": {
            "channels": (),
            "least": "info",
            "repeat": 3600,
            "score_warning": 70,
            "score_critical": 50,
            "gpu_temperature_warning": 80,
            "gpu_temperature_critical": 85,
            "memory_warning": 0.9,
            "memory_critical": 0.95,
            "unhealthy_nodes": 0.5,
        },
        "metrics": {"node_hours": 24, "job_days": 365, "max_gb": 10},
        "retention": {
            **{"jobs": 90 * 86400, "keep": 10_000, "results": None, "kept": 30 * 86400, "audit": 365 * 86400},
            "notice": 86400,
        },
        "environments": {"max_size": 50_000_000_000},
        "energy": {"price_per_kwh": None, "currency": "EUR"},
        "dashboard": {
            "enabled": True,
            "host": "127.0.0.1",
            "port": 8099,
            "names": (),
            "launch": None,
            "certificate_file": None,
            "key_file": None,
        },
        "owner": {"when": "never", "then": "pause", "quiet": 600},
        "power": {
            "suspend_after": None,
            "suspend": "ssh",
            "resume": "wol",
            "on_node": ("systemctl", "suspend"),
            "mac": None,
            "webhook": None,
            "secret_file": None,
            "suspend_timeout": 60,
            "resume_timeout": 300,
            "cool_down": 600,
            "most_per_hour": 6,
            "idle_load": 0.2,
            "exclude": (),
            "labels": {},
        },
        "team": {"group": None, "default_role": "user", "roles": {}, "socket": None, "account": None},
        "api": {"bind": None, "tls": None},
        "hooks": {"queue_longer_than": None, "idle": None, "node_lost": None, "job_ended": None},
        "discovery": {
            "ssh_config": None,
            "mdns": None,
            "zookeeper": None,
            "consul": None,
            "command": (),
            "join": "ask",
            "match": (),
            "user": None,
            "accept_users": False,
            "most": 64,
            "leave_after": 60,
            "interval": 30,
            "timeout": 10,
        },
        "environment": {
            "python": None,
            "requirements": None,
            "packages": (),
            "constraints": None,
            "lock": None,
            "project": None,
            "index_url": None,
            "extra_index_url": (),
            "find_links": (),
            "no_index": False,
            "offline": False,
            "overrides": {},
            "existing": None,
            "upgrade": False,
            "enabled": True,
        },
        "quotas": {"default": None, "users": {}, "groups": {}},
        "fair_share": {"half_life": 604800.0, "weights": {}},
        "export": {"influxdb": None, "otlp": None, "interval": 10.0, "spool_limit": 100_000_000},
        "channels": {},
    }


def test_a_list_of_names_is_left_to_ssh_to_resolve() -> None:
    nodes = config_of("nodes:\n  - gpu1\n  - gpu-2.lan\n").nodes
    assert nodes == (NodeSpec("gpu1"), NodeSpec("gpu-2.lan"))
    assert nodes[0].target == "gpu1"


def test_a_node_keeps_every_field_it_is_given() -> None:
    text = """
remote_root: /common
nodes:
  gpu1:
    ip: 192.168.1.11
    user: ann
    port: 2222
    role: master
    gpu: RTX 4070
    vram_gb: 8
    labels: [fast, "3070"]
    python: ~/venv/bin/python
    remote_root: /data/ugro
    transport: [docker, exec, -i, gpu1]
    env: {B: two words, A: ""}
    owner: {when: gpu_busy, then: shrink, quiet: 30m}
"""
    assert only_node(text) == NodeSpec(
        name="gpu1",
        host="192.168.1.11",
        user="ann",
        port=2222,
        role=Role.MASTER,
        gpu="RTX 4070",
        vram_bytes=8 * 10**9,
        labels=("fast", "3070"),
        python="~/venv/bin/python",
        remote_root="/data/ugro",
        transport=("docker", "exec", "-i", "gpu1"),
        env=(("A", ""), ("B", "two words")),
        owner=OwnerRule(When.GPU_BUSY, Then.SHRINK, 1800.0),
    )


def test_what_a_node_does_not_say_of_its_owner_is_as_for_all() -> None:
    text = """
owner: {when: active, quiet: 5m}
nodes: {a: {}, b: {owner: {then: drain}}, c: {owner: {when: never}}, d: {owner: {quiet: 1h}}}
"""
    assert [node.owner for node in config_of(text).nodes] == [
        OwnerRule(When.ACTIVE, Then.PAUSE, 300.0),
        OwnerRule(When.ACTIVE, Then.DRAIN, 300.0),
        None,
        OwnerRule(When.ACTIVE, Then.PAUSE, 3600.0),
    ]
    everywhere = config_of("nodes: {a: {owner: {quiet: 1h}}}", UGRO_OWNER_WHEN="gpu_busy")
    assert everywhere.nodes[0].owner == OwnerRule(When.GPU_BUSY, Then.PAUSE, 3600.0)
    [here] = load_config(None, {"UGRO_OWNER_WHEN": "active"}).nodes
    assert here.owner == OwnerRule(When.ACTIVE)
    assert only_node("nodes: [gpu1]").owner is None, "nobody is looked for by default"


def test_a_node_without_fields_takes_the_common_ones() -> None:
    assert only_node("remote_root: /common\nnodes:\n  gpu1:\n") == NodeSpec("gpu1", remote_root="/common")


def test_ip_and_host_are_two_words_for_one_thing() -> None:
    assert only_node("nodes: {a: {host: gpu1.lan}}").host == "gpu1.lan"
    assert only_node("nodes: {a: {ip: 10.0.0.1, host: 10.0.0.1}}").host == "10.0.0.1"


@pytest.mark.parametrize("name", ["1", "on", "no", "null", "3070ti"])
def test_a_map_key_that_yaml_takes_for_something_else_is_still_a_name(name: str) -> None:
    assert only_node(f"nodes:\n  {name}: {{}}\n").name == name


@pytest.mark.parametrize("host", ["fe80::1%eth0", "gpu_1.lan", "bücher.example"])
def test_unusual_hosts_are_allowed(host: str) -> None:
    assert only_node(f'nodes: {{a: {{host: "{host}"}}}}').host == host


def test_vram_may_be_given_with_its_unit() -> None:
    assert only_node("nodes: {a: {vram_gb: 12 GiB}}").vram_bytes == 12 * 2**30
    assert only_node("nodes: {a: {vram_gb: 7.5}}").vram_bytes == 7_500_000_000


def test_durations_are_read_as_people_write_them() -> None:
    config = config_of("nodes: [a]\nssh: {timeout: 1m30s, connect_timeout: 500ms}\nhealth_check: {refresh_interval: 0}")
    assert (config.ssh.timeout, config.ssh.connect_timeout) == (90, 0.5)
    assert config.health_check.refresh_interval == 0


def test_a_whole_number_is_fine_where_a_weight_is_expected() -> None:
    assert config_of("nodes: [a]\nhealth_check: {cpu_weight: 2}").health_check.cpu_weight == 2.0


def test_a_path_of_this_machine_has_its_home_directory_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    config = config_of("nodes: [a]\nssh: {key_file: ~/.ssh/id, config_file: /etc/x}")
    assert (config.ssh.key_file, config.ssh.config_file) == ("/home/ann/.ssh/id", "/etc/x")


def test_a_path_on_a_node_is_left_to_the_node() -> None:
    assert only_node("nodes: {a: {python: ~/venv/bin/python}}").python == "~/venv/bin/python"
    assert config_of("nodes: [a]\nremote_root: ~/w").remote_root == "~/w"


def test_a_section_whose_keys_are_all_commented_out_means_its_defaults() -> None:
    assert config_of("nodes: [a]\nssh:\n  # timeout: 3\n").ssh == Ssh()


def test_fields_that_nodes_share_can_be_merged() -> None:
    text = "nodes:\n  a: &all {user: ann, port: 22}\n  b: {<<: *all, port: 23}\n  c: {<<: [*all], user: bob}\n"
    assert [(node.user, node.port) for node in config_of(text).nodes] == [
        ("ann", 22),
        ("ann", 23),
        ("bob", 22),
    ]


def test_numbers_are_decimal_and_nothing_else() -> None:
    assert only_node("nodes: {a: {port: 0022}}").port == 22
    assert config_of("nodes: [a]\nssh: {max_retries: +4}").ssh.max_retries == 4


def test_the_same_variables_in_another_order_are_the_same_node() -> None:
    assert only_node("nodes: {a: {env: {A: x, B: y}}}") == only_node("nodes: {a: {env: {B: y, A: x}}}")


@pytest.mark.parametrize("start", ["\ufeff", "---\n", "%YAML 1.1\n---\n", "# a comment\r\n"])
def test_a_file_may_begin_as_yaml_files_do(start: str) -> None:
    assert only_node(f"{start}nodes: [gpu1]\r\n").name == "gpu1"


def test_a_configuration_cannot_be_changed() -> None:
    config = config_of("nodes: [a]")
    with pytest.raises(FrozenInstanceError):
        config.ssh.timeout = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.nodes = ()  # type: ignore[misc]


def test_two_readings_of_one_file_are_equal() -> None:
    text = "nodes: {a: {env: {A: x}, labels: [b]}}"
    assert config_of(text) == config_of(text)
    assert config_of(text) != config_of("nodes: {a: {env: {A: y}, labels: [b]}}")


def test_without_a_file_this_machine_is_the_cluster() -> None:
    config = load_config(None, {"UGRO_REMOTE_ROOT": "/data/x", "UGRO_SSH_TIMEOUT": "20s"})
    (node,) = config.nodes
    assert (node.transport, node.role, node.remote_root) == ("local", Role.MASTER, "/data/x")
    assert config.path is None
    assert config.ssh.timeout == 20
    # Its name can be written into a file.
    assert config_of(f'nodes: ["{node.name}"]').nodes[0].name == node.name


def sections() -> Iterator[type[Section]]:
    yield from (NodeEntry, Channel)
    for declared in Settings.known_keys().values():
        if declared.section is not None:
            yield declared.section


def test_every_key_means_something() -> None:
    every: list[type[Section]] = [Settings, *sections()]
    for section in every:
        for key, declared in section.known_keys().items():
            assert declared.meaning.endswith("."), f"{section.__name__}.{key}"


def test_every_default_and_every_example_is_valid_itself() -> None:
    for section in sections():
        for declared in section.known_keys().values():
            assert declared.kind.parse(declared.default) == declared.default
            declared.kind.parse(declared.example)


def test_the_example_file_loads() -> None:
    config = load_config(ROOT / "cluster.example.yaml", {})
    assert [node.name for node in config.nodes] == ["gpu-master", "gpu1", "gpu2"]
    assert [node.gpu for node in config.nodes] == ["RTX 5070 Ti", "RTX 4070", "RTX 3070 Ti"]
    defaults = config_of("nodes: [a]")
    assert replace(config, nodes=(), path=None) == replace(defaults, nodes=(), path=None)
