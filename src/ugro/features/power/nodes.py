"""What is seen of nodes that may sleep: their links, whether they are silent, and how long nothing was done there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ugro.features.power.config import PowerSection
from ugro.features.power.model import SSH, WOL, Act, Means, OwnerRule, PowerRule, Then, When
from ugro.features.power.node import wake
from ugro.features.power.node.wake import EVERYBODY, Interface, send
from ugro.features.power.owners import Owners
from ugro.features.power.rules import Busy, Use, busy_with
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.scheduling.scheduler import NodeWishes
from ugro.kernel.links.calls import asked
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Node
from ugro.kernel.support import commands as command
from ugro.kernel.support import commands as signed_post
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import boot_clock_s, boot_id
from ugro.node.process.execute import execute

# --- power ------------------------------------------------------------------------------------------------------------
# Puts nodes to sleep over their links, wakes them by packets, and asks each for the interface that wakes it.


log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_MOST_OUTPUT = 4096
_MOST_NEIGHBOURS = 2
_NAME = re.compile(r"[\w.:@-]{0,15}")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")


async def interface(link: Link) -> Interface:
    """Empty if it is not known."""
    try:
        return _checked(decode(Interface, await link.call(*asked(wake.interface), timeout_s=_ANSWER_S)))
    except (TimedOut, RemoteFailure, DecodeError) as error:
        log.warning("its network interface is not known: %s", error, extra={"node": link.spec.name})
        return Interface()


def _checked(found: Interface) -> Interface:
    """They become words of commands on this machine, and of those that people are told to run."""
    if found.mac and not _MAC.fullmatch(found.mac):
        raise DecodeError(f"no MAC address: {found.mac!r:.40}")
    if not _NAME.fullmatch(found.name):
        raise DecodeError(f"no name of an interface: {found.name!r:.40}")
    return found


async def run_on_node(link: Link, argv: Sequence[str], timeout_s: float) -> None:
    """Raises RemoteFailure if it fails, TimedOut, and Unreachable when the node is gone before it has answered."""
    name = link.spec.name
    marker = f"{name}.{secrets.token_hex(6)}"
    stream = link.stream(*asked(execute, argv=list(argv), marker=marker, grace_s=1.0))
    said = b""
    try:
        async with asyncio.timeout(timeout_s):
            async for _, payload in stream:
                said = (said + payload)[-_MOST_OUTPUT:]
            code = (await stream.result()).get("code")
    except TimeoutError as error:
        raise TimedOut(f"{argv[0]} did not end within {timeout_s:g} s", subject=name) from error
    finally:
        stream.cancel()
    if code != 0:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        raise RemoteFailure(f"{argv[0]} ended with exit code {code}: {lines[-1][:200] if lines else ''}", subject=name)


async def wake_by_packet(mac: str, broadcast: str, neighbours: Iterable[Link]) -> int:
    """From this machine, and from nodes that are awake in its network. Returns how many were sent."""
    sent = 0
    for address in dict.fromkeys((broadcast or EVERYBODY, EVERYBODY)):
        with contextlib.suppress(OSError):  # this machine may have no way there
            send(mac, address)
            sent += 1
    for link in list(neighbours)[:_MOST_NEIGHBOURS]:
        with contextlib.suppress(UgroError):
            await link.call(*asked(wake.wake, mac=mac, broadcast=broadcast), timeout_s=_ANSWER_S)
            sent += 1
    return sent


# --- acting -----------------------------------------------------------------------------------------------------------
# Suspends and wakes one node, by the means that its rule names. What was decided is recorded before this is called.


_PACKET_EVERY_S = 10.0
_WEBHOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Subject:
    node: Node
    rule: PowerRule
    interface: Interface | None
    neighbours: Callable[[], Iterable[Link]]  # links of nodes that are awake in its network
    folder: Path  # that of the cluster file

    @property
    def mac(self) -> str:
        return self.rule.mac or (self.interface.mac if self.interface else "")

    @property
    def values(self) -> dict[str, str]:
        spec = self.node.spec
        return {"node": spec.name, "host": spec.host or spec.name, "mac": self.mac}


async def perform(act: Act, subject: Subject) -> None:
    """Raises UgroError with what went wrong. Waking by packets goes on until it is cancelled."""
    means = subject.rule.suspend if act is Act.SUSPEND else subject.rule.resume
    if isinstance(means, tuple):
        await _by_command(act, means, subject)
    elif means == SSH:
        await _over_link(subject)
    elif means == WOL:
        await _by_packets(subject)
    else:
        await _by_webhook(act, subject)


async def _over_link(subject: Subject) -> None:
    link = subject.node.link
    if link is None:
        return  # it is gone already
    try:
        await run_on_node(link, _filled(subject.rule.on_node, subject), subject.rule.suspend_timeout_s)
    except Unreachable:
        log.info("it was gone before it had answered", extra={"node": subject.node.spec.name})


async def _by_command(act: Act, argv: tuple[str, ...], subject: Subject) -> None:
    name, rule = subject.node.spec.name, subject.rule
    limit_s = rule.suspend_timeout_s if act is Act.SUSPEND else rule.resume_timeout_s
    env = {f"UGRO_{key.upper()}": value for key, value in subject.values.items()} | {"UGRO_POWER": act.value}
    ended = await command.run(_filled(argv, subject), env=env, cwd=subject.folder, timeout_s=limit_s)
    for line in ended.said.splitlines()[-20:]:
        log.info("%s: %s", argv[0], line[:500], extra={"node": name})
    if ended.complaint is not None:
        raise RemoteFailure(f"{argv[0]}: {ended.complaint}", subject=name)


async def _by_packets(subject: Subject) -> None:
    name = subject.node.spec.name
    if not subject.mac:
        raise RemoteFailure("its MAC address is not known", subject=name, hint="give power.mac for it")
    broadcast = subject.interface.broadcast if subject.interface else ""
    while True:
        sent = await wake_by_packet(subject.mac, broadcast, subject.neighbours())
        log.info("%d packets were sent to wake it (%s)", sent, subject.mac, extra={"node": name})
        await asyncio.sleep(_PACKET_EVERY_S)


async def _by_webhook(act: Act, subject: Subject) -> None:
    rule, name = subject.rule, subject.node.spec.name
    if rule.webhook is None:
        raise RemoteFailure("power.webhook is not given", subject=name)
    key = signed_post.key_of("power", rule.secret_file, None)
    body = json.dumps({"act": act.value, **subject.values}).encode()
    await signed_post.send("power", rule.webhook, body, key, _WEBHOOK_S, hook="power")


def _filled(argv: Means, subject: Subject) -> list[str]:
    words = list(argv)
    for key, value in subject.values.items():
        words = [word.replace(f"{{{key}}}", value) for word in words]
    return words


async def performed(act: Act, subject: Subject, complain: Callable[[str], None]) -> None:
    """The same, where nobody waits for it."""
    try:
        await perform(act, subject)
    except UgroError as error:
        log.warning("cannot %s it: %s", act.value, error.message, extra={"node": subject.node.spec.name})
        complain(error.message)


# --- looking ----------------------------------------------------------------------------------------------------------


# How a machine that sleeps fails to answer. One that refuses a connection is awake.
_SILENT = frozenset({"timed-out", "no-route", "hung"})
_NO_WISHES = NodeWishes()
_QUIET_S = 600.0


@dataclass(slots=True)
class Seen:
    link: Link | None = None
    linked_s: float | None = None
    silent_s: float | None = None
    uses: Mapping[str, int] = field(default_factory=dict)  # of its link and those of its logins, so far
    busy_s: float = field(default_factory=boot_clock_s)  # when it was last busy

    @property
    def idle_s(self) -> float:
        return boot_clock_s() - self.busy_s

    def was_linked_before(self, since_s: float) -> bool:
        return self.linked_s is not None and self.linked_s <= since_s


class NodeLooks:
    def __init__(
        self, cluster: Cluster, engine: Engine, scheduler_input: SchedulerInput, is_heard: Callable[[str], bool]
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._input = scheduler_input
        self._owners = Owners(cluster, None, _presence)
        self._seen: dict[str, Seen] = {}
        self._is_heard = is_heard
        self._uncollected: set[str] = set()
        self._holders: dict[str, tuple[int, ...]] = {}
        self._logins: dict[str, list[Node]] = {}

    async def close(self) -> None:
        await self._owners.close()

    def keep_up(self, nodes: Sequence[Node], uncollected: set[str]) -> None:
        """``uncollected``: the nodes that have files of jobs which are not here yet."""
        self._uncollected = uncollected
        self.note_jobs()
        self._owners.keep_up()
        members = {node.spec.name for node in nodes}
        self._seen = {name: seen for name, seen in self._seen.items() if name in members}
        for node in nodes:
            self._note(node)

    def of(self, node: Node) -> Seen:
        return self._seen.setdefault(node.spec.name, Seen())

    def changed(self, name: str) -> None:
        """Its state has changed: it was not idle until now."""
        if name in self._seen:
            self._seen[name].busy_s = boot_clock_s()

    def note_jobs(self) -> None:
        """Which jobs have devices where, and through which logins nodes are reached."""
        self._logins = {}
        for login in self._cluster.inventory.logins:
            self._logins.setdefault(node_of(login.spec.name), []).append(login)
        found: dict[str, tuple[int, ...]] = {}
        for job in self._engine.live.holding():
            for name in job.placement.node_names if job.placement is not None else ():
                found[name] = (*found.get(name, ()), job.id)
        self._holders = found

    def holders(self, name: str) -> tuple[int, ...]:
        return self._holders.get(name, ())

    def may_sleep(self, node: Node) -> bool:
        """Whether nothing but the queue could keep it awake."""
        rule = node.spec.power
        if rule is None or rule.suspend_after_s is None or node.link is None:
            return False
        return self.of(node).idle_s >= rule.suspend_after_s

    def busy(self, node: Node, wishes: NodeWishes) -> Busy | None:
        rule, name, link = node.spec.power, node.spec.name, node.link
        if rule is None or link is None:
            return None
        seen = self._input.reports.of(node)
        machine = node.machine
        use = Use(
            facts=seen.report.facts if seen.report is not None else None,
            cores=machine.cores if machine else 1,
            owner=self._owners.report(name),
            jobs=self.holders(name),
            is_uncollected=name in self._uncollected,
            held=self._input.holds.reason(name),
            calls=tuple(call for one in self._links(node) for call in one.work),
            drained=seen.report.drained if seen.report is not None else None,
            is_needed=name in wishes.needed,
            is_this_machine=machine is not None and machine.boot_id == boot_id(),
            is_excluded=rule.suspend_after_s is None and name in self._cluster.config.section(PowerSection).exclude,
        )
        return busy_with(use, rule)

    def _links(self, node: Node) -> list[Link]:
        """To the machine, in whatever account."""
        return [one.link for one in (node, *self._logins.get(node.spec.name, ())) if one.link is not None]

    def _note(self, node: Node) -> None:
        seen, now_s = self.of(node), boot_clock_s()
        if node.link is not seen.link:
            seen.link, seen.linked_s = node.link, None
            seen.uses = {}
            seen.busy_s = now_s
        if seen.linked_s is None and node.link is not None and self._is_heard(node.spec.name):
            seen.linked_s = now_s
        is_silent = node.link is None and node.error is not None and node.error.cause in _SILENT
        seen.silent_s = (seen.silent_s if seen.silent_s is not None else now_s) if is_silent else None
        uses = {link.spec.name: link.uses for link in self._links(node)}
        # A link that is gone was not used, nor was one that is new and has done nothing.
        is_used = any(count and count != seen.uses.get(name) for name, count in uses.items())
        if is_used or self.busy(node, _NO_WISHES) is not None:
            seen.busy_s = now_s
        seen.uses = uses


def _presence(spec: NodeSpec) -> OwnerRule | None:
    """Somebody at a node keeps it awake for as long as it would have to be idle."""
    if spec.power is None:
        return None
    return OwnerRule(When.ACTIVE, Then.DRAIN, spec.power.suspend_after_s or _QUIET_S)
