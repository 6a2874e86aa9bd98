"""What a door must not forget: servers, keys, and the share of canaries. One file, from which HAProxy is started."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ugro.policy.serving.door_config import WAITING
from ugro.workloads.on_node.processes import say

MOST_SERVERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_HASH = re.compile(r"[0-9a-f]{64}")
_MOST_WEIGHT, _MOST_LIMIT = 256, 100_000


class InvalidError(Exception):
    """A request that cannot be done, in words."""


class Records:
    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "door.json")
        os.makedirs(folder, 0o700, exist_ok=True)
        self.servers: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.share = 0  # of the canaries, in thousandths
        self._next = 1
        self._load()

    def add(self, given: Mapping[str, Any]) -> dict[str, Any]:
        server = _server(given)
        if len(self.servers) >= MOST_SERVERS:
            raise InvalidError(f"a door has at most {MOST_SERVERS} servers")
        server["number"], self._next = self._next, self._next + 1
        self.servers[server["name"]] = server
        self.save()
        return server

    def drop(self, name: str) -> None:
        self.servers.pop(name, None)
        self.save()

    def set_keys(self, keys: Mapping[str, str]) -> None:
        self.keys = checked_keys(keys)
        self.save()

    def save(self) -> None:
        document = {"servers": self.servers, "keys": self.keys, "share": self.share, "next": self._next}
        temporary = f"{self._path}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def _load(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            servers = {str(name): {**one, **_server(one)} for name, one in found["servers"].items()}
            keys = checked_keys(found["keys"])
            self.servers, self.keys = servers, keys
            self.share, self._next = int(found["share"]), int(found["next"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, InvalidError) as error:
            # Nobody is let in who should not be, and the agent adds the servers again.
            say(f"{self._path} is damaged ({error!r}): the door begins without servers and keys")
            os.replace(self._path, f"{self._path}.damaged")


def checked_keys(given: Mapping[str, str]) -> dict[str, str]:
    for digest, name in given.items():
        if not _HASH.fullmatch(digest) or not _NAME.fullmatch(name):
            raise InvalidError(f"no key: {digest[:12]!r}, {name[:80]!r}")
    return dict(given)


def _server(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked: it becomes words of HAProxy's configuration."""
    name = str(given["name"])
    if not _NAME.fullmatch(name) or name == WAITING:
        raise InvalidError(f"no name for a server: {name[:80]!r}")
    return {
        "name": name,
        "address": _address(str(given["address"])),
        "port": _number(given, "port", 1, 65535),
        "weight": _number(given, "weight", 1, _MOST_WEIGHT),
        "limit": _number(given, "limit", 0, _MOST_LIMIT),
        "canary": bool(given.get("canary")),
        "is_draining": bool(given.get("is_draining")),
    }


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise InvalidError(f"no IP address: {text[:80]!r}") from None


def _number(given: Mapping[str, Any], key: str, least: int, most: int) -> int:
    found = int(given[key])
    if not least <= found <= most:
        raise InvalidError(f"{key} {found} is not between {least} and {most}")
    return found


def weight_of(given: Mapping[str, Any]) -> int:
    return _number(given, "weight", 1, _MOST_WEIGHT)
