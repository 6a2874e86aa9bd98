"""What the server counts, as Prometheus' text. Counted from the event loop and from the threads that compute."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ugro.telemetry.prometheus import Family, Histogram, exposition

PREFIX = "ugro_inference"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._cancelled = 0
        self._tokens: Counter[str] = Counter()
        self._latency: dict[str, Histogram] = {}
        self._batches = Histogram(_SIZES)
        self.waiting: Callable[[], int] = lambda: 0
        self.running: Callable[[], int] = lambda: 0
        self.is_ready: Callable[[], bool] = lambda: False

    def answered(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            self._latency.setdefault(path, Histogram(_SECONDS)).observe(seconds)

    def gone(self) -> None:
        """A client that did not wait for its answer."""
        with self._lock:
            self._cancelled += 1

    def batch(self, size: int) -> None:
        with self._lock:
            self._batches.observe(size)

    def tokens(self, kind: str, count: int) -> None:
        with self._lock:
            self._tokens[kind] += count

    def text(self) -> str:
        with self._lock:
            return exposition(self._families())

    def _families(self) -> list[Family]:
        requests = Family(f"{PREFIX}_requests_total", "counter", "Requests that were answered, by path and status.")
        errors = Family(f"{PREFIX}_errors_total", "counter", "Requests that were answered with 500 or above, by path.")
        latency = Family(f"{PREFIX}_request_seconds", "histogram", "Time until the end of the answer, by path.")
        for (path, status), count in sorted(self._requests.items()):
            requests.add(count, path=path, status=status)
        for path in sorted(self._latency):
            failed = sum(count for (one, status), count in self._requests.items() if one == path and status >= 500)
            errors.add(failed, path=path)
            latency.add_histogram(self._latency[path], path=path)
        tokens = Family(f"{PREFIX}_tokens_total", "counter", "Tokens that were read (prompt) and written (generated).")
        for kind in ("prompt", "generated"):
            tokens.add(self._tokens[kind], kind=kind)
        batches = Family(f"{PREFIX}_batch_size", "histogram", "How many were computed together, in each step.")
        batches.add_histogram(self._batches)
        gauges = [
            _one("cancelled_total", "counter", "Requests whose client did not wait for the end.", self._cancelled),
            _one("queue", "gauge", "Requests or texts that wait.", self.waiting()),
            _one("running", "gauge", "Requests or texts that are computed.", self.running()),
            _one("ready", "gauge", "1 if the model can answer.", self.is_ready()),
        ]
        return [requests, errors, latency, tokens, batches, *gauges]


def _one(name: str, kind: str, text: str, value: float) -> Family:
    family = Family(f"{PREFIX}_{name}", kind, text)
    family.add(value)
    return family
