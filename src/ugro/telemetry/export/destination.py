"""The servers that metrics are sent to: the address, headers and body of a request. Secrets are read when needed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlencode

import ugro
from ugro.config.export import ExportSection, InfluxKeys, OtlpKeys
from ugro.remote import foreign
from ugro.telemetry.channels import post, secret
from ugro.telemetry.export.encoding import Sample, as_lines, as_otlp

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
