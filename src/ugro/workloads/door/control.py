"""What the agent asks of a door: lines of JSON over a socket of its run's folder, one answer to each."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ugro.policy.serving.door_config import WHOLE
from ugro.workloads.door.haproxy import FailedError, HAProxy
from ugro.workloads.door.machine import TimedOutError
from ugro.workloads.door.measures import WINDOW_S, Measures, Rows, front, is_up, number, waiting
from ugro.workloads.door.records import InvalidError, Records, checked_keys, weight_of
from ugro.workloads.door.waiting import WaitingRoom

_MOST_LINE = 1 << 20
_IDLE_S = 60.0
Request = Mapping[str, Any]


class BusyError(Exception):
    """Not now; in words."""


class Control:
    """One request at a time. What HAProxy was not given is not recorded: the agent sees that, and asks again."""

    def __init__(self, records: Records, haproxy: HAProxy, measures: Measures, room: WaitingRoom) -> None:
        self._records = records
        self._haproxy = haproxy
        self._measures = measures
        self._room = room
        self._lock = asyncio.Lock()
        self._verbs: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "servers": self._servers,
            "add": self._add,
            "weight": self._weight,
            "drain": self._drain,
            "ready": self._ready,
            "remove": self._remove,
            "share": self._share,
            "keys": self._keys,
            "stats": self._stats,
        }

    @property
    def lock(self) -> asyncio.Lock:
        """Held while HAProxy is started again: it then gets all that was recorded."""
        return self._lock

    async def run(self, listener: socket.socket) -> None:
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_MOST_LINE)
        try:
            await server.serve_forever()
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(reader.readline(), _IDLE_S):
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _IDLE_S)
        except (OSError, ValueError, TimedOutError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            async with self._lock:
                return {"result": await self._verbs[request["do"]](request)}
        except (InvalidError, BusyError, FailedError) as error:
            kinds = {InvalidError: "invalid", BusyError: "busy"}
            return {"error": str(error), "kind": kinds.get(type(error), "failed")}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return {"error": f"no request of a door: {type(error).__name__} {error}", "kind": "invalid"}
        except (OSError, TimedOutError) as error:
            return {"error": f"HAProxy or the door's folder does not answer: {error}", "kind": "failed"}

    # --- servers ---------------------------------------------------------------------------------------------------

    async def _servers(self, request: Request) -> dict[str, Any]:
        rows = await self._haproxy.rows()
        return {name: self._seen(server, rows) for name, server in self._records.servers.items()}

    def _seen(self, server: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        name = server["name"]
        state = "drain" if server["is_draining"] else "ready" if is_up(rows, server) else "down"
        kept = {key: server[key] for key in ("name", "address", "port", "weight", "limit", "canary")}
        return {**kept, "state": state, "sessions": number(rows, name, "scur"), "queued": number(rows, name, "qcur")}

    async def _add(self, request: Request) -> None:
        known = self._records.servers.get(str(request["name"]))
        if known is not None:
            await self._change(known, request)
            return
        try:
            await self._haproxy.add(self._records.add(request))
        except (FailedError, OSError, TimedOutError):
            self._records.drop(str(request["name"]))
            raise

    async def _change(self, known: dict[str, Any], request: Request) -> None:
        same = ("address", "port", "canary")
        if any(known[key] != request[key] for key in same):
            raise InvalidError(f"there is a server {known['name']} at {known['address']}:{known['port']} already")
        limit = int(request["limit"])
        await self._haproxy.set_limit({**known, "limit": limit})
        known["limit"] = limit
        await self._weight(request)

    async def _weight(self, request: Request) -> None:
        server, weight = self._known(request), weight_of(request)
        await self._haproxy.set_weight({**server, "weight": weight})
        server["weight"] = weight
        self._records.save()

    async def _drain(self, request: Request) -> None:
        await self._turn(self._known(request), is_draining=True)

    async def _ready(self, request: Request) -> None:
        await self._turn(self._known(request), is_draining=False)

    async def _turn(self, server: dict[str, Any], *, is_draining: bool) -> None:
        await self._haproxy.set_state(server, "drain" if is_draining else "ready")
        server["is_draining"] = is_draining
        self._records.save()

    async def _remove(self, request: Request) -> None:
        server = self._records.servers.get(str(request["name"]))
        if server is None:
            return
        rows = await self._haproxy.rows()
        if left := number(rows, server["name"], "scur") + number(rows, server["name"], "qcur"):
            raise BusyError(f"{server['name']} has {left} requests; drain it first")
        await self._haproxy.remove(server)
        self._records.drop(server["name"])
        self._measures.forget(server["name"])

    def _known(self, request: Request) -> dict[str, Any]:
        name = str(request["name"])
        if name not in self._records.servers:
            raise InvalidError(f"there is no server {name[:80]!r}")
        return self._records.servers[name]

    # --- all of it -------------------------------------------------------------------------------------------------

    async def _share(self, request: Request) -> None:
        share = round(float(request["share"]) * WHOLE)
        if not 0 <= share <= WHOLE:
            raise InvalidError("a share is between 0 and 1")
        await self._haproxy.set_share(share)
        self._records.share = share
        self._records.save()

    async def _keys(self, request: Request) -> None:
        keys = checked_keys(dict(request["keys"]))
        await self._haproxy.set_keys(keys)
        self._records.set_keys(keys)

    async def _stats(self, request: Request) -> dict[str, Any]:
        rows = await self._haproxy.rows()
        servers = {name: self._of_server(name, rows) for name in self._records.servers}
        queued = waiting(rows) + sum(int(one["queued"]) for one in servers.values())
        is_any_ready = any(is_up(rows, server) for server in self._records.servers.values())
        denied = front(rows, "hrsp_4xx") - sum(number(rows, name, "hrsp_4xx") for name in servers)
        return {
            "requests": front(rows, "req_tot"),
            "errors": front(rows, "hrsp_5xx"),
            "denied": max(0, denied),
            "sessions": queued + self._room.count + sum(int(one["sessions"]) for one in servers.values()),
            "queued": queued + self._room.count,
            "held": 0 if is_any_ready else queued + self._room.count,
            "latency": self._measures.latency(),
            "window_s": WINDOW_S,
            "sampled_share": self._measures.sampled_share,
            "started_at": self._haproxy.started_at,
            "servers": servers,
        }

    def _of_server(self, name: str, rows: Rows) -> dict[str, Any]:
        return {
            "requests": number(rows, name, "stot"),
            "errors": number(rows, name, "hrsp_5xx"),
            "retries": number(rows, name, "wretr") + number(rows, name, "wredis"),
            "sessions": number(rows, name, "scur"),
            "queued": number(rows, name, "qcur"),
            "latency": self._measures.latency(name),
            "pace": self._measures.pace(name),
        }
