"""`net.wake`: a Wake-on-LAN packet for a machine in this node's network, which the agent may not reach itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import asdict, dataclass

from ugro.node import worker
from ugro.node.connectivity import interface_of
from ugro.node.program import Call, method

# --- interface --------------------------------------------------------------------------------------------------------
# The network interface that carries the link: its MAC wakes this machine when it sleeps (Wake-on-LAN).


_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_NO_MAC = "00:00:00:00:00:00"  # of loopback


@dataclass(frozen=True)
class Interface:
    """The one that carries the link; empty if there is none."""

    name: str = ""
    mac: str = ""
    address: str = ""
    broadcast: str = ""
    wake: str = ""  # whether its device may wake the machine: enabled, disabled


@method("net.interface", is_standing=True)
def interface(call: Call) -> None:
    worker.do(call, lambda: asdict(of_link()))


def of_link() -> Interface:
    """Empty if the link does not go over ssh, or not over a network."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else ""
    name = _of_ipv6(address) if ":" in address else interface_of(address)
    mac = _read(name, "address") if name else ""
    if mac in ("", _NO_MAC):
        return Interface()
    return Interface(name, mac, address, _broadcast(name), _read(name, "device/power/wakeup"))


def _of_ipv6(address: str) -> str:
    with contextlib.suppress(OSError):
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if fields and fields[0] == wanted:
                    return fields[-1]
    return ""


def _broadcast(name: str) -> str:
    """Computed: what an interface has as its own may never have been set."""
    request = struct.pack("256s", name.encode())
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        address, mask = (
            int.from_bytes(fcntl.ioctl(query, what, request)[20:24], "big") for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        return socket.inet_ntoa(((address | ~mask) & 0xFFFFFFFF).to_bytes(4, "big"))
    return ""


def _read(name: str, file: str) -> str:
    try:
        with open(os.path.join("/sys/class/net", name, file), encoding="ascii") as content:
            return content.read(64).strip()
    except (OSError, ValueError):
        return ""


# --- wake -------------------------------------------------------------------------------------------------------------


PORT = 9  # discard: nobody answers there
EVERYBODY = "255.255.255.255"


@method("net.wake")
def wake(call: Call, *, mac: str, broadcast: str = "") -> None:
    send(str(mac), str(broadcast or EVERYBODY))
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
