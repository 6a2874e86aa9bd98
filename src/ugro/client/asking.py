"""What ``client.sweeps`` and ``client.services`` have in common: requests that may be repeated, until one is answered.

A submission has a key, so the same one is made once. If the agent needs variables of ours for it, it says which, and
gets those on the second request, and no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from ugro.client.http import AgentGone, lines
from ugro.client.jobs import Ask
from ugro.client.retrying import trying_again
from ugro.client.variables import asked_for
from ugro.core.support.codec import decode

ANSWER_S = 60.0
T = TypeVar("T", bound="Report")


class Report(Protocol):
    @property
    def is_over(self) -> bool: ...


class Asking:
    def __init__(self, ask: Ask, stream: Ask) -> None:
        self._ask_once = ask
        self._stream = stream

    def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        """Asks again if the agent ends meanwhile: all these requests can be repeated safely."""
        for _ in trying_again():
            with contextlib.suppress(AgentGone):
                return self._ask_once(method, path, body, timeout_s=timeout_s)
        return None

    def _submitted(
        self, path: str, body: dict[str, Any], env: Mapping[str, str] | None, *, timeout_s: float = ANSWER_S
    ) -> Any:
        """``env``: ours, if it is not given."""
        answer = self._ask("POST", path, body, timeout_s=timeout_s)
        if "needs" in answer:
            (body.get("request") or body)["submit"]["env"] = asked_for(answer["needs"], env)
            answer = self._ask("POST", path, body, timeout_s=timeout_s)
        return answer

    def _watched(self, kind: type[T], path: str, path_of: Callable[[T], str]) -> Iterator[T]:
        """Now and after changes, until it is over; survives the end of the agent. ``path_of`` what was found once."""
        for again in trying_again():
            try:
                for document in lines(self._stream("GET", path, timeout_s=None)):
                    found = decode(kind, document)
                    path = path_of(found)
                    again()
                    yield found
                    if found.is_over:
                        return
            except AgentGone:
                continue
