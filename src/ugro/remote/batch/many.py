"""`runs.start_many` and `runs.remove_many`: many small runs in one call, each with an answer of its own.

One that takes its time takes none of the others: it is started or removed as it would be alone.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Callable, Dict, List, Optional

from ugro.remote import wire
from ugro.remote.batch.pool import Keeping, Start
from ugro.remote.clock import moment
from ugro.remote.program import Call, Program, Refused
from ugro.remote.runs.start import Order, begin, expect_root, is_of_this_boot
from ugro.remote.state.rundir import AgentDir, RunDir

MOST = 500
_AT_ONCE = 16  # then others are heard
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Many:
    """The answers, in the order in which they were asked for."""

    def __init__(self, call: Call, count: int) -> None:
        self._call = call
        self._answers: List[Optional[bytes]] = [None] * count
        self._left = count
        self._slots: Dict[int, Slot] = {}
        call.on_cancel = self._cancel

    def slot(self, place: int) -> Slot:
        """For what otherwise answers a call of its own."""
        slot = self._slots[place] = Slot(self._call.program, place, self)
        return slot

    def refuse(self, place: int, kind: str, text: str) -> None:
        self.fill(place, _encode({"error": {"kind": kind, "message": text}}).encode())

    def fill(self, place: int, answer: bytes) -> None:
        self._slots.pop(place, None)
        if self._answers[place] is not None:
            return
        self._answers[place] = answer
        self._left -= 1
        if not self._left and not self._call.is_done:
            answers = b",".join(answer for answer in self._answers if answer is not None)
            self._call.finish_with(b'{"now":%s,"results":[%s]}' % (_encode(moment()).encode(), answers))

    def _cancel(self) -> None:
        for slot in list(self._slots.values()):
            if slot.on_cancel is not None:
                slot.on_cancel()
        self._call.fail("cancelled", "it was cancelled; what was begun goes on")


class Slot(Call):
    def __init__(self, program: Program, place: int, many: Many) -> None:
        super().__init__(program, -1)
        self._place = place
        self._many = many

    def _end(self, kind: int, value: Dict[str, Any]) -> None:
        if self.is_done:
            return
        self.is_done = True
        if kind == wire.ERROR:
            self._many.refuse(self._place, value["kind"], value["message"])
        else:
            run = value.get("run")
            self._many.fill(self._place, _encode({"run": without_tail(run)}).encode() if run else b"{}")


def start(call: Call, agent: AgentDir, wanted: List[Dict[str, Any]], boot_id: Optional[str]) -> None:
    """``boot_id`` is for those that say none themselves."""
    many = Many(call, _count(wanted))
    starts: List[Start] = []
    for place, one in enumerate(wanted):
        try:
            run, spec = agent.run(str(one["job"]), int(one["attempt"])), dict(one["spec"])
            if len(spec["ranks"]) != 1 or spec.get("lease_s") is not None:
                raise ValueError("one rank and no lease; others are started one by one")
            expect_root(agent, one.get("root"))
            order = Order(spec, None, is_of_this_boot(one.get("boot_id", boot_id)))
        except Refused as refusal:
            many.refuse(place, refusal.kind, str(refusal))
        except (KeyError, TypeError, ValueError) as error:
            many.refuse(place, "usage", "start_many: bad parameters: %.200s" % error)
        else:
            starts.append(_start(many, place, run, order))
    Keeping.of(call.program, agent).start(starts)


def _start(many: Many, place: int, run: RunDir, order: Order) -> Start:
    return Start(
        run,
        order,
        lambda text: many.fill(place, b'{"run":%s}' % text),
        lambda kind, text: many.refuse(place, kind, text),
        lambda: begin(many.slot(place), run, order),
    )


def remove(call: Call, runs: List[RunDir], remove_one: Callable[[Call, RunDir], None]) -> None:
    many = Many(call, _count(runs))
    places = iter(range(len(runs)))

    def go_on() -> None:
        for place in itertools.islice(places, _AT_ONCE):
            remove_one(many.slot(place), runs[place])
        if not call.is_done:
            call.program.after(0.0, go_on)

    go_on()


def without_tail(status: Dict[str, Any]) -> Dict[str, Any]:
    """Logs are asked for by name; in a list they would only be in the way."""
    record = status["exit"]
    if record is None or record.get("failure") is None:
        return status
    failure = {key: value for key, value in record["failure"].items() if key != "tail"}
    return {**status, "exit": {**record, "failure": failure}}


def _count(wanted: List[Any]) -> int:
    if not isinstance(wanted, list) or not 0 < len(wanted) <= MOST:
        raise ValueError("runs must be a list of 1 to %d" % MOST)
    return len(wanted)
