"""``client.environments``: the part of the Python API for Python environments on nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ugro.client.http import asked_for, lines, path_of
from ugro.features.environments.model import EnvListing, EnvRemoval, KeptEnvironment, Setup, SetupStep
from ugro.kernel.support.codec import decode

_REMOVE_S = 600.0  # an environment has a hundred thousand files


class Environments:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._ask = ask
        self._stream = stream

    def setup(
        self,
        nodes: Sequence[str] = (),
        *,
        file: Path | None = None,
        fields: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[SetupStep | Setup]:
        """Makes an environment on nodes (default: all): that of a job file, of fields, or of the cluster file.

        Of ``env`` (default: this process's environment), only variables that the environment names are sent. Yields how
        far each node is, and at the end the versions on all of them. Closing the iterator stops it.
        """
        body: dict[str, Any] = {
            "nodes": list(nodes),
            "file": os.path.abspath(file) if file is not None else None,
            "fields": dict(fields or {}),
            "here": os.getcwd(),
        }
        for document in self._setting_up(body):
            if "needs" in document:
                body["env"] = asked_for(document["needs"], env)
                yield from map(_update, self._setting_up(body))
            else:
                yield _update(document)

    def _setting_up(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        # No time limit: a large package may take an hour on a slow line.
        return lines(self._stream("POST", "/v1/setup", body, timeout_s=None))

    def list(self, nodes: Sequence[str] = ()) -> EnvListing:
        return decode(EnvListing, self._ask("GET", f"/v1/environments{_query(nodes)}"))

    def show(self, name: str) -> KeptEnvironment:
        """The first letters of a name are enough."""
        return decode(KeptEnvironment, self._ask("GET", path_of("environments", name))["environment"])

    def remove(self, name: str, nodes: Sequence[str] = ()) -> tuple[EnvRemoval, ...]:
        path = f"{path_of('environments', name)}{_query(nodes)}"
        return _removals(self._ask("DELETE", path, timeout_s=_REMOVE_S))

    def gc(
        self, nodes: Sequence[str] = (), *, unused_s: float | None = None, everything: bool = False
    ) -> tuple[EnvRemoval, ...]:
        """Removes unused environments above the size limit, and those that were not used for ``unused_s``.

        ``everything``: also those that were used just now, and not by a job that runs.
        """
        body = {"nodes": list(nodes), "unused_s": unused_s, "everything": everything}
        return _removals(self._ask("POST", "/v1/environments/gc", body, timeout_s=_REMOVE_S))


def _update(document: Mapping[str, Any]) -> SetupStep | Setup:
    if "setup" in document:
        return decode(Setup, document["setup"])
    return decode(SetupStep, document["step"])


def _removals(answer: Any) -> tuple[EnvRemoval, ...]:
    return tuple(decode(EnvRemoval, one) for one in answer["nodes"])


def _query(nodes: Sequence[str]) -> str:
    return "?" + urlencode([("node", node) for node in nodes]) if nodes else ""
