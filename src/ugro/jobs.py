"""``client.jobs``: the jobs' part of the Python API."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from ugro.core.codec import decode
from ugro.core.event import Event
from ugro.core.job import Job
from ugro.http import lines
from ugro.remote import wire

Ask = Callable[..., Any]


class Jobs:
    """Made by ``Client``, which gives it the way to ask."""

    def __init__(self, ask: Ask, stream: Ask) -> None:
        self._ask = ask
        self._stream = stream

    def submit(
        self,
        file: Path | None = None,
        *,
        fields: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Job:
        """Hands a job in: from a job file, from fields named as the command line's options, or both.

        With the same ``key`` it is handed in once, however often this is called.
        """
        body = {
            "key": key or os.urandom(16).hex(),
            "user": getpass.getuser(),
            "file": str(file.absolute()) if file else None,
            "fields": dict(fields or {}),
            "env": dict(os.environ if env is None else env),
        }
        return decode(Job, self._ask("POST", "/v1/jobs", body))

    def newest(self, limit: int = 50) -> list[Job]:
        return [decode(Job, document) for document in self._ask("GET", f"/v1/jobs?limit={limit}")["jobs"]]

    def get(self, job: str | int) -> Job:
        """By id, by name (the newest of that name), or ``last``."""
        return decode(Job, self._ask("GET", f"/v1/jobs/{quote(str(job), safe='')}"))

    def cancel(self, job: str | int) -> Job:
        return decode(Job, self._ask("POST", f"/v1/jobs/{quote(str(job), safe='')}/cancel"))

    def why(self, job: str | int) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask("GET", f"/v1/jobs/{quote(str(job), safe='')}/why")
        return answer

    def moves(self, job: str | int) -> Iterator[Job]:
        """The job now, and again each time it has moved, until it has ended."""
        for document in lines(self._stream("GET", f"/v1/jobs/{quote(str(job), safe='')}/wait", timeout_s=None)):
            yield decode(Job, document)

    def wait(self, job: str | int) -> Job:
        """The job when it has ended."""
        *_, last = self.moves(job)
        return last

    def logs(self, job: str | int, *, rank: int | None = None, follow: bool = False) -> Iterator[tuple[int, bytes]]:
        """Rank and bytes, as they come home; with ``follow`` until the job has ended."""
        query = {"follow": str(follow).lower(), **({"rank": rank} if rank is not None else {})}
        path = f"/v1/jobs/{quote(str(job), safe='')}/logs?{urlencode(query)}"
        decoder = wire.Decoder()
        for piece in self._stream("GET", path, timeout_s=None):
            for _, at, payload in decoder.feed(piece):
                yield at, payload

    def events(self, *, after: int = 0, job: str | None = None, follow: bool = False) -> Iterator[Event]:
        query = {"after": after, "follow": str(follow).lower(), **({"job": job} if job else {})}
        for document in lines(self._stream("GET", f"/v1/events?{urlencode(query)}", timeout_s=None)):
            yield decode(Event, document)
