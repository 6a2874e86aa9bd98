"""Nodes behind a cable that can be cut: each sshd in its own network namespace, joined to us by a veth pair.

Needs root, iproute2 and iptables; ``available`` says what is missing. The host's firewall is never touched:
the rules that drop packets stand inside the node's namespace, which goes with the node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from tests.rig.sshd import SYSTEM_PATH, Farm, NodeOptions, SshdNode, command

_NETWORKS = range(1, 255)
_TIMEOUT_S = 10
_INTERFACE = "cable"  # the node's end of the pair


class Way(StrEnum):
    """Seen from us: which packets get lost."""

    BOTH = "both"
    TO_NODE = "to node"
    FROM_NODE = "from node"


_CHAINS = {
    Way.BOTH: (("INPUT", "-i"), ("OUTPUT", "-o")),
    Way.TO_NODE: (("INPUT", "-i"),),
    Way.FROM_NODE: (("OUTPUT", "-o"),),
}


def available() -> str | None:
    """Why nodes in namespaces cannot be had here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "iptables") if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    cable = Cable()
    try:
        cable.lay()
        cable.cut(Way.BOTH)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        cable.remove()
    return None


class Cable:
    """A namespace, a veth pair into it and a network of four addresses; ours is .1, the node's .2."""

    def __init__(self) -> None:
        self.network: int | None = None

    @property
    def namespace(self) -> str:
        return f"ugro-rig-{self.network}"

    @property
    def node_address(self) -> str:
        return f"10.213.{self.network}.2"

    def lay(self) -> None:
        self.network = _claim_network()
        ours = f"ugro{self.network}"
        for line in (
            f"link add {ours} type veth peer name {_INTERFACE} netns {self.namespace}",
            f"addr add 10.213.{self.network}.1/30 dev {ours}",
            f"link set {ours} up",
            f"-n {self.namespace} addr add {self.node_address}/30 dev {_INTERFACE}",
            f"-n {self.namespace} link set {_INTERFACE} up",
            f"-n {self.namespace} link set lo up",
            f"-n {self.namespace} route add default via 10.213.{self.network}.1",
        ):
            _run("ip", *line.split())
        # Nodes reach each other, through us; only what comes from one of them is passed on.
        Path("/proc/sys/net/ipv4/conf", ours, "forwarding").write_text("1")

    def isolate(self) -> None:
        """From now on the node reaches us, and no other node."""
        self.ip("route del default")

    def lead_to(self, other: Cable) -> None:
        """Puts our end into another's namespace: both are on one network then, and we are not."""
        ours = f"ugro{self.network}"
        for line in (
            f"link set {ours} netns {other.namespace}",
            f"-n {other.namespace} addr add 10.213.{self.network}.1/30 dev {ours}",
            f"-n {other.namespace} link set {ours} up",
        ):
            _run("ip", *line.split())

    def ip(self, line: str) -> None:
        """Changes what is inside the namespace."""
        _run("ip", "-n", self.namespace, *line.split())

    def cut(self, way: Way) -> None:
        for chain, option in _CHAINS[way]:
            self._iptables("-A", chain, option, _INTERFACE, "-j", "DROP")

    def heal(self) -> None:
        self._iptables("-F")

    def remove(self) -> None:
        """Takes away the namespace, if this object made one; the veth pair goes with it."""
        if self.network is not None:
            ours = f"ugro{self.network}"
            # The kernel takes a namespace down in its own time; our end must go before the number is free.
            if Path("/sys/class/net", ours).exists():
                _run("ip", "link", "del", ours)
            _run("ip", "netns", "del", self.namespace)
            self.network = None

    def _iptables(self, *arguments: str) -> None:
        _run("ip", "netns", "exec", self.namespace, command("iptables"), "-w", *arguments)


class NetnsNode(SshdNode):
    def __init__(self, name: str, number: int, directory: Path, options: NodeOptions) -> None:
        super().__init__(name, number, directory, options)
        self.cable = Cable()

    def cut(self, way: Way = Way.BOTH) -> None:
        """From now on packets vanish, as on a cut cable: nothing is refused, nothing is answered."""
        self.heal()
        self.cable.cut(way)

    def heal(self) -> None:
        self.cable.heal()

    def release(self) -> None:
        super().release()
        self.cable.remove()

    def _claim_address(self) -> tuple[str, int]:
        if self.cable.network is None:
            self.cable.lay()
        return self.cable.node_address, 22

    def _launch_prefix(self) -> Sequence[str]:
        return (command("ip"), "netns", "exec", self.cable.namespace)


class NetnsFarm(Farm[NetnsNode]):
    """As ``SshdFarm``, with nodes that can be cut off."""

    node_type = NetnsNode


def _claim_network() -> int:
    for network in _NETWORKS:
        # Making the namespace is the claim: of two who try at once, the second gets an error.
        try:
            _run("ip", "netns", "add", f"ugro-rig-{network}")
        except subprocess.CalledProcessError as error:
            if "File exists" not in error.stderr:
                raise
        else:
            return network
    raise RuntimeError("all networks of the rig are taken; see: ip netns list")


def _run(name: str, *arguments: str) -> None:
    argv = [command(name), *arguments]
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
