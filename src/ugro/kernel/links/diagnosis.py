"""Explains why a connection failed, from ssh's exit code and stderr and from the first stage's report.

Pure: text in, an ``Unreachable`` with a stable cause and a hint out.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address

from ugro.kernel.access.model import node_of
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.rules import Unknown
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import Unreachable
from ugro.kernel.support.quantities import format_duration
from ugro.node import foreign
from ugro.node.messages import Connections, Reached, Target

DENIED = "login-denied"
NAME_NOT_FOUND = "name-not-found"
# Retrying soon does not help, and too many failed logins get addresses banned.
LASTING_CAUSES = frozenset(
    {
        NAME_NOT_FOUND,
        "host-key-unknown",
        "host-key-changed",
        DENIED,
        "python-missing",
        "python-old",
        "home-not-writable",
        "unsafe-folder",
        "disk-full",
        "ssh-missing",
        "transport-missing",
        "ssh-config",
        "protocol",
    }
)


# ssh uses this code for its own failures; any other is the exit code of the command on the node.
_SSH_FAILED = 255
# Printed by ssh (before version 8 with another beginning) if the peer hangs up before the protocol starts. After
# another error message, it is about a jump host's ssh that failed and ended.
_HUNG_UP = "_exchange_identification"
_MAX_MESSAGE = 400
_MAX_PATH = 250
_TRY = "try: ssh {ssh}"


@dataclass(frozen=True, slots=True)
class _Sign:
    text: str  # as printed by OpenSSH, in lower case
    cause: str
    message: str
    hint: str


_SIGNS = (
    # Before the errors that a jump host may have met on its way to the node.
    _Sign("administratively prohibited", "jump-failed", "the jump host refuses to forward the connection", (
        "try: ssh {ssh}   (AllowTcpForwarding on the jump host)"
    )),
    *(
        _Sign(f"open failed: connect failed: {text}", NAME_NOT_FOUND, "the jump host does not find its name", _TRY)
        for text in ("name or service not known", "temporary failure in name resolution")
    ),
    _Sign("open failed: connect failed", "jump-failed", "the jump host cannot reach it", _TRY),
    _Sign(
        "remote host identification has changed",
        "host-key-changed",
        "its host key has changed",
        "someone may be in between; if the machine was reinstalled: ugro node trust {name} --replace",
    ),
    _Sign(
        "host key verification failed",
        "host-key-unknown",
        "its host key is not known",
        "compare the fingerprint and accept it: ugro node trust {name}   (or: ssh {ssh} true)",
    ),
    _Sign(
        "could not resolve hostname",
        "name-not-found",
        "no such host name",
        "give host: or ip: for {name} in cluster.yaml, or a Host block in ~/.ssh/config",
    ),
    _Sign("too many authentication failures", "login-denied", "login refused: too many keys were tried", _LOGIN := (
        "try: ssh {ssh}   (set ssh.key_file, or IdentityFile and IdentitiesOnly in ~/.ssh/config)"
    )),
    _Sign("permission denied", "login-denied", "login refused", _LOGIN),
    _Sign("connection refused", "refused", "connection refused: no SSH server at that address and port", (
        "is sshd running there, and the port right? try: ssh {ssh}"
    )),
    _Sign("no route to host", "no-route", "no route to host", "is it switched on and in this network? try: ssh {ssh}"),
    _Sign("network is unreachable", "no-route", "network is unreachable", "check this machine's network"),
    _Sign("timed out", "timed-out", "connecting timed out", (
        "is it switched on and in this network? try: ssh {ssh}   (ssh.connect_timeout sets the limit)"
    )),
    _Sign("timeout, server", "timed-out", "it stopped answering", _TRY),
    _Sign("bad configuration option", "ssh-config", "ssh cannot read its configuration", "try: ssh -G {ssh}"),
    _Sign("terminating, ", "ssh-config", "ssh cannot read its configuration", "try: ssh -G {ssh}"),
    _Sign(_HUNG_UP, "closed", "the SSH server closed the connection at once", (
        "it may be overloaded (MaxStartups) or have banned this address; try: ssh {ssh}"
    )),
    _Sign("connection closed by", "closed", "the SSH server closed the connection", _TRY),
    _Sign("connection reset", "closed", "the connection was reset", _TRY),
    _Sign("no such identity", "login-denied", "the key file does not exist", _LOGIN),
)


def from_ssh(spec: NodeSpec, exit_code: int | None, stderr: str, stdout_end: str = "") -> Unreachable:
    """For a connection that ended before the node program started; ``stdout_end`` is the last line it printed."""
    if exit_code in (_SSH_FAILED, None):
        folded = " ".join(stderr.lower().split())
        for sign in _SIGNS:
            if sign.text in folded:
                return _from_sign(spec, sign, is_on_the_way=folded.find(sign.text) < folded.find(_HUNG_UP))
    if exit_code == 127:
        return python_missing(spec)
    if exit_code == 126:
        return _python_unusable(spec, stderr)
    # A login that is not meant for commands prints that on stdout, and nothing else does.
    last = _last_line(stderr) or _last_line(stdout_end)
    return _unreachable(
        spec,
        "unknown",
        f"the connection ended ({_exit_words(exit_code)})" + (f": {last}" if last else ""),
        _TRY,
    )


def _from_sign(spec: NodeSpec, sign: _Sign, *, is_on_the_way: bool) -> Unreachable:
    if is_on_the_way and sign.cause not in ("jump-failed", "closed") and not sign.text.startswith("open failed"):
        return _unreachable(spec, sign.cause, f"on the way to it (its jump host or proxy): {sign.message}", _TRY)
    return _unreachable(spec, sign.cause, sign.message, sign.hint)


def from_stage(spec: NodeSpec, said: str) -> Unreachable:
    """For an error that the first stage on the node reported instead of starting the program."""
    word, _, rest = said.partition(" ")
    if word == "no-python":
        return python_missing(spec)
    if word == "old-python":
        version, _, path = rest.partition(" ")
        return _unreachable(
            spec,
            "python-old",
            f"its Python is {version} ({path}); 3.9 or newer is needed",
            "install a newer python3 there, or name one: python: /path/to/python3 under {name} in cluster.yaml",
        )
    if word == "os-error":
        number, _, root = rest.partition(" ")
        return _from_errno(spec, int(number) if number.isdigit() else 0, root)
    if word == "unsafe" and (found := _unsafe_folder(rest)) is not None:
        return _from_unsafe(spec, found)
    return _unreachable(spec, "protocol", f"unexpected message from the node: {said[:80]!r}", "try again")


def python_missing(spec: NodeSpec) -> Unreachable:
    if spec.python:
        return _unreachable(
            spec, "python-missing", f"{spec.python} not found", "correct python: under {name} in cluster.yaml"
        )
    return _unreachable(
        spec,
        "python-missing",
        "python3 not found",
        "install python3 (3.9 or newer) there, or name one: python: /path/to/python3 under {name} in cluster.yaml",
    )


def _python_unusable(spec: NodeSpec, stderr: str) -> Unreachable:
    last = _last_line(stderr)
    return _unreachable(
        spec,
        "python-missing",
        f"{spec.python or 'its python3'} cannot be run" + (f": {last}" if last else ""),
        "name another: python: /path/to/python3 under {name} in cluster.yaml",
    )


def still_connecting(spec: NodeSpec, limit_s: float) -> Unreachable:
    return _unreachable(spec, "timed-out", f"still connecting after {limit_s:g} s", "try again in a moment")


def connect_timed_out(spec: NodeSpec, limit_s: float) -> Unreachable:
    return _unreachable(
        spec,
        "timed-out",
        f"no answer within {limit_s:g} s",
        "is it switched on and not overloaded? try: ssh {ssh}   (ssh.connect_timeout sets the limit)",
    )


def broke_protocol(spec: NodeSpec, detail: str) -> Unreachable:
    hint = "check what its shell's rc files print or start"
    return _unreachable(spec, "protocol", f"it does not speak UGRO's protocol: {detail}", hint)


def stopped_answering(spec: NodeSpec, silent_s: float) -> Unreachable:
    message = f"stopped answering {silent_s:.0f} s ago"
    return _unreachable(spec, "hung", message, "reconnecting automatically; try: ssh {ssh}")


def closed(spec: NodeSpec, why: str) -> Unreachable:
    return _unreachable(spec, "closed", f"its link was closed: {why}", "try again; see: ugro agent logs")


def link_broke(spec: NodeSpec, stderr: str) -> Unreachable:
    last = _last_line(stderr)
    return _unreachable(
        spec, "link-lost", "the link broke" + (f": {last}" if last else ""), "reconnecting automatically"
    )


def cannot_start(spec: NodeSpec, program: str, error: OSError) -> Unreachable:
    """For a transport command that could not be started on this machine."""
    if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return _unreachable(
            spec,
            "out-of-resources",
            f"{program} cannot be started on this machine: {error.strerror}",
            "it may be out of memory, processes or open files: see ulimit -a",
        )
    if program == "ssh":
        hint = "install OpenSSH's client: apt-get install openssh-client"
        return _unreachable(spec, "ssh-missing", "ssh: no such program on this machine", hint)
    return _unreachable(
        spec, "transport-missing", f"{program}: {error.strerror}", "correct transport: under {name} in cluster.yaml"
    )


def _from_errno(spec: NodeSpec, number: int, root: str) -> Unreachable:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _unreachable(
            spec, "disk-full", f"its disk is full: nothing can be written below {root}", "free some space there"
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _unreachable(
            spec,
            "home-not-writable",
            f"{root} cannot be written ({os.strerror(number)})",
            "make it writable, or set remote_root to a folder that is",
        )
    return _unreachable(
        spec, "home-not-writable", f"{root}: {os.strerror(number)}", "set remote_root to a folder that can be created"
    )


@dataclass(frozen=True, slots=True)
class UnsafeFolder:
    """What others could change below or above ``remote_root``; see ``node/home.py``."""

    path: str
    fault: str
    owner: str
    is_own: bool
    mode: str


def _unsafe_folder(said: str) -> UnsafeFolder | None:
    try:
        return decode(UnsafeFolder, foreign.parsed(said))
    except ValueError:  # a DecodeError, too
        return None


def _from_unsafe(spec: NodeSpec, found: UnsafeFolder) -> Unreachable:
    path = found.path[:_MAX_PATH]
    quoted = shlex.quote(path)
    own, is_inside, _ = f"{path}/".partition("/.ugro/")
    recursive = f"-R go-w {shlex.quote(own)}/.ugro" if is_inside else f"go-w {quoted}"
    chmod, elsewhere = f"chmod {recursive}", "set remote_root to a folder that only you can write to"
    if found.fault == "owner":
        what, remedy = f"{path} belongs to {found.owner}, who could replace what runs there as you", ""
    elif found.fault == "link":
        what, remedy = f"{path} is a link, where UGRO keeps files of its own", f"remove it (rm {quoted}), or "
    elif found.fault == "acl":
        what = f"{path} has an access list (mode {found.mode}) by which others may write: they could replace what runs"
        remedy = f"look at getfacl {quoted} and remove it (setfacl -b), or "
    else:
        what = f"others can write to {path} (mode {found.mode}): they could replace what runs there as you"
        remedy = f"on that node: {chmod}, or " if found.is_own else f"ask {found.owner} for: {chmod}, or "
    return _unreachable(spec, "unsafe-folder", what, (remedy + elsewhere).replace("{", "{{").replace("}", "}}"))


def _unreachable(spec: NodeSpec, cause: str, message: str, hint: str) -> Unreachable:
    target = f"-p {spec.port} {spec.target}" if spec.port else spec.target
    if spec.transport != "ssh" and "{ssh}" in hint:
        hint = "run its transport command by hand"
    return Unreachable(
        # Part of it may come from another machine: one line of bounded length.
        " ".join(message[:_MAX_MESSAGE].split()),
        subject=spec.name,
        cause=cause,
        hint=hint.format(name=node_of(spec.name), ssh=target),
    )


def _exit_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "without an exit code"
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


# --- whether nodes reach each other -----------------------------------------------------------------------------------
# Whether nodes reach each other: who connects to whom, at which addresses, and what the outcome means.
#
# ``ugro doctor`` judges every pair; a launch also needs one address of the first node that all others reach, and the
# network interface of each node.


LOOPBACK = "127.0.0.1"
# With more nodes, all pairs would be more connections than they are worth.
MAX_NODES_FOR_ALL_PAIRS = 12
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A node as other nodes may reach it."""

    node: str
    boot_id: str
    addresses: tuple[str, ...] = ()  # its own, IPv4, without loopback
    host: str = ""  # what the user's ssh dials
    wanted: str | None = None  # the address that the user wants ranks to meet at, if it is this node's


@dataclass(frozen=True, slots=True)
class Meeting:
    address: str
    interfaces: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Apart:
    text: str
    hint: str
    node: str  # the node to leave out, if that were possible


def pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Who connects to whom: every node to every other; of many, all to the first and each to the next one."""
    if len(nodes) <= MAX_NODES_FOR_ALL_PAIRS:
        return [(one, other) for one in nodes for other in nodes if one != other]
    ring = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return list(dict.fromkeys([*((node, nodes[0]) for node in nodes[1:]), *ring]))


def addresses_to_try(connector: Endpoint, listener: Endpoint) -> list[str]:
    """Best first. Loopback only leads to another node if both are on the same machine."""
    is_same_machine = listener.boot_id == connector.boot_id != ""
    candidates = [
        *([listener.wanted] if listener.wanted else []),
        # Containers on one machine have networks of their own; there, loopback is refused at once.
        *([LOOPBACK] if is_same_machine else []),
        *([listener.host] if _is_far(listener.host) else []),
        *listener.addresses,
    ]
    return list(dict.fromkeys(candidates))


def asked_for(found: Connections, targets: Iterable[Target]) -> Connections:
    """Without what nobody asked for: nodes listen and meet at these addresses, and a node may claim any."""
    asked = {(one.node, address, port) for one in targets for address in one.addresses for port in one.ports}
    reached = tuple(one for one in found.reached if (one.node, one.address, one.port) in asked)
    return Connections(reached, found.missed)


# --- ugro doctor ---------------------------------------------------------------------------------------------------


def judge_pairs(endpoints: Sequence[Endpoint], found: Mapping[str, Connections | Unknown]) -> list[Finding]:
    """One finding for each pair that does not work, or one that all do."""
    tried = pairs([endpoint.node for endpoint in endpoints])
    problems = list(_problems(tried, endpoints, found))
    if problems or not tried:
        return problems
    slowest_s = max(_connect_s(found[one], other) or 0.0 for one, other in tried)
    which = " that were tried" if len(tried) < len(endpoints) * (len(endpoints) - 1) else ""
    text = f"all {len(tried)} pairs{which} reach each other, connecting in at most {format_duration(slowest_s)}"
    return [Finding("cluster", "network", Grade.OK, text)]


def _problems(
    tried: Sequence[tuple[str, str]], endpoints: Sequence[Endpoint], found: Mapping[str, Connections | Unknown]
) -> Iterator[Finding]:
    for one, other in tried:
        pair, outcome = f"{one} → {other}", found[one]
        if _connect_s(outcome, other) is not None:
            continue
        unknown = next((end for end in (outcome, found[other]) if isinstance(end, Unknown)), None)
        if unknown is not None:
            yield Finding(pair, "network", Grade.WARNING, f"could not be tried: {unknown.text}", unknown.hint)
        elif isinstance(outcome, Connections):
            text = _cannot_connect(outcome, one, other)
            yield Finding(pair, "network", Grade.FAILED, text, _firewall(endpoints, one, other))


def _connect_s(outcome: Connections | Unknown, node: str) -> float | None:
    if isinstance(outcome, Unknown):
        return None
    return min((reached.connect_s for reached in outcome.reached if reached.node == node), default=None)


# --- a launch ------------------------------------------------------------------------------------------------------


def meet(endpoints: Sequence[Endpoint], port: int, found: Mapping[str, Connections]) -> Meeting | Apart:
    """``port`` is where the first node's rank will listen. Chooses its first address that all others reached."""
    first, *others = endpoints
    arrivals = {other.node: _arrivals(found[other.node], first.node, port) for other in others}
    if lonely := [other.node for other in others if not arrivals[other.node]]:
        return _apart([(node, first.node) for node in lonely], endpoints, found, port)
    common = [address for address in arrivals[others[0].node] if all(address in seen for seen in arrivals.values())]
    if not common:
        reached = "; ".join(f"{node} reaches it at {', '.join(seen)}" for node, seen in arrivals.items())
        hint = "connect all nodes to one network, or set cluster.master_ip to an address that all reach"
        return Apart(f"no address of {first.node} can be reached by all: {reached}", hint, first.node)
    interfaces = {other.node: arrivals[other.node][common[0]].interface for other in others}
    interfaces[first.node] = arrivals[others[0].node][common[0]].peer_interface
    broken = [
        (one, other)
        for one, other in pairs([endpoint.node for endpoint in endpoints])
        if not _is_reached(found[one], other, interfaces[other], port)
    ]
    if broken:
        return _apart(broken, endpoints, found, port)
    named = [(endpoint.node, interfaces[endpoint.node]) for endpoint in endpoints if interfaces[endpoint.node]]
    return Meeting(common[0], tuple(named))


def _arrivals(connections: Connections, node: str, port: int) -> dict[str, Reached]:
    """By address, in the order in which they were tried."""
    return {reached.address: reached for reached in connections.reached if (reached.node, reached.port) == (node, port)}


def _is_reached(connections: Connections, node: str, interface: str, port: int) -> bool:
    """At a port that is not reserved: ranks listen for each other at such ports once they have met."""
    return any(
        reached.node == node and reached.port != port and interface in ("", reached.peer_interface)
        for reached in connections.reached
    )


def _apart(
    broken: Sequence[tuple[str, str]], endpoints: Sequence[Endpoint], found: Mapping[str, Connections], port: int
) -> Apart:
    texts = [_cannot_connect(found[one], one, other, port) for one, other in broken[:_MAX_NAMED]]
    if len(broken) > _MAX_NAMED:
        texts.append(f"{len(broken) - _MAX_NAMED} more pairs cannot either")
    ends = [node for pair in broken for node in pair]
    hint = f"{_firewall(endpoints, *broken[0])}; check all pairs: ugro doctor"
    return Apart("; ".join(texts), hint, max(ends, key=ends.count))


# --- texts for both ------------------------------------------------------------------------------------------------


def _cannot_connect(connections: Connections, one: str, other: str, port: int | None = None) -> str:
    text = f"{one} cannot connect to {other}"
    missed = [missed for missed in connections.missed if missed.node == other]
    if {missed.port for missed in missed} == {port}:
        text += f" at port {port}"
    # That loopback does not lead to another machine is no news, if any other address was tried.
    far = [one for one in missed if one.address != LOOPBACK] or missed
    tried = list(dict.fromkeys(f"{one.address}: {one.error}" for one in far))
    return f"{text} ({'; '.join(tried[:_MAX_NAMED])})" if tried else f"{text}: it has no address to try"


def _firewall(endpoints: Sequence[Endpoint], one: str, other: str) -> str:
    own = (address for endpoint in endpoints if endpoint.node == one for address in endpoint.addresses)
    return f"if a firewall blocks {one} on {other}: sudo ufw allow from {next(own, 'ADDRESS')}"


def _is_far(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return isinstance(address, IPv4Address) and not address.is_loopback
