"""Wake-on-LAN with real packets: in network namespaces, from this machine and from a node."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.integration.conftest import Farms, in_loop, link_to
from tests.integration.nodes.test_power import becomes, ended, report, submitted
from tests.integration.sharing import commands
from tests.rig.netns import NetnsNode
from tests.rig.sleeping import Beds
from tests.rig.sshd import command
from ugro.features.power import nodes as power
from ugro.features.power.node.wake import PORT, magic_packet

pytestmark = pytest.mark.proof

LISTEN = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("0.0.0.0", 9))
sys.stdout.write("ready\\n"); sys.stdout.flush()
while True:
    sys.stdout.write(receiver.recv(2048).hex() + "\\n"); sys.stdout.flush()
"""


@dataclass(frozen=True)
class Card:
    """The network card of a machine that sleeps: it hears packets, and nothing else of the machine does."""

    process: subprocess.Popen[str]

    def next_packet(self, timeout_s: float = 60) -> bytes:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, f"no packet within {timeout_s:g} s"
        return bytes.fromhex(self.process.stdout.readline())


@contextmanager
def card_in(node: NetnsNode) -> Iterator[Card]:
    argv = [command("ip"), "netns", "exec", node.cable.namespace, sys.executable, "-c", LISTEN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Card(process)
        finally:
            process.kill()


def mac_of(node: NetnsNode) -> str:
    argv = [command("ip"), "-n", node.cable.namespace, "-j", "link", "show", "cable"]
    [link] = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True, timeout=10).stdout)
    return str(link["address"])


def test_a_packet_with_the_learned_address_wakes_the_node() -> None:
    with ExitStack() as stack:
        farm = Farms(stack).with_cables(1)
        [node] = farm.nodes
        beds = stack.enter_context(Beds(farm, resume="wol"))
        ugro = stack.enter_context(commands(beds.cluster()))
        becomes(ugro, node, "asleep")
        card = stack.enter_context(card_in(node))
        number = submitted(ugro, "--", "true")
        assert card.next_packet() == magic_packet(mac_of(node))
        assert report(ugro, node)["status"] == "waking"
        node.start()
        assert ended(ugro, number)["state"] == "succeeded"


@in_loop
async def test_a_node_knows_its_interface_and_sends_a_packet_into_its_network() -> None:
    with ExitStack() as stack:
        farm = Farms(stack).with_cables(1)
        [node] = farm.nodes
        receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        receiver.bind(("", PORT))
        receiver.settimeout(20)
        async with link_to(farm, node) as link:
            found = await power.interface(link)
            assert (found.name, found.mac, found.address) == ("cable", mac_of(node), node.host)
            assert found.broadcast == node.host.rpartition(".")[0] + ".3"
            await link.call("net.wake", {"mac": "00:11:22:aa:bb:cc", "broadcast": found.broadcast}, timeout_s=10)
        packet, (sender, _) = receiver.recvfrom(2048)
        assert packet == magic_packet("00:11:22:aa:bb:cc")
        assert sender == node.host
