"""The sections ``team`` and ``api``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.kernel.access.config import Address
from ugro.kernel.access.model import Role
from ugro.kernel.config.kinds import BadValueError
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config
from ugro.kernel.support.errors import ConfigError


def config(text: str) -> Config:
    return parse_config(f"nodes: [a]\n{text}", Path("/c/cluster.yaml"), {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:8443", ("127.0.0.1", 8443)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:443", ("::1", 443)),
        ("[::]:8443", ("::", 8443)),
    ],
)
def test_an_address_is_read_and_written(text: str, found: tuple[str, int]) -> None:
    assert Address().parse(text) == found
    assert Address().written(found) == text


@pytest.mark.parametrize(
    "text",
    ["8443", ":8443", "localhost:8443", "1.2.3.4", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:65536", "::1:443", "[1.2.3.4]:1"],
)
def test_what_is_no_address_is_refused(text: object) -> None:
    with pytest.raises(BadValueError, match="an address and a port"):
        Address().parse(text)


def test_a_team_has_roles() -> None:
    team = config("team: {group: gpu, roles: {ann: operator}}").team
    assert (team.group, team.roles, team.default_role) == ("gpu", {"ann": Role.OPERATOR}, Role.USER)
    with pytest.raises(ConfigError, match="expected viewer, user, operator or admin"):
        config("team: {group: gpu, roles: {ann: king}}")


def test_beyond_loopback_there_is_tls() -> None:
    assert config("api: {bind: '127.0.0.1:1'}").api.tls is None
    assert config("api: {bind: '0.0.0.0:1', tls: {cert: /c.pem}}").api.bind == ("0.0.0.0", 1)
    with pytest.raises(ConfigError, match="beyond loopback, it needs TLS"):
        config("api: {bind: '0.0.0.0:1'}")
    with pytest.raises(ConfigError, match="there is no certificate"):
        config("api: {bind: '0.0.0.0:1', tls: {key: /k.pem}}")
