"""Asks nodes what ``ugro doctor`` and a launch must know: what is installed, and whether nodes reach each other.

Only asks; features judge the answers. The node's side is ``node/check.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, get_type_hints

from ugro.features.environments.rules.versions import Installed
from ugro.kernel.links.calls import P, Stream, asked
from ugro.kernel.links.diagnosis import Endpoint, addresses_to_try, asked_for, pairs
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Facts
from ugro.kernel.links.rules import Unknown
from ugro.kernel.support.aio import together
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError
from ugro.node import connectivity, system, wire
from ugro.node.check import check as check_there
from ugro.node.messages import Connections, Listening, Packages, Target

# A lost first packet is sent again after 1 s, and once more after 3 s.
CONNECT_S = 3.5
_LISTEN_S = 15.0
_STOP_S = 5.0
_ANY_PORT = 0
T = TypeVar("T")


async def check(
    link: Link, work: Callable[P, T], timeout_s: float, /, *_: P.args, **params: P.kwargs
) -> T | Unknown:
    """What ``work``, one of ``ugro.node.check.WORK``, returns on the node."""
    try:
        return await answer(link, work, timeout_s, *_, **params)
    except (TimedOut, RemoteFailure) as error:
        return Unknown(error.message, error.hint)


async def answer(link: Link, work: Callable[P, T], timeout_s: float, /, *_: P.args, **params: P.kwargs) -> T:
    """As ``check``; raises why there is no answer."""
    method, said = asked(check_there, what=work.__name__, timeout_s=0.9 * timeout_s, **params)
    kind: type[T] = get_type_hints(work)["return"]
    return _decoded(link, kind, await link.call(method, said, timeout_s=timeout_s))


async def packages(link: Link, *, timeout_s: float) -> Packages | Unknown:
    return await check(link, system.packages, timeout_s)


def installed(link: Link, found: Packages | Unknown, facts: Facts | None = None) -> Installed:
    assert link.machine is not None  # the link is open
    driver, has_gpus = (facts.gpu_driver, bool(facts.gpus)) if facts else (None, False)
    return Installed(link.spec.name, link.machine.python, link.machine.python_path, found, driver, has_gpus)


def endpoint(link: Link) -> Endpoint:
    assert link.machine is not None  # the link is open
    return Endpoint(link.spec.name, link.machine.boot_id, host=link.spec.host)


# --- connections between nodes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listener:
    link: Link
    endpoint: Endpoint
    found: Listening
    words: Mapping[str, str]  # what a connector must say, and what it is answered
    stream: Stream


class Mesh:
    """Nodes that listen for each other. ``failed``: those that could not."""

    def __init__(self, nodes: Mapping[str, _Listener | UgroError]) -> None:
        self._pairs = pairs(list(nodes))
        self._listeners = {node: one for node, one in nodes.items() if isinstance(one, _Listener)}
        self.failed = {node: one for node, one in nodes.items() if isinstance(one, UgroError)}

    @property
    def endpoints(self) -> list[Endpoint]:
        return [listener.endpoint for listener in self._listeners.values()]

    @property
    def taken_ports(self) -> list[int]:
        return [port for listener in self._listeners.values() for port in listener.found.taken]

    async def connect(self, settle_s: float) -> dict[str, Connections | UgroError]:
        """Connects each node to its peers, all at once.

        ``settle_s``: how much longer than its fastest address another address of a node may take.
        """
        peers = {
            node: [self._listeners[peer] for one, peer in self._pairs if one == node and peer in self._listeners]
            for node in self._listeners
        }
        found = await together(_or_error(_connect(self._listeners[node], peers[node], settle_s)) for node in peers)
        return {**dict(zip(peers, found, strict=True)), **self.failed}

    async def stop(self) -> None:
        await together(_stop(listener) for listener in self._listeners.values())


@contextlib.asynccontextmanager
async def mesh(
    links: Sequence[Link], endpoints: Sequence[Endpoint], first_port: int | None = None
) -> AsyncIterator[Mesh]:
    """Nodes listen while this is open, the first one also at ``first_port``; afterwards their ports are free again."""
    with contextlib.ExitStack() as stack:
        results = await together(
            _or_error(_listen(link, one, [first_port] if first_port and one is endpoints[0] else [], stack))
            for link, one in zip(links, endpoints, strict=True)
        )
        opened = Mesh({one.node: result for one, result in zip(endpoints, results, strict=True)})
        yield opened
        await opened.stop()


async def _listen(link: Link, one: Endpoint, ports: Sequence[int], stack: contextlib.ExitStack) -> _Listener:
    """Listens until the stack is left."""
    words = {"word": secrets.token_hex(8), "reply": secrets.token_hex(8)}
    how: dict[str, Any] = {"ports": [*ports, _ANY_PORT], "limit_s": _LISTEN_S, **words}
    stream = link.stream(*asked(check_there, what=connectivity.listen.__name__, timeout_s=_LISTEN_S, **how))
    stack.callback(stream.cancel)
    try:
        async with asyncio.timeout(_LISTEN_S):
            found = await _first_message(link, stream)
    except TimeoutError as error:
        raise TimedOut(f"did not listen within {_LISTEN_S:g} s", subject=one.node) from error
    return _Listener(link, replace(one, addresses=found.addresses), found, words, stream)


async def _first_message(link: Link, stream: Stream) -> Listening:
    async for _, payload in stream:
        return _decoded(link, Listening, payload)
    await stream.result()
    raise RemoteFailure("it stopped listening at once", subject=link.spec.name)


async def _connect(connector: _Listener, targets: Sequence[_Listener], settle_s: float) -> Connections:
    wanted = [
        Target(
            target.endpoint.node,
            tuple(addresses_to_try(connector.endpoint, target.endpoint)),
            target.found.ports,
            **target.words,
        )
        for target in targets
    ]
    targets_there, connect = [asdict(target) for target in wanted], connectivity.connect
    found = await answer(
        connector.link, connect, _LISTEN_S, targets=targets_there, connect_s=CONNECT_S, settle_s=settle_s
    )
    return asked_for(found, wanted)


async def _stop(listener: _Listener) -> None:
    """Returns when its ports are free again."""
    listener.stream.ask_to_stop()
    with contextlib.suppress(UgroError, TimeoutError):  # the answer only says that it was stopped
        async with asyncio.timeout(_STOP_S):
            await listener.stream.result()


async def _or_error(work: Coroutine[Any, Any, T]) -> T | UgroError:
    try:
        return await work
    except UgroError as error:
        return error


def _decoded(link: Link, kind: type[T], answer: dict[str, Any] | bytes) -> T:
    try:
        return decode(kind, wire.parse(answer) if isinstance(answer, bytes) else answer)
    except (DecodeError, wire.ProtocolError) as error:
        raise RemoteFailure(f"invalid answer: {error}", subject=link.spec.name) from error
