"""Sends batches of all maps of a pool to its slots, and books their answers.

There is no thread: this runs while a result is read. What to send and to whom is decided by ``rules``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ugro.features.batches.model import (
    Answered,
    Engine,
    Event,
    FunctionUnusable,
    PoolBroken,
    PoolClosed,
    SlotLost,
    SlotReady,
)
from ugro.features.batches.rules import Failed, Piece, takes_another
from ugro.features.batches.run import Death, Run
from ugro.features.batches.worker import UNREADABLE, attempt, dumped, loaded, size_of
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.quantities import format_duration

_LOAD = 0  # the number of the batch without items that loads a function
_POLL_S = 0.005  # between two looks at the engine while results are read
_PATIENCE_S = 0.5  # with a slot that runs a batch nobody wants any more
_CANCELLED, _TIMED_OUT = "cancelled", "timed out"  # why a slot was ended
_MOST_BARREN = 4  # slots that end one after the other without having done anything


@dataclass(frozen=True, slots=True)
class _Sent:
    run: Run
    batch: int
    expected_s: float | None
    budget_s: float
    is_suspect: bool


@dataclass(slots=True)
class _Slot:
    number: int
    node: str
    sent: deque[_Sent] = field(default_factory=deque)  # the oldest first
    since: float = 0.0  # the oldest was begun, or could have been
    forget: list[str] = field(default_factory=list)  # names that were withdrawn
    ended_for: str = ""  # why we ended it

    def waiting_s(self) -> float | None:
        known = [one.expected_s for one in self.sent if one.batch != _LOAD]
        return None if any(one is None for one in known) else sum(one or 0.0 for one in known)


class Dispatcher:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.next_poll = 0.0
        self._slots: dict[int, _Slot] = {}
        self._runs: deque[Run] = deque()
        self._expected = engine.start()  # slots that are alive or being started
        self._barren = 0
        self._is_closed = False
        self._left_at = time.monotonic()

    @property
    def nodes(self) -> list[str]:
        return [slot.node for slot in self._slots.values()]

    def started(self) -> int:
        while len(self._slots) < self._expected:
            self.pump(is_waiting=True)
        return len(self._slots)

    def add(self, run: Run) -> None:
        self._runs.append(run)
        self.pump(is_waiting=False)

    def drop(self, run: Run, *, is_hurried: bool = False) -> None:
        """Nobody reads its results any more. ``is_hurried``: after Ctrl-C, all that runs is ended at once.

        Also what runs for other maps: Ctrl-C may have come between the arrival of an answer and its booking.
        """
        if run.is_over:
            return
        run.is_over = True
        run.ledger.give_up()
        if run in self._runs:
            self._runs.remove(run)
        for slot in self._slots.values():
            if is_hurried and slot.sent:
                self._end(slot, _CANCELLED)

    def close(self) -> None:
        self._is_closed = True
        for run in self._runs:
            run.error = PoolClosed("the pool was closed before all results were read")
        self._slots.clear()
        self.engine.close()

    def forget(self, name: str) -> None:
        if self._is_closed:
            return
        self.engine.withdraw(name)
        for slot in self._slots.values():
            slot.forget.append(name)

    def pump(self, *, is_waiting: bool, at_most_s: float | None = None) -> None:
        """Books what happened and sends what it can. ``is_waiting``: not before something has happened."""
        if self._is_closed:
            return
        self._excuse()
        self._fill()
        timeout_s = self._timeout_s(at_most_s) if is_waiting else 0.0
        if is_waiting and not self._expected:
            raise PoolBroken("the pool has no process left", hint="create another pool")
        for event in self.engine.wait(timeout_s):
            self._book(event)
        self._end_late()
        self._fill()
        self.next_poll = time.perf_counter() + _POLL_S
        self._left_at = time.monotonic()

    # --- what happened -----------------------------------------------------------------------------------------

    def _book(self, event: Event) -> None:
        if isinstance(event, SlotReady):
            self._slots[event.slot] = _Slot(event.slot, event.node)
        elif isinstance(event, Answered):
            self._book_answer(self._slots[event.slot], event)
        else:
            self._book_loss(event)

    def _book_answer(self, slot: _Slot, event: Answered) -> None:
        if slot.ended_for == _CANCELLED:
            return
        if slot.ended_for == _TIMED_OUT:  # it was done while we ended it: what it does since then has the time it needs
            slot.ended_for = _CANCELLED
        sent = slot.sent.popleft()
        slot.since = time.monotonic()
        self._barren = 0
        if sent.run.is_over:
            return
        head = loaded(event.parts[:1])
        problem = head[4]
        if problem is not None and problem["kind"] == UNREADABLE:
            cause = {**problem, "node": slot.node}
            sent.run.fail(sent.run.ledger.lost([sent.batch], None, cause))  # which item it is, halves will show
        elif problem is not None:
            sent.run.error = _unusable(problem, slot.node)
        elif sent.batch != _LOAD:
            try:
                sent.run.answered(slot.number, slot.node, head, event.parts[1:])
            except UgroError as error:
                sent.run.error = error

    def _book_loss(self, event: SlotLost) -> None:
        slot = self._slots.pop(event.slot, None)
        self._expected -= 1
        oldest = slot.sent[0] if slot and slot.sent else None
        if slot is None or oldest is None or oldest.batch == _LOAD or event.is_innocent:
            self._barren += not (slot and slot.ended_for)
        for run in {id(one.run): one.run for one in (slot.sent if slot else ())}.values():
            if slot is not None and not run.is_over:
                self._book_lost_batches(slot, run, event)
        if self._barren <= _MOST_BARREN + 2 * self._expected:
            self.engine.replace()
            self._expected += 1
        elif not self._slots:
            self._break(event.reason, is_loading=oldest is not None and oldest.batch == _LOAD)

    def _book_lost_batches(self, slot: _Slot, run: Run, event: SlotLost) -> None:
        oldest = slot.sent[0]
        batches = [one.batch for one in slot.sent if one.run is run and one.batch != _LOAD]
        is_innocent = (
            event.is_innocent or oldest.run is not run or oldest.batch == _LOAD or slot.ended_for == _CANCELLED
        )
        at = None if is_innocent else event.at
        run.fail(run.ledger.lost(batches, at, _death(slot, run, event), is_innocent=is_innocent))

    def _break(self, reason: str, *, is_loading: bool) -> None:
        when = "while they load the function" if is_loading else "at once"
        hint = "see what the function's module does when it is imported" if is_loading else "see the messages above"
        for run in self._runs:
            run.error = PoolBroken(f"the processes end {when}: {reason}", hint=hint)

    # --- what takes too long -----------------------------------------------------------------------------------

    def _deadlines(self) -> Iterator[tuple[float, _Slot, str]]:
        """A slot answers within its budget, and the item that it has begun then; loading may take its time."""
        for slot in self._slots.values():
            if not slot.sent or slot.ended_for:
                continue
            oldest = slot.sent[0]
            limit_s = oldest.run.settings.timeout_s
            if oldest.run.is_over:
                yield slot.since + oldest.budget_s + _PATIENCE_S, slot, _CANCELLED
            elif limit_s is not None and oldest.batch != _LOAD:
                yield slot.since + oldest.budget_s + limit_s, slot, _TIMED_OUT

    def _excuse(self) -> None:
        """While the reader was busy, nobody looked at the slots: that time is not theirs."""
        now = time.monotonic()
        away_s, self._left_at = now - self._left_at, now
        for slot in self._slots.values():
            slot.since += away_s

    def _timeout_s(self, at_most_s: float | None) -> float | None:
        now = time.monotonic()
        limits = [max(0.0, at - now) for at, _, _ in self._deadlines()]
        return min([*limits, *([] if at_most_s is None else [at_most_s])], default=None)

    def _end_late(self) -> None:
        now = time.monotonic()
        for at, slot, why in list(self._deadlines()):
            if at <= now:
                self._end(slot, why)

    def _end(self, slot: _Slot, why: str) -> None:
        slot.ended_for = why
        self.engine.end(slot.number)

    # --- what is sent ------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """The maps take turns; a map whose input uses the pool itself is left alone meanwhile."""
        self._runs.rotate(-1)
        for run in list(self._runs):
            while run.may_send(len(self._slots)) and (slot := self._slot_for(run)) is not None:
                if not self._send_next(run, slot):
                    break

    def _slot_for(self, run: Run) -> _Slot | None:
        free = [slot for slot in self._slots.values() if self._takes(slot, run)]
        return min(free, key=lambda slot: (len(slot.sent), slot.waiting_s() or 0.0), default=None)

    def _takes(self, slot: _Slot, run: Run) -> bool:
        under_way = [one for one in slot.sent if one.batch != _LOAD]
        if slot.ended_for or any(one.is_suspect for one in under_way):
            return False
        if run.ledger.next_is_suspect:
            return not under_way
        return takes_another(slot.waiting_s(), len(under_way), run.aims)

    def _send_next(self, run: Run, slot: _Slot) -> bool:
        piece = run.next_piece(slot.number, self._slots, self._expected - len(self._slots))
        if piece is None:
            return False
        if slot.number not in self._slots or run.is_over:  # while the input was read, which may use the pool
            run.ledger.put_back(piece)
            return False
        if slot.number not in run.loaded:
            run.loaded.add(slot.number)
            self._post(run, slot, None, Piece(0, ()))
        self._post(run, slot, run.ledger.sent(piece), piece)
        return True

    def _post(self, run: Run, slot: _Slot, batch: int | None, piece: Piece) -> None:
        expected_s = run.expected_s(slot.number, len(piece.items))
        budget_s = run.aims.probe_s if expected_s is None else run.aims.budget_s(expected_s)
        forget, slot.forget = slot.forget, []
        limits = (budget_s, run.watched_bytes)
        request = (batch or _LOAD, run.function, piece.start, limits, forget, piece.items)
        error, parts = attempt(dumped, request, self.engine.dumps)
        if error is not None and batch is not None:
            slot.forget = forget
            self._fail_unpicklable(run, batch, piece, error)
            return
        if not slot.sent:
            slot.since = time.monotonic()
        slot.sent.append(_Sent(run, batch or _LOAD, expected_s, budget_s, piece.is_suspect))
        if batch is not None:
            run.note_sent(len(piece.items), size_of(parts))
        self.engine.send(slot.number, parts)

    def _fail_unpicklable(self, run: Run, batch: int, piece: Piece, error: BaseException) -> None:
        found = []
        for index, item in enumerate(piece.items, piece.start):
            problem, _ = attempt(self.engine.dumps, item, None)
            if problem is not None:
                found.append(Failed(index, item, _not_picklable(problem)))
        if found:
            run.fail(run.ledger.unsendable(batch, found))
        else:  # each can be pickled, and all together cannot, as when there is no memory for them
            run.fail(run.ledger.lost([batch], None, _not_picklable(error)))


def _not_picklable(error: BaseException) -> Death:
    return Death("Unpicklable", f"the item cannot be pickled: {type(error).__name__}: {error}", "")


def _unusable(problem: dict[str, Any], node: str) -> FunctionUnusable:
    what = f"the function cannot be loaded on {node}: {problem['kind']}: {problem['message']}"
    is_missing = problem["kind"] in ("ImportError", "ModuleNotFoundError")
    what_else = "what it refers to must exist there and have the same version"
    hint = "the modules that it imports must be installed there" if is_missing else what_else
    return FunctionUnusable(what, hint=hint)


def _death(slot: _Slot, run: Run, event: SlotLost) -> Death:
    if slot.ended_for == _TIMED_OUT:
        limit = format_duration(run.settings.timeout_s or 0.0)
        return Death("TimedOut", f"not done within {limit}", slot.node)
    hint = ", perhaps for want of memory" if event.reason.endswith("SIGKILL") and not slot.ended_for else ""
    return Death("Died", f"its process ended on {slot.node}: {event.reason}{hint}", slot.node)
