"""The points of one file of the spool on their way to a server. What it took is not sent again while others wait.

A server refuses a whole request for one point that it does not like, or because it is too large. Such a request is sent
again in two halves, so that the others get through; how often is bounded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

import ugro
from ugro.features.alerts.channels import SendFailure, post, secret
from ugro.features.trackers.config import ExportSection, InfluxKeys, OtlpKeys
from ugro.kernel.telemetry.metricstore import JOB, NODE
from ugro.node import foreign

# --- encoding ---------------------------------------------------------------------------------------------------------
# Points as other systems take them: InfluxDB's line protocol, and OpenTelemetry's protocol as JSON. Pure.


_NS_PER_MS = 1_000_000
_LATEST_MS = (1 << 63) // _NS_PER_MS - 1  # in nanoseconds, InfluxDB has 63 bits and OTLP 64: the year 2262
_CONTROL = {code: " " for code in (*range(32), 127)}
_ESCAPED = str.maketrans({",": r"\,", " ": r"\ ", "=": r"\="})
_LONGEST = 256


class Sample(NamedTuple):
    owner: str  # as in the metric store
    attempt: int
    rank: int
    key: str
    time_ms: int
    step: int
    value: float

    @property
    def is_sendable(self) -> bool:
        """Neither format has a number that is none, or any time. One such point, and a server refuses all with it."""
        return math.isfinite(self.value) and bool(self.key) and 0 <= self.time_ms < _LATEST_MS


def as_lines(samples: Iterable[Sample], cluster: str) -> bytes:
    """For InfluxDB, with times in nanoseconds."""
    return "".join(f"{line}\n" for sample in samples for line in _line(sample, cluster)).encode()


def as_otlp(samples: Iterable[Sample], cluster: str, version: str) -> bytes:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        if sample.is_sendable and (name := _name(sample)):
            by_name.setdefault(f"ugro.{name}", []).append(_data_point(sample))
    metrics = [{"name": name, "gauge": {"dataPoints": points}} for name, points in by_name.items()]
    resource = {"attributes": [_text("service.name", "ugro"), _text("ugro.cluster", cluster)]}
    scope = {"scope": {"name": "ugro", "version": version}, "metrics": metrics}
    return json.dumps({"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}).encode()


def _line(sample: Sample, cluster: str) -> Iterator[str]:
    name = _name(sample)
    if not sample.is_sendable or not name:
        return
    tags = {"cluster": cluster, **_about(sample)}
    words = "".join(f",{tag}={_escaped(str(value))}" for tag, value in tags.items())
    step = f",step={sample.step}i" if name == "run" else ""
    yield f"ugro_{name}{words} value={sample.value!r}{step} {_time_ns(sample)}"


def _name(sample: Sample) -> str | None:
    if sample.owner.startswith(JOB):
        return "run"
    return "node" if sample.owner.startswith(NODE) else None


def _about(sample: Sample) -> dict[str, str | int]:
    if sample.owner.startswith(NODE):
        return {"metric": sample.key, "node": sample.owner.removeprefix(NODE)}
    job = sample.owner.removeprefix(JOB)
    return {"attempt": sample.attempt, "job": job, "metric": sample.key, "rank": sample.rank}


def _time_ns(sample: Sample) -> int:
    """Steps of a run that were written in one millisecond stay apart: InfluxDB keeps one point for each time."""
    apart = abs(sample.step) % _NS_PER_MS if sample.owner.startswith(JOB) else 0
    return sample.time_ms * _NS_PER_MS + apart


def _escaped(text: str) -> str:
    # A backslash at the end would escape what follows the value.
    plain = text.translate(_CONTROL)[:_LONGEST].strip().rstrip("\\") or "-"
    return plain.translate(_ESCAPED)


def _data_point(sample: Sample) -> dict[str, Any]:
    attributes = [_text(name, str(value)) for name, value in _about(sample).items()]
    return {"attributes": attributes, "timeUnixNano": str(_time_ns(sample)), "asDouble": sample.value}


def _text(name: str, value: str) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value}}


# --- destination ------------------------------------------------------------------------------------------------------
# The servers that metrics are sent to: the address, headers and body of a request. Secrets are read when needed.


_TIMEOUT_S = 20.0
_PATH = "/v1/metrics"  # of OTLP


class Destination(Protocol):
    @property
    def name(self) -> str: ...

    def send(self, samples: Sequence[Sample], cluster: str) -> int:
        """Blocks, and raises SendFailure. Returns how many points the server did not take, for good."""
        ...

    def will_never_take(self, status: int) -> bool:
        """Whether a request with this answer is not to be repeated."""
        ...


def destinations(section: ExportSection) -> list[Destination]:
    found: list[Destination] = []
    if section.influxdb is not None:
        found.append(Influx(section.influxdb))
    if section.otlp is not None:
        found.append(Otlp(section.otlp))
    return found


class Influx:
    name = "influxdb"

    def __init__(self, keys: InfluxKeys) -> None:
        self._keys = keys

    def send(self, samples: Sequence[Sample], cluster: str) -> int:
        body = as_lines(samples, cluster)
        if body:
            post(f"export to {self.name}", self._address(), body, self._headers(), _TIMEOUT_S)
        return 0

    def will_never_take(self, status: int) -> bool:
        return status in (400, 413, 422)

    def _address(self) -> str:
        keys = self._keys
        if keys.database is not None:
            path, query = "/write", {"db": keys.database, "precision": "ns"}
        else:
            path, query = "/api/v2/write", {"org": keys.org or "", "bucket": keys.bucket or "", "precision": "ns"}
        return f"{keys.url.rstrip('/')}{path}?{urlencode(query)}"

    def _headers(self) -> dict[str, str]:
        keys, headers = self._keys, _headers("text/plain; charset=utf-8")
        if keys.token_file is not None:
            headers["Authorization"] = f"Token {secret(f'export to {self.name}', keys.token_file)}"
        elif keys.user is not None and keys.password_file is not None:
            password = secret(f"export to {self.name}", keys.password_file)
            encoded = base64.b64encode(f"{keys.user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {encoded}"
        return headers


class Otlp:
    name = "otlp"

    def __init__(self, keys: OtlpKeys) -> None:
        self._keys = keys

    def send(self, samples: Sequence[Sample], cluster: str) -> int:
        headers = _headers("application/json")
        if self._keys.token_file is not None:
            headers["Authorization"] = f"Bearer {secret(f'export to {self.name}', self._keys.token_file)}"
        body = as_otlp(samples, cluster, ugro.__version__)
        return _rejected(post(f"export to {self.name}", self._address(), body, headers, _TIMEOUT_S))

    def will_never_take(self, status: int) -> bool:
        """The specification names the answers that may be repeated."""
        return status >= 400 and status not in (429, 502, 503, 504)

    def _address(self) -> str:
        endpoint = self._keys.endpoint.rstrip("/")
        return endpoint if endpoint.endswith(_PATH) else endpoint + _PATH


def _rejected(answer: bytes) -> int:
    """Of a partial success. A receiver may answer with nothing, and what is no such document rejects nothing."""
    try:
        found = foreign.parsed(answer)
        return max(0, int(found["partialSuccess"]["rejectedDataPoints"]))
    except (ValueError, TypeError, LookupError):
        return 0


def _headers(content_type: str) -> dict[str, str]:
    return {"User-Agent": f"ugro/{ugro.__version__}", "Content-Type": content_type}


# --- delivery ---------------------------------------------------------------------------------------------------------


_AT_ONCE = 5000  # points of one request
_MOST_SPLITS = 256  # of one file, and each is two requests more; one bad point among 5000 takes 12 or 13
_OF_THE_CONTENT = (400, 413, 422)  # answers that a part of the same points may not get


class Outcome(NamedTuple):
    """How many points of a request were taken, and how many nobody will take."""

    sent: int = 0
    dropped: int = 0
    why_dropped: str = ""


class Delivery:
    def __init__(self, samples: Sequence[Sample]) -> None:
        # Halves go to the end: when there are no more splits, all that is left is in pieces of about one size.
        self._pieces = deque(samples[begin : begin + _AT_ONCE] for begin in range(0, len(samples), _AT_ONCE))
        self._splits = _MOST_SPLITS

    @property
    def is_done(self) -> bool:
        return not self._pieces

    async def send_some(self, destination: Destination, cluster: str) -> Outcome:
        """One request. Raises SendFailure if the server takes nothing now: nothing has changed then."""
        piece = self._pieces[0]
        try:
            rejected = min(len(piece), await asyncio.to_thread(destination.send, piece, cluster))
            outcome = Outcome(len(piece) - rejected, rejected, "the server rejected them")
        except SendFailure as failure:
            if failure.status is None or not destination.will_never_take(failure.status):
                raise
            outcome = self._refused(piece, failure)
        self._pieces.popleft()
        return outcome

    def _refused(self, piece: Sequence[Sample], failure: SendFailure) -> Outcome:
        if len(piece) == 1 or failure.status not in _OF_THE_CONTENT or not self._splits:
            return Outcome(0, len(piece), f"it was refused: {failure}")
        self._splits -= 1
        middle = len(piece) // 2
        self._pieces += (piece[:middle], piece[middle:])
        return Outcome()


# --- spool ------------------------------------------------------------------------------------------------------------
# What waits to be sent, on disk: a folder of files, the oldest first, bounded in bytes. One process writes.
#
# Points are appended to an open file, which is sealed when it is to be sent or large enough. A sealed file's name has
# the number of its points, so that what is dropped can be counted without reading it.


_OPEN = "open"
_SUFFIX = ".jsonl"
LARGE = 1_000_000  # bytes of a file
_LEAST_FILES = 8  # of a full spool: the oldest is dropped, and not all of it


@dataclass(frozen=True, slots=True)
class Sealed:
    path: Path
    number: int
    points: int
    size: int


class Spool:
    """Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open = folder / _OPEN
        self._sealed = list(self._found())
        self._points = self._count_open()
        self.in_use: int | None = None  # the number of the file that is being sent: it is not dropped

    @property
    def size(self) -> int:
        return sum(one.size for one in self._sealed) + self._open_size

    @property
    def points(self) -> int:
        return sum(one.points for one in self._sealed) + self._points

    def add(self, samples: Iterable[Sample], limit: int) -> int:
        """Returns how many points were dropped to stay within ``limit`` bytes. Raises OSError."""
        lines = [json.dumps(sample) + "\n" for sample in samples]
        _append(self._open, "".join(lines).encode())
        self._points += len(lines)
        if self._open_size >= min(LARGE, limit // _LEAST_FILES):
            self.seal()
        return self._keep_within(limit)

    def seal(self) -> None:
        """What was added so far can be sent."""
        size = self._open_size
        if not size:
            return
        number = self._sealed[-1].number + 1 if self._sealed else 1
        path = self._folder / f"{number:012d}-{self._points}{_SUFFIX}"
        self._open.rename(path)
        self._sealed.append(Sealed(path, number, self._points, size))
        self._points = 0

    def oldest(self) -> Sealed | None:
        return self._sealed[0] if self._sealed else None

    def read(self, sealed: Sealed) -> list[Sample]:
        """A line that was cut by a crash is left out."""
        return [sample for line in sealed.path.read_bytes().splitlines() for sample in _samples(line)]

    def remove(self, sealed: Sealed) -> None:
        """It was sent, or nobody takes it."""
        sealed.path.unlink(missing_ok=True)
        self._sealed = [one for one in self._sealed if one.number != sealed.number]

    def _keep_within(self, limit: int) -> int:
        dropped = 0
        for sealed in [one for one in self._sealed if one.number != self.in_use]:
            if self.size <= limit:
                break
            dropped += sealed.points
            self.remove(sealed)
        return dropped

    @property
    def _open_size(self) -> int:
        try:
            return self._open.stat().st_size
        except FileNotFoundError:
            return 0

    def _count_open(self) -> int:
        """A line that was cut by a crash is removed: the next would be a part of it."""
        try:
            text = self._open.read_bytes()
        except FileNotFoundError:
            return 0
        if not text.endswith(b"\n"):
            os.truncate(self._open, text.rfind(b"\n") + 1)
        return text.count(b"\n")

    def _found(self) -> Iterator[Sealed]:
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            number, _, points = path.name.removesuffix(_SUFFIX).partition("-")
            if number.isdigit() and points.isdigit():
                yield Sealed(path, int(number), int(points), path.stat().st_size)


def _append(path: Path, text: bytes) -> None:
    """All of it or nothing: a disk that is full leaves no half of a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            while text:
                text = text[os.write(descriptor, text) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _samples(line: bytes) -> Iterator[Sample]:
    with contextlib.suppress(ValueError, TypeError):
        owner, attempt, rank, key, time_ms, step, value = json.loads(line)
        yield Sample(str(owner), int(attempt), int(rank), str(key), int(time_ms), int(step), float(value))
