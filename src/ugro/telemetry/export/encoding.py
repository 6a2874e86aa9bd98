"""Points as other systems take them: InfluxDB's line protocol, and OpenTelemetry's protocol as JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ugro.telemetry.metricstore import JOB, NODE

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
