"""The section ``export`` of the cluster file: where metrics of nodes and jobs are sent, besides the metric store."""

from __future__ import annotations

import re

from ugro.features.discovery.config import OneMap
from ugro.kernel.config.kinds import BadValueError, ByteCount, Duration, Text
from ugro.kernel.config.section import LINE, LOCAL_PATH, Section, is_line, key, section

_ADDRESS = re.compile(r"https?://(?:[^/\s@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?(/[^\s@?#]*)?", re.ASCII)
# Without a user name, password or query: `ugro allow` and messages show it.
_URL = Text(
    "an address such as http://influx.lan:8086, without a password",
    lambda text: is_line(text) and _ADDRESS.fullmatch(text) is not None,
)


@section
class InfluxKeys(Section):
    """An InfluxDB server: with `org` and `bucket` version 2 or newer, with `database` version 1."""

    noun = "influxdb"

    url: str = key("", _URL, "The server's address.", example="http://influx.lan:8086")
    org: str | None = key(None, LINE, "The organisation, in version 2.", example="lab")
    bucket: str | None = key(None, LINE, "The bucket, in version 2.", example="ugro")
    token_file: str | None = key(
        None, LOCAL_PATH, "A file with the token, in version 2.", example="~/.ugro/influx_token"
    )
    database: str | None = key(None, LINE, "The database, in version 1. It must exist.", example="ugro")
    user: str | None = key(None, LINE, "The user name, in version 1.", example="ugro")
    password_file: str | None = key(
        None, LOCAL_PATH, "A file with the password, in version 1.", example="~/.ugro/influx_password"
    )

    def check(self) -> None:
        if not self.url:
            raise BadValueError("it has no address", hint="give url, such as http://influx.lan:8086")
        is_second = self.org is not None or self.bucket is not None or self.token_file is not None
        is_first = self.database is not None or self.user is not None or self.password_file is not None
        if is_first == is_second:
            raise BadValueError("it is not clear which version it is", hint="give org and bucket, or database")
        if is_second and (self.org is None or self.bucket is None):
            raise BadValueError("version 2 needs an organisation and a bucket", hint="give org and bucket")
        if is_first and self.database is None:
            raise BadValueError("version 1 needs a database", hint="give database")
        if (self.user is None) != (self.password_file is None):
            raise BadValueError("a user needs a password", hint="give user and password_file")


@section
class OtlpKeys(Section):
    """A receiver of OpenTelemetry's protocol, over HTTP with JSON."""

    noun = "otlp"

    endpoint: str = key(
        "",
        _URL,
        "The receiver's address. `/v1/metrics` is added, unless it ends so.",
        example="http://collector.lan:4318",
    )
    token_file: str | None = key(
        None, LOCAL_PATH, "A file with a token, sent as `Authorization: Bearer`.", example="~/.ugro/otlp_token"
    )

    def check(self) -> None:
        if not self.endpoint:
            raise BadValueError("it has no address", hint="give endpoint, such as http://collector.lan:4318")


@section
class ExportSection(Section):
    """Where metrics of nodes and jobs are sent. Off by default. See docs/monitoring.md."""

    noun = "export"

    influxdb: InfluxKeys | None = key(
        None,
        OneMap(InfluxKeys, "a map of url, org and bucket, or of url and database"),
        "An InfluxDB server.",
        example={"url": "http://influx.lan:8086", "database": "ugro"},
    )
    otlp: OtlpKeys | None = key(
        None,
        OneMap(OtlpKeys, "a map of endpoint and token_file"),
        "A receiver of OpenTelemetry's protocol.",
        example={"endpoint": "http://collector.lan:4318"},
    )
    interval: float = key(10.0, Duration(), "How often they are sent.")
    spool_limit: int = key(
        100_000_000,
        ByteCount(),
        "The most space for what waits while a server is away, for each server. Above it, the oldest is dropped, "
        "counted and reported.",
    )
