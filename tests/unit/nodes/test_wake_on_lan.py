"""The packet that wakes a machine."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest

from ugro.features.power import nodes as power
from ugro.features.power.node.wake import Interface, magic_packet, send
from ugro.kernel.links.model import NodeSpec


def test_a_magic_packet_is_six_ones_and_the_address_sixteen_times() -> None:
    packet = magic_packet("00:11:22:AA:bb:cc")
    assert len(packet) == 102
    assert packet[:6] == b"\xff" * 6
    assert packet[6:] == bytes.fromhex("001122aabbcc") * 16


@pytest.mark.parametrize("mac", ["", "00:11:22:aa:bb", "00:11:22:aa:bb:cc:dd", "0:11:22:aa:bb:cc", "gg:11:22:aa:bb:cc"])
def test_no_other_text_is_an_address(mac: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # int and we say different things
        magic_packet(mac)


def test_a_packet_goes_to_an_address_and_never_to_a_name() -> None:
    with pytest.raises(OSError, match="illegal IP address"):
        send("00:11:22:aa:bb:cc", "example.org")


class Saying:
    """The link of a node that says this about its interface."""

    spec = NodeSpec("n1")

    def __init__(self, mac: str, name: str = "eth0") -> None:
        self._said = Interface(name, mac)

    async def call(self, *words: object, **more: object) -> dict[str, Any]:
        return asdict(self._said)


@pytest.mark.parametrize("mac", ["-oProxyCommand=x", "00:11:22:aa:bb:cc --all", "+0:11:22:aa:bb:cc", "x" * 9999])
def test_a_node_names_no_word_of_a_command_in_the_place_of_its_address(mac: str) -> None:
    good: Any = Saying("00:11:22:aa:bb:cc")
    assert asyncio.run(power.interface(good)).mac == "00:11:22:aa:bb:cc"
    for bad in (Saying(mac), Saying("00:11:22:aa:bb:cc", "eth0; reboot")):
        link: Any = bad
        assert asyncio.run(power.interface(link)) == Interface()
