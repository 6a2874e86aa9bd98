"""The packet that wakes a machine."""

from __future__ import annotations

import pytest

from ugro.remote.net.wake import magic_packet, send


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
