"""A node that lies: a transport between the agent and a real node program, which adds forged frames to the true ones.

    transport: [PYTHON, LIAR.PY, LIES.JSON]

As long as ``LIES.JSON`` is there, what it says is added; it is read when the agent begins to watch the node's runs, and
again when it changes. Its keys, each of which may be left out:

    runs     statuses of runs, sent as if they were on the node
    count    how many more to send, of jobs from ``first`` on
    log      what is sent when the log of a forged run is asked for
    offset   how far the log of any other run is said to begin
    replies  by method, an answer that replaces the node's own

Every call is written to ``LIES.calls``, those about a forged run also to ``LIES.asked``. Only the standard library.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from ugro.node import wire

_READY = b" ready\n"
_AT_ONCE = 64
_LOOK_S = 0.05
_MOST_UNREAD = wire.WINDOW // 2  # the rest of what the agent takes is for what is true


def forged(job: int | str, attempt: float = 1, **more: Any) -> dict[str, Any]:
    """The status of a run that has ended well and has written files."""
    record = {"outcome": "succeeded", "reason": "all ranks ended", "ranks": [{"rank": 0, "code": 0}]}
    state = {"ranks": [{"rank": 0}]}
    about = {"job": str(job), "attempt": attempt, "status": "exited", "is_claimed": True, "claimed_in": "boot"}
    return {**about, "state": state, "exit": record, "has_outputs": True, **more}


class Liar:
    def __init__(self, lies: Path) -> None:
        self._lies = lies
        self._seen_at: float | None = None
        self._told: dict[str, Any] = {}
        self._child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._is_framed = False
        self._head = b""
        self._up, self._down = wire.Decoder(), wire.Decoder()
        self._watch: int | None = None
        self._now: Any = None  # what the node last said in its watch; known when it has said all of it
        self._pending: Iterator[dict[str, Any]] = iter(())
        self._shown: list[str] = []  # the names of forged runs that were sent
        self._chunks: deque[tuple[int, bool]] = deque()  # of the watch: their sizes, and whether they are forged
        self._ours: set[int] = set()  # calls that the node never hears of
        self._replaced: dict[int, Any] = {}

    def run(self) -> int:
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ, self._from_agent)
            selector.register(self._child.stdout.fileno(), selectors.EVENT_READ, self._from_node)
            while True:
                for key, _ in selector.select(_LOOK_S):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        self._child.kill()
                        return self._child.wait()
                    key.data(data)
                self._lie()

    # --- agent to node ------------------------------------------------------------------------------------------

    def _from_agent(self, data: bytes) -> None:
        if not self._is_framed:
            self._to_node(data)
            return
        for kind, number, payload in self._up.feed(data):
            if self._is_for_node(kind, number, payload):
                self._to_node(wire.frame(kind, number, payload))

    def _is_for_node(self, kind: int, number: int, payload: bytes) -> bool:
        if kind == wire.CALL:
            call = wire.parse(payload)
            return self._call(number, call["method"], call["params"])
        if kind == wire.CREDIT and number == self._watch:
            return not self._chunks.popleft()[1]
        return number not in self._ours or kind in (wire.PING, wire.PONG)

    def _call(self, number: int, method: str, params: dict[str, Any]) -> bool:
        self._note("calls", f"{method} {params.get('what', '')}")
        if method == "runs.watch":
            self._watch, self._seen_at, self._now, self._pending, self._shown = number, None, None, iter(()), []
            self._chunks.clear()
            return True
        if method in self._told.get("replies", {}):
            self._replaced[number] = self._told["replies"][method]
            return True
        if self._is_forged(params):
            self._ours.add(number)
            self._note("asked", f"{method} {params.get('job')} {params.get('runs')}")
            self._answer(number, method)
            return False
        if method == "runs.follow" and "offset" in self._told:
            self._ours.add(number)
            self._send(wire.ERR, number, json.dumps({"offset": self._told["offset"]}).encode())
            self._send(wire.OUT, number, b"ten bytes\n")
            self._send(wire.RESULT, number, json.dumps({"offset": 0}).encode())
            return False
        return True

    def _note(self, what: str, text: str) -> None:
        with self._lies.with_suffix(f".{what}").open("a") as file:
            file.write(f"{text}\n")

    def _is_forged(self, params: dict[str, Any]) -> bool:
        names = {(run["job"], run["attempt"]) for run in self._told.get("runs", ())}
        asked = [(params.get("job"), params.get("attempt")), *(tuple(run) for run in params.get("runs", ()) if run)]
        return any(one in names for one in asked if all(isinstance(part, str | int) for part in one))

    def _answer(self, number: int, method: str) -> None:
        now = {"now": self._now}
        if method == "runs.follow":
            self._send(wire.OUT, number, self._told.get("log", "forged\n").encode())
        elif method == "files.list":
            self._send(wire.OUT, number, json.dumps(["forged.txt", 3, 1, 1, None, False]).encode() + b"\n")
        answer = {**now, "offset": 0, "unlisted": 0, "now_ns": 1, "results": [{}]}
        self._send(wire.RESULT, number, json.dumps(answer).encode())

    def _to_node(self, data: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(data)
        self._child.stdin.flush()

    # --- node to agent ------------------------------------------------------------------------------------------

    def _from_node(self, data: bytes) -> None:
        if not self._is_framed:
            self._head += data
            begin, ready, rest = self._head.partition(_READY)
            if not ready:
                _write(data)
                return
            self._is_framed = True
            _write((begin + ready)[len(self._head) - len(data) :])
            data = rest
        for kind, number, payload in self._down.feed(data):
            if number == self._watch and kind == wire.OUT:
                self._chunks.append((len(payload), False))
                document = wire.parse(payload)
                if self._now is not None or not document.get("has_more"):
                    self._now = document["now"]
            if kind == wire.RESULT and number in self._replaced:
                payload = json.dumps({**wire.parse(payload), **self._replaced.pop(number)}).encode()
            self._send(kind, number, payload)

    def _send(self, kind: int, number: int, payload: bytes) -> None:
        _write(wire.frame(kind, number, payload))

    # --- lies ---------------------------------------------------------------------------------------------------

    def _lie(self) -> None:
        """After what is true was said, and again when the lies change."""
        if self._watch is None or self._now is None:
            return
        changed_at = self._lies.stat().st_mtime if self._lies.exists() else None
        if changed_at != self._seen_at:
            self._seen_at = changed_at
            self._told = json.loads(self._lies.read_text()) if changed_at is not None else {}
            self._pending = self._documents()
            self._note("calls", "lies" if self._told else "the truth")
        while sum(size for size, _ in self._chunks) < _MOST_UNREAD and (document := next(self._pending, None)):
            payload = json.dumps({"now": self._now, **document}).encode()
            self._chunks.append((len(payload), True))
            self._send(wire.OUT, self._watch, payload)

    def _documents(self) -> Iterator[dict[str, Any]]:
        """Those of before are gone."""
        for place in range(0, len(self._shown), _AT_ONCE):
            yield {"runs": [], "gone": self._shown[place : place + _AT_ONCE]}
        first = self._told.get("first", 10**6)
        runs = [*self._told.get("runs", ()), *(forged(first + place) for place in range(self._told.get("count", 0)))]
        self._shown = [f"{run['job']}.{run['attempt']}" for run in runs]
        for place in range(0, len(runs), _AT_ONCE):
            yield {"runs": runs[place : place + _AT_ONCE]}


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(Liar(Path(sys.argv[1])).run())
