"""What sources say is not trusted: nothing of it becomes an option, a command, another account or too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ugro.features.discovery.candidates import MOST_OFFERS, Checked, Offer, Rules, Source, check_offers, merged, spec_of
from ugro.features.discovery.model import Candidate
from ugro.features.discovery.registries import ZooKeeperSource
from ugro.features.discovery.sources import CommandSource, MdnsSource, SshConfigSource
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import SshOptions, ssh_command

MDNS = MdnsSource("_ssh._tcp")
COMMAND = CommandSource(("x",), Path("/"), 1, 1)
ZOOKEEPER = ZooKeeperSource("zk:2181", "/nodes", 1)


def check(*offers: Offer, source: Source = ZOOKEEPER, rules: Rules | None = None) -> Checked:
    return check_offers(offers, source, rules or Rules())


def test_a_machine_is_taken_with_its_fields() -> None:
    found = check(Offer("gpu1", "10.0.0.1", None, 2222, ["fast", "lab2"]), Offer("gpu2", port="22"))
    assert found == Checked(
        (
            Candidate("gpu1", "10.0.0.1", None, 2222, ("fast", "lab2"), ("zookeeper",)),
            Candidate("gpu2", "gpu2", None, 22, (), ("zookeeper",)),
        )
    )


@pytest.mark.parametrize(
    "offer",
    [
        Offer("-oProxyCommand=x"),
        Offer("a b"),
        Offer("../x"),
        Offer(""),
        Offer(None),
        Offer(7),
        Offer(["gpu1"]),
        Offer("x" * 65),
        Offer("gpu1", "-oProxyCommand=touch pwned"),
        Offer("gpu1", "root@elsewhere"),
        Offer("gpu1", "a;b"),
        Offer("gpu1", "$(id)"),
        Offer("gpu1", "a\nb"),
        Offer("gpu1", {"a": 1}),
        Offer("gpu1", port=0.5),
        Offer("gpu1", port=True),
        Offer("gpu1", port=70000),
        Offer("gpu1", port="22 -o x"),
        Offer("gpu1", labels=["@all"]),
        Offer("gpu1", labels=["a b"]),
        Offer("gpu1", labels={"a": 1}),
        Offer("gpu1", labels=[str(number) for number in range(17)]),
        Offer("gpu1", labels=[7]),
    ],
)
def test_what_could_reach_ssh_or_a_shell_is_refused_and_said(offer: Offer) -> None:
    found = check(offer)
    assert found.candidates == ()
    [refused] = found.refused
    assert refused.isprintable()
    assert len(refused) < 300


@pytest.mark.parametrize("source", [MDNS, ZOOKEEPER])
def test_a_source_that_is_not_trusted_with_it_does_not_choose_the_account(source: Source) -> None:
    [one] = check(Offer("gpu1", user="root"), source=source, rules=Rules(user="ann")).candidates
    assert one.user == "ann"
    [one] = check(Offer("gpu1", user="root"), source=source).candidates
    assert one.user is None


def test_a_trusted_source_chooses_the_account_and_a_bad_one_is_refused() -> None:
    trusted = ZooKeeperSource("zk:2181", "/nodes", 1, may_name_users=True)
    for source in (COMMAND, trusted):
        [one] = check(Offer("gpu1", user="bob"), source=source, rules=Rules(user="ann")).candidates
        assert one.user == "bob"
        assert check(Offer("gpu1", user="-l root"), source=source).candidates == ()


def test_hosts_of_an_ssh_configuration_keep_their_own_users(tmp_path: Path) -> None:
    source = SshConfigSource(tmp_path / "config", "gpu*", 1)
    [one] = check(Offer("gpu1"), source=source, rules=Rules(user="ann")).candidates
    assert one.user is None


def test_only_names_that_match_are_taken() -> None:
    found = check(Offer("gpu1"), Offer("printer"), Offer("lab-3"), rules=Rules(match=("gpu*", "lab-?")))
    assert [one.name for one in found.candidates] == ["gpu1", "lab-3"]
    assert found.refused == ()


def test_of_two_machines_with_one_name_the_first_is_taken_and_it_is_said() -> None:
    found = check(Offer("gpu1", "10.0.0.1"), Offer("gpu1", "10.0.0.2"))
    assert [one.host for one in found.candidates] == ["10.0.0.1"]
    assert found.refused == ("gpu1: listed twice, the first is used",)


def test_a_flood_is_bounded() -> None:
    found = check(*(Offer(f"n{number}") for number in range(MOST_OFFERS + 5)))
    assert len(found.candidates) == MOST_OFFERS
    assert found.refused == (f"{MOST_OFFERS + 5} machines are listed, only the first {MOST_OFFERS} are used",)
    assert len(check(*(Offer(f"-{number}") for number in range(500))).refused) == 21


def test_a_machine_of_two_sources_is_one_candidate_as_the_first_has_it() -> None:
    first = check(Offer("gpu1", "10.0.0.1"))
    second = check(Offer("gpu1", "gpu1.local"), Offer("gpu2"), source=MDNS)
    found = merged([first, second])
    assert found["gpu1"] == Candidate("gpu1", "10.0.0.1", sources=("zookeeper", "mdns"))
    assert found["gpu2"].sources == ("mdns",)


def config_of(text: str) -> Config:
    return parse_config(f"nodes: [a]\n{text}", Path("cluster.yaml"), {})


def test_a_node_that_was_found_gets_what_the_file_says_of_all_nodes() -> None:
    config = config_of("remote_root: /data/ugro\nowner: {when: active, then: drain}\n")
    spec = spec_of(Candidate("gpu1", "gpu1", "ann", 2222, ("fast",), ("mdns", "consul")), config)
    listed = parse_config(
        "nodes: {gpu1: {user: ann, port: 2222, labels: [fast]}}\n"
        "remote_root: /data/ugro\nowner: {when: active, then: drain}\n",
        Path("cluster.yaml"),
        {},
    ).nodes
    assert replace(spec, found_by=None) == listed[0]
    assert spec.owner is not None
    assert spec.found_by == "mdns, consul"


def options_of(spec: NodeSpec, **extra: str) -> dict[str, str]:
    words = ssh_command(spec, SshOptions(), **extra)
    pairs = [words[at + 1].partition("=") for at, word in enumerate(words) if word == "-o"]
    return {key: value for key, _, value in pairs}


def test_ssh_accepts_no_unknown_key_of_a_node_that_was_found_and_leaves_others_to_the_user() -> None:
    found = spec_of(Candidate("gpu1", "10.0.0.1", port=22, sources=("mdns",)), config_of(""))
    assert options_of(found)["StrictHostKeyChecking"] == "yes"
    assert options_of(found)["VerifyHostKeyDNS"] == "no"
    assert "StrictHostKeyChecking" not in options_of(NodeSpec("gpu1"))
    # When the key is shown before it is accepted, it goes into a file of its own.
    assert options_of(found, StrictHostKeyChecking="accept-new")["StrictHostKeyChecking"] == "accept-new"
