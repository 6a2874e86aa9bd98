"""The links between nodes: every pair once, in rounds in which no node takes part twice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence

from ugro.agent.hardware.lines import Lines, LinkLine
from ugro.agent.hardware.process import run
from ugro.agent.hardware.subject import About, Subject, Taken, unless_taken
from ugro.agent.support.aio import together
from ugro.core.errors import UgroError, Unreachable
from ugro.core.figures import LinkFigures, Skipped
from ugro.policy.hardware.rounds import Pair, rounds
from ugro.policy.nodes.connectivity import LOOPBACK
from ugro.remote.messages import Connections

_LEAST_S = 0.2  # of one pair: less says nothing
_START_S = 0.15  # of a process on a node; two, one after the other, for each pair
_SLACK_S = 2.0  # a busy node starts late, and a slow link still empties its buffers after its time


class Network:
    def __init__(
        self, subjects: Mapping[str, Subject], reached: Mapping[str, Connections | UgroError], about: About
    ) -> None:
        self._subjects = subjects
        self._reached = reached
        self._about = about
        self.skipped: list[Skipped] = []

    async def measure(self, aim_s: float, limit_s: float, on_round: Callable[[str], None]) -> list[LinkFigures]:
        all_rounds = rounds(list(self._subjects))
        each_s = max(_LEAST_S, aim_s / max(1, len(all_rounds)) - 2 * _START_S)
        fitting = all_rounds[: max(1, int(limit_s / (each_s + 2 * _START_S)))]
        found: list[LinkFigures] = []
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        for place, pairs in enumerate(fitting):
            if loop.time() >= until:
                fitting = fitting[:place]
                break
            on_round(f"network, round {place + 1} of {len(fitting)}")
            found += await together(self._unless_taken(pair, each_s) for pair in pairs)
        left = sum(len(pairs) for pairs in all_rounds[len(fitting) :])
        if left:
            whole = left + len(found)
            self.skipped.append(Skipped("network", f"{left} of {whole} pairs of nodes: the time was up"))
        return found

    async def _unless_taken(self, pair: Pair, seconds: float) -> LinkFigures:
        try:
            return await unless_taken([self._subjects[name] for name in pair], self._pair(pair, seconds))
        except Taken as taken:
            return self._figures(pair, "", None, str(taken))

    async def _pair(self, pair: Pair, seconds: float) -> LinkFigures:
        source, target = (self._subjects[name] for name in pair)
        address = self._address(*pair)
        if address is None:
            return self._figures(pair, "", None, f"{pair[0]} does not reach {pair[1]}")
        listening, connecting = Lines(), Lines()
        port = asyncio.Event()
        listening.on_port = port.set
        limit_s = seconds + _SLACK_S
        given = {"address": address, "secret": secrets.token_hex(16), "limit_s": limit_s, "seconds": seconds}
        listener = asyncio.create_task(
            run(target.link, "listen", given, 2 * limit_s, listening), name=f"listen on {target.name}"
        )
        try:
            if await _is_open(port, listener, limit_s):
                await run(source.link, "connect", {**given, "port": listening.port}, limit_s, connecting)
        except Unreachable as error:
            connecting.skip("network", str(error))
        finally:
            listener.cancel()
            await asyncio.wait([listener])
            _ = listener.cancelled() or listener.exception()  # the connector says what matters
        why = next((one.why for lines in (connecting, listening) for one in lines.skipped), None)
        return self._figures(pair, address, connecting.link, why)

    def _figures(self, pair: Pair, address: str, line: LinkLine | None, why: str | None) -> LinkFigures:
        line = line or LinkLine()
        return LinkFigures(
            source=pair[0],
            target=pair[1],
            measured_at=self._about.measured_at,
            bytes_per_s=line.bytes_per_s,
            back_bytes_per_s=line.back_bytes_per_s,
            latency_s=line.latency_s,
            jitter_s=line.jitter_s,
            address=address,
            error=(why or "nothing was measured") if line.back_bytes_per_s is None else None,
            mode=self._about.mode,
            is_forced=any(self._subjects[name].is_busy for name in pair),
        )

    def _address(self, source: str, target: str) -> str | None:
        """Where ``source`` has reached ``target``; of pairs that were not tried, where others have."""
        own = self._reached.get(source)
        if isinstance(own, Connections):
            if (found := _first_address([own], target)) is not None:
                return found
            if any(missed.node == target for missed in own.missed):
                return None
        others = [one for one in self._reached.values() if isinstance(one, Connections)]
        found = _first_address(others, target)
        return None if found == LOOPBACK else found


def _first_address(connections: Sequence[Connections], target: str) -> str | None:
    return next((one.address for found in connections for one in found.reached if one.node == target), None)


async def _is_open(port: asyncio.Event, listener: asyncio.Task[None], limit_s: float) -> bool:
    opened = asyncio.create_task(port.wait())
    try:
        await asyncio.wait([opened, listener], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return port.is_set()
    finally:
        opened.cancel()
