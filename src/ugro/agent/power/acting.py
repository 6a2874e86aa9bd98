"""Suspends and wakes one node, by the means that its rule names. What was decided is recorded before this is called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ugro.agent.support import command, signed_post
from ugro.core.errors import RemoteFailure, UgroError, Unreachable
from ugro.core.power import SSH, WOL, Act, Means, PowerRule
from ugro.nodes import power
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.remote.messages import Interface

log = logging.getLogger(__name__)

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
        await power.run_on_node(link, _filled(subject.rule.on_node, subject), subject.rule.suspend_timeout_s)
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
        sent = await power.wake_by_packet(subject.mac, broadcast, subject.neighbours())
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
