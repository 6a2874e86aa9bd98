"""Ray clusters on disk. Of those that have ended, the newest are kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace

from ugro.features.ray.model import ClusterState, RayCluster
from ugro.kernel.store.connection import NO_LIMIT, Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import NotAllowed

log = logging.getLogger(__name__)

MOST_ENDED = 100


class RayClusterStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, cluster: RayCluster) -> RayCluster:
        """With its number. Raises NotAllowed if another of that name has not ended."""
        return await self._database.run(lambda db: add_cluster(db, cluster))

    async def put(self, cluster: RayCluster) -> None:
        query = "UPDATE ray_clusters SET state = ?, content = ? WHERE id = ?"
        await self._database.run(lambda db: db.execute(query, (cluster.state, dumps(cluster), cluster.id)))

    async def newest(self, limit: int) -> list[RayCluster]:
        """The newest first."""
        query = "SELECT id, content FROM ray_clusters ORDER BY id DESC LIMIT ?"
        return await self._database.run(lambda db: _readable(db.execute(query, (limit,))))

    async def open(self) -> list[RayCluster]:
        """Those that have not ended."""
        query = "SELECT id, content FROM ray_clusters WHERE state <> ? ORDER BY id"
        return await self._database.run(lambda db: _readable(db.execute(query, (ClusterState.ENDED,))))


def add_cluster(db: Connection, cluster: RayCluster) -> RayCluster:
    open_one = "SELECT 1 FROM ray_clusters WHERE name = ? AND state <> ?"
    if db.execute(open_one, (cluster.name, ClusterState.ENDED)).fetchone() is not None:
        raise NotAllowed(
            f"there is a Ray cluster {cluster.name} already",
            hint=f"see: ugro cluster status {cluster.name}; for another one: ugro cluster start --name NAME",
        )
    query = "INSERT INTO ray_clusters (name, state, content) VALUES (?, ?, ?) RETURNING id"
    row = db.execute(query, (cluster.name, cluster.state, "{}")).fetchone()
    made = replace(cluster, id=int(row["id"]))
    db.execute("UPDATE ray_clusters SET content = ? WHERE id = ?", (dumps(made), made.id))
    oldest = f"SELECT id FROM ray_clusters WHERE state = ? ORDER BY id DESC LIMIT {NO_LIMIT} OFFSET ?"
    db.execute(f"DELETE FROM ray_clusters WHERE id IN ({oldest})", (ClusterState.ENDED, MOST_ENDED))
    return made


def _readable(rows: Iterable[Row]) -> list[RayCluster]:
    found: list[RayCluster] = []
    for row in rows:
        try:
            found.append(decode(RayCluster, json.loads(row["content"])))
        except (DecodeError, ValueError) as error:  # of another version; its jobs can still be cancelled
            log.error("the Ray cluster %s cannot be read: %s", row["id"], error)
    return found
