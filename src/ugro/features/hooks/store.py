"""The deliveries of hooks on disk: a bounded queue for each hook, and the newest of those that are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ugro.features.hooks.model import Delivery, DeliveryState, HookName
from ugro.kernel.store.connection import NO_LIMIT, Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.moments import Instant, instant_of

MOST_WAITING = 1000  # of each hook
MOST_OVER = 500
_CURSOR = "hook_jobs"


@dataclass(frozen=True, slots=True)
class NewDelivery:
    id: str
    hook: HookName
    body: str
    is_test: bool = False


class HookStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, new: Sequence[NewDelivery], *, seen_until: int | None = None) -> bool:
        """All or none; False if so many wait that there is no room. ``seen_until``: the events that they are about."""
        return await self._database.run(lambda db: _add(db, new, seen_until))

    async def next(self, hook: HookName) -> Delivery | None:
        """The oldest that waits."""
        query = "SELECT * FROM hook_deliveries WHERE hook = ? AND state = ? ORDER BY seq LIMIT 1"
        rows = await self._database.run(lambda db: db.execute(query, (hook, DeliveryState.WAITING)).fetchall())
        return _delivery(rows[0]) if rows else None

    async def age(self, delivery: Delivery) -> Instant:
        query = "SELECT created_at, boot FROM hook_deliveries WHERE seq = ?"
        row = await self._database.run(lambda db: db.execute(query, (delivery.seq,)).fetchone())
        return instant_of(row["created_at"], row["boot"])

    async def tried(self, delivery: Delivery, state: DeliveryState, error: str = "") -> None:
        query = "UPDATE hook_deliveries SET tries = tries + 1, state = ?, error = ? WHERE seq = ?"
        await self._database.run(lambda db: db.execute(query, (state, error, delivery.seq)))

    async def newest(self, limit: int, hook: HookName | None = None) -> list[Delivery]:
        """The newest first."""
        clause, values = ("WHERE hook = ?", [hook, limit]) if hook is not None else ("", [limit])
        query = f"SELECT * FROM hook_deliveries {clause} ORDER BY seq DESC LIMIT ?"
        return await self._database.run(lambda db: [_delivery(row) for row in db.execute(query, values)])

    async def waiting(self) -> dict[str, int]:
        """How many wait, by hook."""
        query = "SELECT hook, count(*) AS n FROM hook_deliveries WHERE state = ? GROUP BY hook"
        return await self._database.run(
            lambda db: {str(row["hook"]): int(row["n"]) for row in db.execute(query, (DeliveryState.WAITING,))}
        )

    async def calls(self, hook: HookName, limit: int) -> list[Instant]:
        """When it was called last; tests do not count."""
        query = "SELECT created_at, boot FROM hook_deliveries WHERE hook = ? AND is_test = 0 ORDER BY seq DESC LIMIT ?"
        rows = await self._database.run(lambda db: db.execute(query, (hook, limit)).fetchall())
        return [instant_of(row["created_at"], row["boot"]) for row in rows]

    async def stop_following(self) -> None:
        """Nobody wants to know about ended jobs any more."""
        await self._database.run(_stop_following)

    async def start_after(self, newest: int) -> int:
        """The last event that was looked at for ended jobs; at first, the newest."""
        return await self._database.run(lambda db: _start_after(db, newest))


def _stop_following(db: Connection) -> None:
    db.execute("DELETE FROM meta WHERE key = ?", (_CURSOR,))


def _add(db: Connection, new: Sequence[NewDelivery], seen_until: int | None) -> bool:
    count = "SELECT count(*) FROM hook_deliveries WHERE hook = ? AND state = ?"
    for hook in {one.hook for one in new}:
        mine = sum(one.hook is hook for one in new)
        if db.execute(count, (hook, DeliveryState.WAITING)).fetchone()[0] + mine > MOST_WAITING:
            return False
    now = clock.now()
    db.executemany(
        "INSERT INTO hook_deliveries (id, hook, body, state, created_at, boot, is_test) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(one.id, one.hook, one.body, DeliveryState.WAITING, now.at, now.boot, one.is_test) for one in new],
    )
    if seen_until is not None:
        db.execute("UPDATE meta SET value = ? WHERE key = ?", (str(seen_until), _CURSOR))
    oldest = f"SELECT seq FROM hook_deliveries WHERE state <> ? ORDER BY seq DESC LIMIT {NO_LIMIT} OFFSET ?"
    db.execute(f"DELETE FROM hook_deliveries WHERE seq IN ({oldest})", (DeliveryState.WAITING, MOST_OVER))
    return True


def _start_after(db: Connection, newest: int) -> int:
    db.execute("INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (_CURSOR, str(newest)))
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (_CURSOR,)).fetchone()["value"])


def _delivery(row: Row) -> Delivery:
    return Delivery(
        row["seq"], row["id"], HookName(row["hook"]), row["body"], row["created_at"], DeliveryState(row["state"]),
        row["tries"], row["error"], bool(row["is_test"]),
    )  # fmt: skip
