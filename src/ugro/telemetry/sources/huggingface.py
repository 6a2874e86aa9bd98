"""Hugging Face's Trainer: the lines that it prints, and its ``trainer_state.json``.

A line is ``{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}``, without a step. The progress bar before it has one;
where the bar is not in the log, or not in order with the lines, the lines of the loss are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ugro.core.metrics import TOTAL_STEPS
from ugro.remote import foreign
from ugro.telemetry.sources.reading import AT_ONCE, LARGEST, Origin, Piece, Reading, number, real, whole_lines

_LONGEST_LINE = 8192
_VALUE = rb"'?(?:[+-]?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))'?"
_PAIR = re.compile(rb"'([^'\\]{1,200})': '?([+-]?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))'?")
_LINE = re.compile(rb"\{'[^'\\]{1,200}': " + _VALUE + rb"(?:, '[^'\\]{1,200}': " + _VALUE + rb")*\}")
_BAR = re.compile(rb"\s*\d{1,3}%\|[^|]{0,400}\|\s*(\d{1,15})/(\d{1,15}) \[")
_AXES = frozenset({"epoch", "step"})
_COUNTED = "loss"
_MOST_ENTRIES = 100_000

Line = dict[str, float]


def read_log(piece: Piece) -> Reading:
    content = whole_lines(piece)
    reading = Reading(end=len(content), state=piece.state)
    if b"{'" not in content:
        return reading
    clock = _Clock(piece.state)
    found = list(_lines(content))
    clock.choose(found)
    for one in found:
        if isinstance(one, tuple):
            clock.see_bar(*one)
        else:
            step = clock.step_of(one)
            for name, value in one.items():
                if name not in _AXES:
                    reading.add(Origin.LOG, name, step, 0.0, value)
    if reading.points:
        reading.state = clock.state()
    return reading


def _lines(content: bytes) -> Iterator[Line | tuple[int, int]]:
    """The lines with values, and the bars (step, number of steps) between them."""
    for text in re.split(rb"[\r\n]+", content):
        if len(text) > _LONGEST_LINE:
            continue
        if bar := _BAR.match(text):
            yield int(bar[1]), int(bar[2])
        elif text.lstrip().startswith(b"{'") and _LINE.fullmatch(text.strip()):
            values = {name.decode("utf-8", "replace"): float(value) for name, value in _pairs(text)}
            if _AXES & values.keys():
                yield values


def _pairs(text: bytes) -> Iterator[tuple[bytes, float]]:
    for name, value in _PAIR.findall(text):
        if (found := number(value)) is not None:
            yield name, found


class _Clock:
    """The step of a line."""

    def __init__(self, state: str) -> None:
        try:
            mode, *numbers = state.split()
            self._mode = mode
            self._step, self._total, self._count = (int(one) for one in numbers)
        except ValueError:
            self._mode = ""
            self._step = self._total = self._count = 0

    def state(self) -> str:
        return f"{self._mode} {self._step} {self._total} {self._count}"

    def choose(self, found: list[Line | tuple[int, int]]) -> None:
        """Lines that come without a bar between them were held back in a buffer: then bars say nothing about them."""
        is_bar_new = False
        for one in found:
            if isinstance(one, tuple):
                is_bar_new = True
            elif _COUNTED in one:
                if not is_bar_new:
                    self._mode = "count"
                is_bar_new = False
        self._mode = self._mode or "bar"

    def see_bar(self, step: int, total: int) -> None:
        """The first bar is the training's; those of an evaluation have another number of steps."""
        self._total = self._total or total
        if total == self._total:
            self._step = max(self._step, step)

    def step_of(self, line: Line) -> int:
        if _COUNTED in line:
            self._count += 1
        own = line.get("step")
        if own is not None and own.is_integer() and abs(own) < LARGEST:
            return int(own)
        return self._step if self._mode == "bar" else self._count


def read_state(piece: Piece) -> Reading:
    """The whole history so far; a later file repeats the earlier one and the store keeps what is new."""
    reading = Reading()
    if piece.size > AT_ONCE or piece.offset:
        reading.end = len(piece.content)
        return reading
    try:
        state = foreign.parsed(piece.content, AT_ONCE)
        history = state["log_history"]
    except (ValueError, KeyError, TypeError):
        return reading  # not complete yet
    reading.end = len(piece.content)
    step, total = state.get("global_step"), real(state.get("max_steps"))
    if type(step) is int and total is not None and total > 0:
        reading.add(Origin.TRAINER_STATE, TOTAL_STEPS, step, 0.0, total)
    for entry in history[:_MOST_ENTRIES] if isinstance(history, list) else ():
        _add_entry(reading, entry)
    return reading


def _add_entry(reading: Reading, entry: Any) -> None:
    if not isinstance(entry, dict) or type(step := entry.get("step")) is not int:
        return
    for name, value in entry.items():
        if name not in _AXES and (found := real(value)) is not None:
            reading.add(Origin.TRAINER_STATE, name, step, 0.0, found)
