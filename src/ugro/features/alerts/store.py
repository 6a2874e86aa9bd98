"""Alerts on disk: the active ones, and the history of all of them as events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from ugro.features.alerts.model import Alert, Key, Severity
from ugro.features.alerts.rules import Notice
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.rows import event_of, newest_event
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database

# The kinds of events about alerts. A job's events have its states as kinds.
KINDS = ("alert-started", "alert-worse", "alert-repeated", "alert-cleared", "node-changed")
_CURSOR = "told_jobs"


class AlertStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def on(self) -> dict[Key, Alert]:
        return await self._database.run(_read)

    async def record(self, alerts: Iterable[Alert], notices: Sequence[Notice]) -> None:
        """Records the active alerts and what happened, in one transaction."""
        now_on = [alert for alert in alerts if alert.started_at is not None]
        await self._database.run(lambda db: _record(db, now_on, notices))

    async def history(self, limit: int) -> list[Event]:
        """Events about alerts, the newest first."""
        marks = ",".join("?" * len(KINDS))
        query = f"SELECT * FROM events WHERE kind IN ({marks}) ORDER BY seq DESC LIMIT ?"
        return await self._database.run(lambda db: [event_of(row) for row in db.execute(query, (*KINDS, limit))])

    async def notified_until(self) -> int:
        """The last event that notifications were sent for; at first, the newest event."""
        return await self._database.run(_notified_until)

    async def set_notified_until(self, seq: int) -> None:
        query = "UPDATE meta SET value = ? WHERE key = ?"
        await self._database.run(lambda db: db.execute(query, (str(seq), _CURSOR)))


def kind_of(notice: Notice) -> str:
    return "node-changed" if notice.kind == "changed" else f"alert-{notice.kind}"


def _record(db: Connection, alerts: Sequence[Alert], notices: Sequence[Notice]) -> None:
    db.execute("DELETE FROM alerts")
    db.executemany(
        "INSERT INTO alerts (rule, node, severity, worst, text, first_seen_at, started_at, told_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (one.rule, one.node, one.severity, one.worst, one.text, one.first_seen_at, one.started_at, one.told_at)
            for one in alerts
        ],
    )
    db.executemany(
        "INSERT INTO events (at, node, kind, text) VALUES (?, ?, ?, ?)",
        [(_time(notice.at), notice.node or None, kind_of(notice), _words(notice)) for notice in notices],
    )


def _words(notice: Notice) -> str:
    return notice.text if notice.severity is Severity.INFO else f"{notice.severity.upper()}: {notice.text}"


def _read(db: Connection) -> dict[Key, Alert]:
    found = {}
    for row in db.execute("SELECT * FROM alerts"):
        alert = Alert(
            row["rule"], row["node"], Severity(row["severity"]), row["text"], row["first_seen_at"], row["started_at"],
            row["told_at"], Severity(row["worst"]),
        )  # fmt: skip
        found[alert.key] = alert
    return found


def _notified_until(db: Connection) -> int:
    start = (_CURSOR, str(newest_event(db)))
    db.execute("INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", start)
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (_CURSOR,)).fetchone()["value"])


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
