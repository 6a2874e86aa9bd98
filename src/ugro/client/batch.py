"""``client.pool``, and the cluster as a place for an estimate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ugro.core.errors import Unsatisfiable

if TYPE_CHECKING:
    from ugro.batch.pool import Pool
    from ugro.client.client import Client
    from ugro.core.estimate import Place

# Assumed of a Ray cluster that does not run yet, as docs/benchmarks.md has them; a running one is measured.
_START_S = 12.0
_SLOT_ITEM_S = 2e-6
_DRIVER_ITEM_S = 1e-6
_BYTES_PER_S = 117e6  # 1 Gbit/s


def open_pool(*, nodes: int | None, backend: str | None, address: str | None, workers: int | None) -> Pool:
    from ugro.batch.pool import Pool

    address = address or os.environ.get("RAY_ADDRESS")
    if nodes is not None and address is None and backend != "local":
        hint = "start one: ugro cluster start; then give its address, or set RAY_ADDRESS"
        raise Unsatisfiable(f"there is no Ray cluster for a pool on {nodes} nodes", hint=hint)
    return Pool(backend=backend, address=address, workers=workers)


def cluster_place(client: Client) -> Place | None:
    """The nodes of the running agent's cluster that could take work; None if there is no other machine than this."""
    from ugro.core.estimate import Place

    agent = client.running_agent()
    if agent is None or agent.cluster_file is None:
        return None
    usable = [one for one in client.health() if one.machine and one.facts and not one.drained and not one.same_as]
    cores = sum(one.machine.cores for one in usable if one.machine)
    if not cores:
        return None
    speeds = [link.bytes_per_s for link in client.hardware.all().links if link.bytes_per_s]
    return Place(
        f"{len(usable)} node{'' if len(usable) == 1 else 's'}",
        cores,
        start_s=_START_S,
        slot_item_s=_SLOT_ITEM_S,
        driver_item_s=_DRIVER_ITEM_S,
        bytes_per_s=min(speeds, default=_BYTES_PER_S),
        is_assumed=True,
    )
