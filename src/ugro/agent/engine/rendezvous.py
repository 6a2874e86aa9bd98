"""Lets the nodes of a job connect to each other, all at once, and tells where they can meet. Judged in ``policy``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ugro.agent.support.aio import together
from ugro.core.errors import RemoteFailure, TimedOut, UgroError
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.policy.nodes.meeting import Apart, Crossing, Meeting, Place, addresses_to_try, meet, pairs
from ugro.remote import wire

log = logging.getLogger(__name__)

# A first packet that got lost is sent again after 1 s, and once more after 3 s.
_CONNECT_S = 3.5
_LISTEN_S = 15.0
_STOP_S = 5.0
# How long an address may take longer than another one of the same node. On busy machines that is not enough to tell
# slow from unreachable: those that seem to be apart are given all the time there is.
_SETTLE_S = 0.25
_PATIENT_S = _CONNECT_S
_ANY_PORT = 0
T = TypeVar("T")


class PortTaken(UgroError):
    """Somebody else listens where the first rank was to."""


@dataclass(frozen=True, slots=True)
class _Listening:
    ports: tuple[int, ...]
    taken: tuple[int, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    """A node that listens, and what to say there."""

    place: Place
    ports: tuple[int, ...]
    words: Mapping[str, str]
    stream: Stream


async def find_meeting(links: Sequence[Link], places: Sequence[Place], port: int) -> Meeting | Apart:
    """``port``, of the first node, is where its rank will listen. Raises ``PortTaken`` if somebody else does."""
    with contextlib.ExitStack() as stack:
        listeners = await together(
            _listen(link, place, [port, _ANY_PORT] if place is places[0] else [_ANY_PORT], stack)
            for link, place in zip(links, places, strict=True)
        )
        by_name = {listener.place.node: listener for listener in listeners}
        wanted = pairs(list(by_name))
        targets = {name: [by_name[other] for one, other in wanted if one == name] for name in by_name}
        for settle_s in (_SETTLE_S, _PATIENT_S):
            crossings = await together(
                _cross(link, by_name[place.node], targets[place.node], settle_s)
                for link, place in zip(links, places, strict=True)
            )
            found = meet([one.place for one in listeners], port, dict(zip(by_name, crossings, strict=True)))
            if isinstance(found, Meeting):
                break
            log.info("nodes do not reach each other within %g s: %s", settle_s, found.text)
        await together(_stop(listener) for listener in listeners)
    return found


async def _listen(link: Link, place: Place, ports: Sequence[int], stack: contextlib.ExitStack) -> _Open:
    """Until the stack is left."""
    words = {"word": secrets.token_hex(8), "reply": secrets.token_hex(8)}
    stream = link.stream("check", {"what": "mesh_listen", "timeout_s": _LISTEN_S, "ports": list(ports), **words})
    stack.callback(stream.cancel)
    try:
        async with asyncio.timeout(_LISTEN_S):
            said = await _first_word(link, stream)
    except TimeoutError as error:
        raise TimedOut(f"did not listen within {_LISTEN_S:g} s", subject=place.node) from error
    if said.taken:
        raise PortTaken(f"port {said.taken[0]} is in use", subject=place.node)
    return _Open(replace(place, addresses=said.addresses), said.ports, words, stream)


async def _first_word(link: Link, stream: Stream) -> _Listening:
    async for _, payload in stream:
        return _parsed(link, _Listening, wire.parse(payload))
    await stream.result()
    raise RemoteFailure("it stopped listening at once", subject=link.spec.name)


async def _stop(listener: _Open) -> None:
    """Returns when its ports are free again."""
    listener.stream.ask_to_stop()
    with contextlib.suppress(RemoteFailure, TimeoutError):  # that it was stopped is all it has to say
        async with asyncio.timeout(_STOP_S):
            await listener.stream.result()


async def _cross(link: Link, connector: _Open, targets: Sequence[_Open], settle_s: float) -> Crossing:
    params = {
        "what": "mesh_connect",
        "timeout_s": _LISTEN_S,
        "connect_s": _CONNECT_S,
        "settle_s": settle_s,
        "targets": [
            {
                "node": target.place.node,
                "addresses": addresses_to_try(connector.place, target.place),
                "ports": target.ports,
                **target.words,
            }
            for target in targets
        ],
    }
    return _parsed(link, Crossing, await link.call("check", params, timeout_s=_LISTEN_S))


def _parsed(link: Link, kind: type[T], answer: dict[str, Any]) -> T:
    try:
        return decode(kind, answer)
    except DecodeError as error:
        raise RemoteFailure(f"its answer makes no sense: {error}", subject=link.spec.name) from error
