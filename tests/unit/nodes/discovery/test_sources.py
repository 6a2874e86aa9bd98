"""The sources that a cluster file names, each with what the file says."""

from __future__ import annotations

from pathlib import Path

from ugro.features.discovery.registries import ConsulSource, ZooKeeperSource
from ugro.features.discovery.sources import CommandSource, MdnsSource, SshConfigSource, sources_of
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config

FILE = Path("/lab/cluster.yaml")
ALL = """
discovery:
  ssh_config: "gpu*"
  mdns: _ssh._tcp
  zookeeper: {hosts: "zk1:2181", path: /gpu}
  consul: {url: "https://consul.lan:8501", service: gpu-node, tag: gpu, token_env: TOKEN, token_file: /lab/token}
  command: [./inventory, --list]
  accept_users: true
  interval: 7
  timeout: 3
"""
ONE = "discovery: {ssh_config: 'gpu*'}\n"


def config_of(text: str) -> Config:
    return parse_config(text, FILE, {})


def test_each_source_has_what_the_file_says_in_one_order() -> None:
    assert sources_of(config_of(ALL), None) == (
        SshConfigSource(Path("~/.ssh/config"), "gpu*", 7.0),
        MdnsSource("_ssh._tcp"),
        ZooKeeperSource("zk1:2181", "/gpu", 3.0, may_name_users=True),
        ConsulSource("https://consul.lan:8501", "gpu-node", 3.0, "gpu", "TOKEN", "/lab/token"),
        CommandSource(("./inventory", "--list"), Path("/lab"), 7.0, 3.0),
    )


def test_a_file_without_the_section_has_no_sources() -> None:
    assert sources_of(config_of("nodes: [gpu1]\n"), None) == ()


def test_an_unchanged_source_is_equal_to_the_one_before_so_that_its_watch_goes_on() -> None:
    before, after = sources_of(config_of(ALL), None), sources_of(config_of(ALL.replace("--list", "--all")), None)
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_hosts_come_from_the_ssh_configuration_that_links_use() -> None:
    named = config_of(f"ssh: {{config_file: /lab/ssh_config}}\n{ONE}")
    [source] = sources_of(named, None)
    assert source == SshConfigSource(Path("/lab/ssh_config"), "gpu*", 30.0)
    [allowed] = sources_of(named, "/state/allowed_ssh_config")
    assert allowed == SshConfigSource(Path("/state/allowed_ssh_config"), "gpu*", 30.0), "the copy that was allowed"
