"""The section ``discovery`` of the cluster file: where machines are found that it does not list."""

from __future__ import annotations

import re

from ugro.kernel.config.kinds import Bool, Choice, Duration, ListOf, Text, Whole, is_encodable
from ugro.kernel.config.section import LABEL, LOCAL_PATH, USER, Nested, Section, is_line, key, section
from ugro.node import foreign


def _is_pattern(text: str) -> bool:
    return len(text) <= 255 and re.fullmatch(r"[A-Za-z0-9._*?\[\]!-]+", text) is not None


def _is_service_type(text: str) -> bool:
    return re.fullmatch(r"_[A-Za-z0-9-]{1,15}\._(tcp|udp)", text) is not None


def _is_hosts(text: str) -> bool:
    server = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
    servers = [server.fullmatch(one) for one in text.split(",")]
    return is_line(text) and all(one is not None and _is_port(one[1]) for one in servers)


def _is_znode(text: str) -> bool:
    parts = text.split("/")[1:]
    return is_line(text) and text.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _is_url(text: str) -> bool:
    """Without a password: messages and `ugro allow` show the address."""
    found = re.fullmatch(r"https?://(?:[^/\s@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?(/[^\s@?#]*)?", text, re.ASCII)
    return is_line(text) and found is not None and _is_port(found[1])


def _is_port(digits: str | None) -> bool:
    return digits is None or 0 < int(digits) <= 65535


def _is_variable(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", text) is not None


_PATTERN = Text("a pattern of names such as gpu*", _is_pattern)
_WORD = Text("a command's words as texts", lambda text: bool(text) and len(text) <= 4096 and is_encodable(text))


class OneMap(Nested):
    """A map that may be missing; JSON in an environment variable."""

    def __init__(self, section: type[Section], expected: str) -> None:
        super().__init__(section)
        self.expected = expected

    def from_text(self, text: str) -> object:
        try:
            return foreign.parsed(text)
        except ValueError:
            return text


class _Command(ListOf):
    def parse(self, value: object) -> tuple[str, ...]:
        words = super().parse(value)
        if words and words[0].startswith("-"):
            raise self.refuse(words[0], hint="a command begins with its program")
        return words


COMMAND = _Command("a command as a list of words", _WORD, may_repeat=True)
VARIABLE = Text("the name of an environment variable", _is_variable)


@section
class ZooKeeper(Section):
    """A folder of ZooKeeper in which each machine has an entry."""

    noun = "zookeeper"

    hosts: str = key(
        "127.0.0.1:2181",
        Text("addresses with ports such as zk1:2181,zk2:2181", _is_hosts),
        "The servers, separated by commas.",
        example="zk1:2181,zk2:2181",
    )
    path: str = key(
        "/ugro/nodes",
        Text("a path such as /ugro/nodes", _is_znode),
        "The folder. The name of each child is a node's name; its content is nothing, or a JSON map with `host`, "
        "`port`, `user` and `labels`.",
        example="/gpu/nodes",
    )


@section
class Consul(Section):
    """A service in Consul of which each healthy instance is a machine."""

    noun = "consul"

    url: str = key(
        "http://127.0.0.1:8500",
        Text("an address such as http://127.0.0.1:8500, without a password", _is_url),
        "The address of Consul's HTTP API; https uses TLS and checks the certificate.",
        example="https://consul.lan:8501",
    )
    service: str = key("ssh", LABEL, "The service, whose port is that of the ssh server.", example="gpu-node")
    tag: str | None = key(None, LABEL, "Only instances with this tag.", example="gpu")
    token_env: str | None = key(
        None,
        VARIABLE,
        "The environment variable, of the agent, that holds the access token.",
        example="CONSUL_HTTP_TOKEN",
    )
    token_file: str | None = key(
        None, LOCAL_PATH, "A file that holds the access token.", example="~/.ugro/consul_token"
    )


@section
class DiscoverySection(Section):
    """Where to find machines that are not listed in `nodes`."""

    ssh_config: str | None = key(
        None, _PATTERN, "Hosts of your ssh configuration whose names match this pattern.", example="gpu*"
    )
    mdns: str | None = key(
        None,
        Text("a service type such as _ssh._tcp", _is_service_type),
        "Machines that announce this service in the local network by mDNS. Needs `pip install ugro[mdns]`.",
        example="_ssh._tcp",
    )
    zookeeper: ZooKeeper | None = key(
        None,
        OneMap(ZooKeeper, "a map of hosts and path"),
        "Machines that are registered in ZooKeeper, see below. Needs `pip install ugro[zookeeper]`.",
        example={"hosts": "zk1:2181", "path": "/ugro/nodes"},
    )
    consul: Consul | None = key(
        None,
        OneMap(Consul, "a map of url, service and more"),
        "Machines that are registered in Consul, see below.",
        example={"url": "http://127.0.0.1:8500", "service": "ssh", "tag": "gpu"},
    )
    command: tuple[str, ...] = key(
        (),
        COMMAND,
        "A program on this machine that prints machines as JSON. It runs in the folder of the cluster file.",
        example=["./my-inventory", "--list"],
    )
    join: str = key(
        "ask",
        Choice(("ask", "auto")),
        "What becomes of machines that are found: `ugro node discover --add` adds them (ask), or those whose host key "
        "you have accepted become nodes by themselves (auto).",
        example="auto",
    )
    match: tuple[str, ...] = key(
        (),
        ListOf("a list of patterns such as [gpu*]", _PATTERN),
        "Only machines whose names match one of these patterns; an empty list matches all.",
        example=["gpu*"],
    )
    user: str | None = key(
        None,
        USER,
        "The user name to log in with on machines that are found, except those of `ssh_config`; without it, ssh "
        "decides.",
        example="ann",
    )
    accept_users: bool = key(
        False,
        Bool(),
        "Whether ZooKeeper's entries may name the user to log in with. The output of `command` always may; mDNS and "
        "Consul never.",
    )
    most: int = key(64, Whole(1, 1000), "How many nodes may join by themselves.")
    leave_after: float = key(
        60.0,
        Duration(may_be_zero=True),
        "How long a node must be missing from its source before it is drained, and removed when it is idle.",
    )
    interval: float = key(30.0, Duration(), "Time between two looks at the ssh configuration, or runs of `command`.")
    timeout: float = key(10.0, Duration(), "Longest wait for a source's answer.")

    @property
    def adds_nodes(self) -> bool:
        """Whether nodes may join by themselves."""
        return self.join == "auto" and self.has_sources

    @property
    def has_sources(self) -> bool:
        return any((self.ssh_config, self.mdns, self.zookeeper, self.consul, self.command))
