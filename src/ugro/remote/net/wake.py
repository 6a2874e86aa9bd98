"""`net.wake`: a Wake-on-LAN packet for a machine in this node's network, which the agent may not reach itself."""

from __future__ import annotations

import socket
from typing import Any, Dict

from ugro.remote.program import Call

PORT = 9  # discard: nobody answers there
EVERYBODY = "255.255.255.255"


def wake(call: Call, params: Dict[str, Any]) -> None:
    send(str(params["mac"]), str(params.get("broadcast") or EVERYBODY))
    call.finish({})


def send(mac: str, broadcast: str) -> None:
    """Raises OSError, and ValueError for what is no address."""
    packet = magic_packet(mac)
    socket.inet_aton(broadcast)  # a name could lead anywhere
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet, (broadcast, PORT))


def magic_packet(mac: str) -> bytes:
    """Six bytes of ones, and the address sixteen times."""
    parts = mac.split(":")
    if len(parts) != 6 or any(len(part) != 2 for part in parts):
        raise ValueError("no MAC address: %.40r" % mac)
    return b"\xff" * 6 + bytes(int(part, 16) for part in parts) * 16
