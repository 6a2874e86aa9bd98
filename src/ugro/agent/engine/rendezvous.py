"""Finds where the ranks of a job meet: an address of the first node that all others have really reached."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ugro.agent.tracking.node_checks import CONNECT_S, mesh
from ugro.core.errors import UgroError
from ugro.nodes.link import Link
from ugro.policy.nodes.connectivity import Apart, Endpoint, Meeting, meet
from ugro.remote.messages import Connections

log = logging.getLogger(__name__)

# On a busy machine the first of these does not tell slow from unreachable: nodes that seem to be apart get the second.
_SETTLE_S = (0.25, CONNECT_S)


class PortTaken(UgroError):
    """Another process listens where the first rank would."""


async def find_meeting(links: Sequence[Link], endpoints: Sequence[Endpoint], port: int) -> Meeting | Apart:
    """``port``, of the first node, is where its rank will listen. Raises ``PortTaken`` if another process does."""
    async with mesh(links, endpoints, port) as nodes:
        if nodes.taken_ports:
            raise PortTaken(f"port {port} is in use", subject=endpoints[0].node)
        _raise_first(nodes.failed)
        for settle_s in _SETTLE_S:
            outcomes = await nodes.connect(settle_s)
            _raise_first(outcomes)
            found = meet(nodes.endpoints, port, {n: one for n, one in outcomes.items() if isinstance(one, Connections)})
            if isinstance(found, Meeting):
                break
            log.info("nodes do not reach each other within %g s: %s", settle_s, found.text)
    return found


def _raise_first(outcomes: Mapping[str, object]) -> None:
    for outcome in outcomes.values():
        if isinstance(outcome, UgroError):
            raise outcome
