"""Asks a server on this node whether it has started, is ready and is alive, in a thread of its own."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

# --- figures ----------------------------------------------------------------------------------------------------------
# What a server says about itself at ``/metrics``: tokens, and how many requests it computes together.
#
# Engines name these differently. A server that has no such page is asked once.


_FIRST_S, _EVERY_S, _RARELY_S = 2.0, 10.0, 60.0
_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 20
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^\n}]*)\})? +([0-9.eE+-]+)", re.MULTILINE)
_KIND = re.compile(r'kind="(\w+)"')
_PROMPT = ("ugro_inference_tokens_total.prompt", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total",
           "llamacpp:prompt_tokens_total", "tgi_request_input_length_sum")  # fmt: skip
_GENERATED = ("ugro_inference_tokens_total.generated", "vllm:generation_tokens_total", "sglang:generation_tokens_total",
              "llamacpp:tokens_predicted_total", "tgi_request_generated_tokens_sum")  # fmt: skip
_AT_ONCE = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing",
            "tgi_batch_current_size")  # fmt: skip
_BATCHES = "ugro_inference_batch_size"


class FiguresReader(threading.Thread):
    """Calls ``say(figures)`` when they have changed."""

    def __init__(
        self, place: tuple[str, int], key_file: str | None, say: Callable[[dict[str, float | None]], None]
    ) -> None:
        super().__init__(daemon=True, name="figures")
        self._host, self._port = place
        self._key_file = key_file
        self._say = say
        self._before: Mapping[str, float] = {}
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        pause_s = _FIRST_S
        while not self._is_over.wait(pause_s):
            try:
                status, text = self._asked()
            except (OSError, http.client.HTTPException):
                continue  # it starts, or is busy; its probes say so
            if status in (404, 405, 501):
                return
            pause_s = _EVERY_S if status == 200 and self._look(text) else _RARELY_S

    def _look(self, text: str) -> bool:
        """Whether there was something to see."""
        now = values(text)
        found = figures(now, self._before)
        self._before = now
        if found and not self._is_over.is_set():
            self._say(found)
        return bool(found)

    def _asked(self) -> tuple[int, str]:
        headers = {"User-Agent": "ugro-figures", "Connection": "close"}
        if self._key_file is not None:
            with open(self._key_file, encoding="ascii") as file:
                headers["Authorization"] = f"Bearer {file.read()}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES).decode("utf-8", "replace")
        finally:
            connection.close()


def values(text: str) -> dict[str, float]:
    """The sums over all labels but ``kind``, which becomes a part of the name."""
    found: dict[str, float] = {}
    for name, labels, number in _LINE.findall(text):
        kind = _KIND.search(labels)
        key = f"{name}.{kind[1]}" if kind else name
        try:
            found[key] = found.get(key, 0.0) + float(number)
        except ValueError:
            continue
    return found


def figures(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float | None]:
    """Empty if the server says nothing of the kind."""
    found = {
        "prompt_tokens": _first(now, _PROMPT),
        "generated_tokens": _first(now, _GENERATED),
        "batch_size": _mean_batch(now, before),
    }
    return found if any(value is not None for value in found.values()) else {}


def _first(now: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((now[name] for name in names if name in now), None)


def _mean_batch(now: Mapping[str, float], before: Mapping[str, float]) -> float | None:
    """Of the steps since the last look; 0: there was none. Other engines say how many they compute now."""
    if f"{_BATCHES}_count" not in now:
        return _first(now, _AT_ONCE)
    count, total = (now.get(name, 0.0) - before.get(name, 0.0) for name in (f"{_BATCHES}_count", f"{_BATCHES}_sum"))
    return total / count if count > 0 else 0.0


# --- probing ----------------------------------------------------------------------------------------------------------


Settings = Mapping[str, Any]
_LONGEST_S = 5.0  # of one request while the server starts
_PROBING_MOST_BYTES = 65536


class Prober(threading.Thread):
    """Calls ``say(state, reason)`` when that changes, and ``give_up(reason)`` when the server must be started again."""

    def __init__(
        self,
        probes: Settings,
        place: tuple[str, int],
        say: Callable[[str, str], None],
        give_up: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True, name="probe")
        self._probes = probes
        self._host, self._port = place
        self._say = say
        self._give_up = give_up
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        if self._starts():
            self._watch()

    def _starts(self) -> bool:
        start = self._probes["start"]
        deadline = time.monotonic() + start["timeout_s"]
        while not self._is_over.is_set():
            problem = self._ask(start, min(_LONGEST_S, start["timeout_s"]))
            if problem is None or self._is_over.is_set():  # what it asked may be gone, and the next one there
                return problem is None
            if time.monotonic() > deadline:
                self._give_up(f"not started within {start['timeout_s']:g} s: {problem}")
                return False
            self._say("starting", problem)
            self._is_over.wait(start["interval_s"])
        return False

    def _watch(self) -> None:
        counts = {"ready": 0, "live": 0}
        due = dict.fromkeys(counts, 0.0)
        while not self._is_over.is_set():
            for name in counts:
                if time.monotonic() >= due[name] and not self._is_over.is_set():
                    probe = self._probes[name]
                    problem = self._ask(probe, probe["timeout_s"])
                    due[name] = time.monotonic() + probe["interval_s"]
                    counts[name] = 0 if problem is None else counts[name] + 1
                    self._judge(name, problem, counts[name] >= probe["failures"])
            self._is_over.wait(max(0.01, min(due.values()) - time.monotonic()))

    def _judge(self, name: str, problem: str | None, is_final: bool) -> None:
        if self._is_over.is_set():
            return
        if name == "ready" and problem is None:
            self._say("ready", "")
        elif name == "ready" and is_final:
            self._say("unready", f"not ready: {problem}")
        elif name == "live" and is_final:
            self._give_up(f"not alive: {problem}")

    def _ask(self, probe: Settings, timeout_s: float) -> str | None:
        """What is wrong, in words; None: nothing."""
        try:
            if probe["path"] is None:
                socket.create_connection((self._host, self._port), timeout_s).close()
                return None
            return self._answer(probe, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            what = str(getattr(error, "strerror", None) or error or type(error).__name__).lower()
            return f"{self._host}:{self._port}: {what}"

    def _answer(self, probe: Settings, timeout_s: float) -> str | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request("GET", probe["path"], headers={"User-Agent": "ugro-probe", "Connection": "close"})
            answer = connection.getresponse()
            text = answer.read(_PROBING_MOST_BYTES)
        finally:
            connection.close()
        low, high = probe["status"]
        if low <= answer.status <= high:
            return None
        shown = " ".join(text.decode("utf-8", "replace").split())[:200]
        return f"{probe['path']} answers {answer.status}" + (f": {shown}" if shown else "")
