"""The section ``discovery`` of the cluster file, and files whose nodes are all found."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.discovery.config import Consul, DiscoverySection, ZooKeeper
from ugro.kernel.config.allowance import Effects
from ugro.kernel.config.edit import add_node
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config
from ugro.kernel.support.errors import ConfigError

FILE = Path("cluster.yaml")


def config_of(text: str, **env: str) -> Config:
    return parse_config(text, FILE, env)


def test_a_file_whose_nodes_are_all_found_lists_none() -> None:
    config = config_of("discovery: {mdns: _ssh._tcp, join: auto}\n")
    assert config.nodes == ()
    assert config.section(DiscoverySection).has_sources


def test_a_file_without_nodes_and_without_a_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="nodes: expected a list of names"):
        config_of("discovery: {join: auto}\n")


def test_people_who_have_accounts_on_nodes_that_are_found_share_no_folder() -> None:
    text = "discovery: {mdns: _ssh._tcp, join: auto}\nteam: {group: gpu, account: '{user}'}\n"
    assert config_of(text).team.account == "{user}"
    assert config_of(f"{text}remote_root: '/data/{{user}}/ugro'\n").remote_root == "/data/{user}/ugro"
    with pytest.raises(ConfigError) as caught:
        config_of(f"{text}remote_root: /data/ugro\n")
    assert caught.value.message == (
        "cluster.yaml:3: remote_root: jobs on nodes that are found run in accounts of their users, "
        "who cannot share one remote_root"
    )
    assert "/data/{user}/ugro" in str(caught.value.hint)


def test_every_source_is_read() -> None:
    text = (
        "discovery:\n  ssh_config: gpu*\n  zookeeper: {hosts: 'zk1:2181,zk2:2181', path: /gpu}\n"
        "  consul: {url: 'https://consul.lan:8501', tag: gpu}\n  command: [./inventory, --list]\n"
    )
    section = config_of(text).section(DiscoverySection)
    assert section.ssh_config == "gpu*"
    assert section.zookeeper == ZooKeeper(hosts="zk1:2181,zk2:2181", path="/gpu")
    assert section.consul == Consul(url="https://consul.lan:8501", tag="gpu")
    assert section.command == ("./inventory", "--list")


@pytest.mark.parametrize("url", ["http://[::1]:8500", "https://consul.lan", "http://10.0.0.1:8500/proxy/consul"])
def test_an_address_of_consul_may_have_a_port_and_a_path(url: str) -> None:
    assert config_of(f"discovery: {{consul: {{url: '{url}'}}}}\n").section(DiscoverySection).consul == Consul(url=url)


@pytest.mark.parametrize("hosts", ["zk1", "zk1:2181,zk_2.lan:2182", "[::1]:2181,10.0.0.1"])
def test_servers_of_zookeeper_may_have_ports(hosts: str) -> None:
    config = config_of(f"discovery: {{zookeeper: {{hosts: '{hosts}'}}}}\n")
    assert config.section(DiscoverySection).zookeeper == ZooKeeper(hosts=hosts)


def test_a_map_in_a_variable_is_json() -> None:
    section = config_of("nodes: [a]\n", UGRO_DISCOVERY_ZOOKEEPER='{"path": "/gpu"}').section(DiscoverySection)
    assert section.zookeeper == ZooKeeper(path="/gpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mdns: ssh", 'discovery.mdns: expected a service type such as _ssh._tcp, got "ssh"'),
        ("ssh_config: 'a b'", "discovery.ssh_config: expected a pattern"),
        ("zookeeper: zk1:2181", "discovery.zookeeper: expected a map"),
        ("zookeeper: {hosts: 'zk1:port'}", "discovery.zookeeper.hosts: expected addresses with ports"),
        ("zookeeper: {hosts: 'zk1:2181,'}", "discovery.zookeeper.hosts: expected addresses with ports"),
        ("zookeeper: {hosts: 'zk1:99999'}", "discovery.zookeeper.hosts: expected addresses with ports"),
        ("zookeeper: {path: nodes}", "discovery.zookeeper.path: expected a path such as /ugro/nodes"),
        ("zookeeper: {path: /a/../b}", "discovery.zookeeper.path: expected a path"),
        ("consul: {url: 'http://ann:secret@consul:8500'}", "discovery.consul.url: expected an address"),
        ("consul: {url: 'http://consul:85000'}", "discovery.consul.url: expected an address"),
        ("consul: {url: 'http://consul:port'}", "discovery.consul.url: expected an address"),
        ("consul: {url: 'http://[::1'}", "discovery.consul.url: expected an address"),
        ("consul: {service: 'a b'}", "discovery.consul.service: expected a word"),
        ("consul: {token: x}", "discovery.consul.token: unknown key"),
        ("command: ./inventory --list", "discovery.command: expected a command as a list of words"),
        ("command: [-x]", "discovery.command: expected a command"),
        ("join: always", "discovery.join: expected ask or auto"),
        ("user: -oProxyCommand=x", "discovery.user: expected a user name"),
        ("most: 0", "discovery.most: expected a whole number from 1 to 1000"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"nodes: [a]\ndiscovery: {{{text}}}\n")
    assert f"cluster.yaml:2: {message}" in caught.value.message


def test_a_command_that_finds_machines_is_shown_first_before_it_is_allowed() -> None:
    text = "discovery: {mdns: _ssh._tcp, command: [sh, -c, touch pwned], join: auto}\nnodes: {a: {}}\n"
    lines = Effects.of(text, Path("/project/cluster.yaml")).lines
    assert lines[0] == 'discovery.command: [sh, -c, "touch pwned"]'
    assert {"discovery.join: auto", "discovery.mdns: _ssh._tcp"} <= set(lines)
    changed = Effects.of(text.replace("pwned", "other"), Path("/project/cluster.yaml"))
    assert changed.digest != Effects.of(text, Path("/project/cluster.yaml")).digest


def test_the_first_node_of_a_file_whose_nodes_are_found_is_added() -> None:
    text = "# ours\ndiscovery: {mdns: _ssh._tcp}"
    once = add_node(text, "gpu1", {})
    assert once == "# ours\ndiscovery: {mdns: _ssh._tcp}\nnodes:\n  gpu1: {}\n"
    twice = add_node(once, "gpu2", {"host": "10.0.0.2"})
    assert [spec.name for spec in config_of(twice).nodes] == ["gpu1", "gpu2"]
