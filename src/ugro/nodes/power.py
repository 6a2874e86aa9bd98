"""Puts nodes to sleep over their links, wakes them by packets, and asks each for the interface that wakes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Iterable, Sequence

from ugro.core.errors import RemoteFailure, TimedOut, UgroError
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.link import Link
from ugro.remote.messages import Interface
from ugro.remote.net.wake import EVERYBODY, send

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_MOST_OUTPUT = 4096
_MOST_NEIGHBOURS = 2
_NAME = re.compile(r"[\w.:@-]{0,15}")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")


async def interface(link: Link) -> Interface:
    """Empty if it is not known."""
    try:
        answer = await link.call("check", {"what": "interface", "timeout_s": _ANSWER_S * 0.9}, timeout_s=_ANSWER_S)
        return _checked(decode(Interface, answer))
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
    params = {"argv": list(argv), "marker": f"{name}.{secrets.token_hex(6)}", "grace_s": 1.0}
    stream = link.stream("exec", params)
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
            await link.call("net.wake", {"mac": mac, "broadcast": broadcast}, timeout_s=_ANSWER_S)
            sent += 1
    return sent
