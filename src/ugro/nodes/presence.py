"""Whether somebody uses a node's machine, as its node program says. Everything that it says is bounded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import RemoteFailure
from ugro.core.owner import OwnerRule
from ugro.nodes.node import Node
from ugro.remote import foreign

_MOST_S = 2.0**32  # longer than any machine was up
_MOST_LINE = 65536
_MOST_TEXT = 200
_MOST_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Presence:
    idle_s: float | None  # since the last sign; None: there was none since the machine started
    sign: str = ""
    sources: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()


async def watch(node: Node, rule: OwnerRule, connect_s: float) -> AsyncGenerator[Presence]:
    """What is so now, then every change, until the link is lost."""
    link = await node.ready(connect_s, patiently=True)
    stream = link.stream("presence.watch", {"when": rule.when.value, "quiet_s": rule.quiet_s})
    unread = b""
    try:
        async for _, payload in stream:
            *lines, unread = (unread + payload).split(b"\n")
            if len(unread) > _MOST_LINE:
                raise RemoteFailure("invalid report on its owner: it has no end", subject=node.spec.name)
            for line in lines:
                yield parse(line, node.spec.name)
        await stream.result()
    finally:
        stream.cancel()


def parse(line: bytes, node: str) -> Presence:
    try:
        found = foreign.parsed(line)
        idle_s = found["idle_s"]
        if idle_s is not None:
            idle_s = float(idle_s)
            if not 0 <= idle_s < _MOST_S:  # also refuses NaN
                raise ValueError(f"idle for {idle_s} s")
        return Presence(idle_s, _text(found.get("sign", "")), _texts(found.get("sources")), _texts(found.get("blind")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RemoteFailure(f"invalid report on its owner: {error!r:.200}", subject=node) from error


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(_text(one) for one in list(found or ())[:_MOST_TEXTS])


def _text(found: Any) -> str:
    """Names of users, devices and processes are in it: on a terminal they must not be more than text."""
    text = str(found)[:_MOST_TEXT]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
