"""What each kind of source says, as offers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ifaddr import IP, Adapter

from ugro.features.discovery import registries as consul
from ugro.features.discovery import registries as zookeeper
from ugro.features.discovery import sources as command
from ugro.features.discovery import sources as mdns
from ugro.features.discovery.candidates import Offer, SourceDown
from ugro.features.discovery.registries import ConsulSource

# As `ansible-inventory --list` prints it.
ANSIBLE = {
    "_meta": {
        "hostvars": {
            "gpu1": {"ansible_host": "10.0.0.1", "ansible_user": "ann", "ansible_port": 2222, "x": 1},
            "gpu2": {"ansible_ssh_common_args": "-o ProxyCommand=x"},
        }
    },
    "all": {"children": ["ungrouped", "lab"]},
    "lab": {"children": ["fast", "lab"], "hosts": ["gpu2"]},
    "fast": {"hosts": ["gpu1"], "vars": {}},
    "slow": ["gpu3"],
}


def offers(tree: object) -> list[Offer]:
    return list(command.offers_in(json.dumps(tree).encode()))


def test_a_list_of_names_and_maps() -> None:
    found = offers(["gpu1", {"name": "gpu2", "host": "10.0.0.2", "port": 22, "user": "ann", "labels": ["a"]}])
    assert found == [Offer("gpu1"), Offer("gpu2", "10.0.0.2", "ann", 22, ["a"])]


def test_a_map_of_names_as_in_the_cluster_file() -> None:
    assert offers({"gpu1": {"ip": "10.0.0.1"}, "gpu2": None}) == [Offer("gpu1", "10.0.0.1"), Offer("gpu2")]


def test_an_ansible_inventory_gives_groups_as_labels_and_no_options_of_ssh() -> None:
    assert sorted(offers(ANSIBLE), key=lambda one: str(one.name)) == [
        Offer("gpu1", "10.0.0.1", "ann", 2222, ["lab", "fast"]),
        Offer("gpu2", None, None, None, ["lab"]),
        Offer("gpu3", None, None, None, ["slow"]),
    ]


@pytest.mark.parametrize("text", [b"", b"{", b"7", b'"gpu1"', b"null", b"[" * 100_000, b"\xff"])
def test_output_that_is_no_inventory_is_an_error_and_not_an_empty_list(text: bytes) -> None:
    with pytest.raises(SourceDown):
        command.offers_in(text)


def test_an_entry_in_zookeeper() -> None:
    assert zookeeper.offer_of("gpu1", b"") == Offer("gpu1")
    content = b'{"host": "10.0.0.1", "user": "ann", "port": 2222, "labels": ["a"]}'
    assert zookeeper.offer_of("gpu1", content) == Offer("gpu1", "10.0.0.1", "ann", 2222, ["a"])
    assert zookeeper.offer_of("member-0000000007", b'{"name": "gpu1"}').name == "gpu1"


@pytest.mark.parametrize("content", [b"x", b"[]", b"7", b"[" * 50_000, b" " * 70_000 + b"{}", b"\xff"])
def test_an_entry_that_is_no_map_is_refused_later(content: bytes) -> None:
    assert zookeeper.offer_of("gpu1", content).host == []


# As in the documentation of /v1/health/service/:service.
CONSUL = [
    {
        "Node": {"ID": "40e4a748", "Node": "gpu1", "Address": "10.1.10.12", "Datacenter": "dc1", "Meta": {}},
        "Service": {"ID": "ssh", "Service": "ssh", "Tags": ["gpu", "fast"], "Address": "", "Port": 22, "Meta": {}},
        "Checks": [{"Node": "gpu1", "CheckID": "serfHealth", "Status": "passing"}],
    },
    {
        "Node": {"Node": "gpu2", "Address": "10.1.10.13"},
        "Service": {"Tags": None, "Address": "gpu2.lan", "Port": 2222},
    },
]


def test_instances_in_consul() -> None:
    assert list(consul.offers_in(json.dumps(CONSUL).encode())) == [
        Offer("gpu1", "10.1.10.12", None, 22, ["gpu", "fast"]),
        Offer("gpu2", "gpu2.lan", None, 2222, None),
    ]
    assert consul.offers_in(b'[{"Node": 7}, null]') == [Offer(None, None, None, None, None)] * 2


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[" * 100_000])
def test_an_answer_that_is_no_list_is_an_error(body: bytes) -> None:
    with pytest.raises(SourceDown):
        consul.offers_in(body)


def test_the_question_to_consul_is_a_blocking_query() -> None:
    source = ConsulSource("http://c:8500/base/", "a/b c", 1, tag="x&y")
    assert source.path(7) == "/base/v1/health/service/a%2Fb%20c?passing=1&index=7&wait=60s&tag=x%26y"
    assert "X-Consul-Token" not in source.headers()


def test_a_token_that_is_missing_or_no_line_is_said_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ConsulSource("http://c:8500", "ssh", 1, token_env="RIG_TOKEN")
    with pytest.raises(SourceDown, match="RIG_TOKEN is not set"):
        source.headers()
    monkeypatch.setenv("RIG_TOKEN", "a\r\nX-Other: b")
    with pytest.raises(SourceDown) as caught:
        source.headers()
    assert "X-Other" not in str(caught.value)
    monkeypatch.setenv("RIG_TOKEN", "secret")
    assert source.headers()["X-Consul-Token"] == "secret"


@dataclass
class Announced:
    port: int = 22
    server: str = "gpu1.local."
    decoded_properties: dict[str, str | None] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("instance", "name"),
    [("gpu1", "gpu1"), ("gpu1 [aa:bb:cc:dd:ee:ff]", "gpu1"), ("The GPU box", "The-GPU-box"), ("«»", "gpu1")],
)
def test_an_announcement_becomes_a_name(instance: str, name: str) -> None:
    assert mdns.offer_of(instance, ["10.0.0.1"], Announced()) == Offer(name, "10.0.0.1", None, 22, ())


def test_an_announcement_has_labels_and_no_user() -> None:
    service = Announced(2222, decoded_properties={"labels": "fast,lab2", "user": "root", "empty": None})
    assert mdns.offer_of("gpu1", ["10.0.0.1"], service) == Offer("gpu1", "10.0.0.1", None, 2222, "fast,lab2")
    assert mdns.offer_of("gpu1", [], Announced()) is None


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        (["fe80::1%eth0", "10.0.0.1"], "10.0.0.1"),
        (["2001:db8::1", "169.254.3.4"], "2001:db8::1"),
        (["127.0.0.1", "fe80::1%eth0"], "fe80::1%eth0"),
        (["127.0.0.1"], "127.0.0.1"),
        ([], None),
    ],
)
def test_the_address_that_is_easiest_to_reach_is_taken(addresses: list[str], best: str | None) -> None:
    assert mdns.best_address(addresses) == best


def adapter(name: str, *addresses: str) -> Adapter:
    ips = [IP((one, 0, 0) if ":" in one else one, 24, name) for one in addresses]
    return Adapter(name, name, ips)


def test_a_machine_is_in_a_network_only_with_an_address_that_others_could_hear(tmp_path: Path) -> None:
    states = {"lo": "unknown", "eth0": "up", "tun0": "unknown", "docker0": "down", "eth1": "lowerlayerdown"}
    for name, state in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    lo, docker = adapter("lo", "127.0.0.1", "::1"), adapter("docker0", "172.17.0.1")
    unplugged = [adapter("eth1", "10.0.1.2"), adapter("eth1:1", "10.0.1.3"), adapter("eth0", "fe80::1")]
    assert mdns.network_addresses([lo, docker, *unplugged], tmp_path) == frozenset()
    plugged = [adapter("eth0", "10.0.0.2"), adapter("eth0:1", "10.0.0.3"), adapter("tun0", "10.8.0.2")]
    assert mdns.network_addresses([lo, docker, *plugged], tmp_path) == {"10.0.0.2", "10.0.0.3", "10.8.0.2"}
    elsewhere = mdns.network_addresses([lo, docker], tmp_path / "not Linux")
    assert elsewhere == {"172.17.0.1"}, "where nobody says whether an interface is connected, it is"
