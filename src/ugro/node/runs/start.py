"""`runs.start` and `runs.remove`: a list of runs in one call, each with an answer of its own."""

from __future__ import annotations

import itertools
import json
from typing import Any, Callable, Dict, List, Optional

from ugro.node import wire
from ugro.node.clock import boot_id, moment
from ugro.node.program import Call, Program, Refused
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.runspec import devices
from ugro.node.runs.supervisors import Start, Supervisors

MOST = 500
_AT_ONCE = 16  # then other calls are heard
_READ_GPUS_S = 5.0
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Answers:
    """In the order in which they were asked for."""

    def __init__(self, call: Call, wanted: Any) -> None:
        if not isinstance(wanted, list) or not 0 < len(wanted) <= MOST:
            raise ValueError("runs must be a list of 1 to %d" % MOST)
        self._call = call
        self._answers: List[Optional[bytes]] = [None] * len(wanted)
        self._left = len(wanted)
        self._slots: Dict[int, Slot] = {}
        call.on_cancel = self._cancel

    def slot(self, index: int) -> Slot:
        """For work that answers a call of its own."""
        slot = self._slots[index] = Slot(self._call.program, index, self)
        return slot

    def refuse(self, index: int, kind: str, text: str) -> None:
        self.fill(index, _encode({"error": {"kind": kind, "message": text}}).encode())

    def fill(self, index: int, answer: bytes) -> None:
        self._slots.pop(index, None)
        if self._answers[index] is not None:
            return
        self._answers[index] = answer
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
    def __init__(self, program: Program, index: int, answers: Answers) -> None:
        super().__init__(program, -1)
        self._index = index
        self._answers = answers

    def _end(self, kind: int, value: Dict[str, Any]) -> None:
        if self.is_done:
            return
        self.is_done = True
        if kind == wire.ERROR:
            self._answers.refuse(self._index, value["kind"], value["message"])
        else:
            self._answers.fill(self._index, b"{}")


def start(call: Call, agent: AgentDir, wanted: Any) -> None:
    answers = Answers(call, wanted)
    read_gpus = call.program.read_gpus
    if read_gpus is None or not any(_names_gpus(one) for one in wanted):
        _start_all(call, answers, agent, wanted, None)
        return

    def go_on(reading: Dict[str, Any]) -> None:
        try:
            _start_all(call, answers, agent, wanted, _by_index(reading))
        except OSError as error:
            call.fail("os", str(error))

    read_gpus(go_on, _READ_GPUS_S)


def _start_all(call: Call, answers: Answers, agent: AgentDir, wanted: Any, uuids: Optional[Dict[int, str]]) -> None:
    starts: List[Start] = []
    for index, one in enumerate(wanted):
        try:
            start = _start(answers, index, agent, one)
            if uuids is not None and not start.run.is_claimed():
                _expect_gpus(start.spec, uuids)
            starts.append(start)
        except Refused as refusal:
            answers.refuse(index, refusal.kind, str(refusal))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            answers.refuse(index, "usage", "start: bad parameters: %.200s" % error)
    Supervisors.of(call.program, agent).start(starts)


def _start(answers: Answers, index: int, agent: AgentDir, wanted: Dict[str, Any]) -> Start:
    run, spec, as_of = agent.run(str(wanted["job"]), int(wanted["attempt"])), dict(wanted["spec"]), wanted.get("as_of")
    if as_of is not None:
        as_of = {"boot_id": str(as_of["boot_id"]), "clock_s": float(as_of["clock_s"])}
    _expect_root(agent, wanted.get("root"))
    return Start(
        run,
        spec,
        as_of,
        _is_of_this_boot(wanted.get("boot_id")),
        lambda text: answers.fill(index, b'{"run":%s}' % text),
        lambda kind, text: answers.refuse(index, kind, text),
        _ticket(wanted.get("ticket")),
    )


def _ticket(ticket: Any) -> Optional[str]:
    return None if ticket is None else str(ticket)


def _names_gpus(wanted: Any) -> bool:
    spec = wanted.get("spec") if isinstance(wanted, dict) else None
    return isinstance(spec, dict) and bool(spec.get("gpus"))


def _by_index(reading: Dict[str, Any]) -> Optional[Dict[int, str]]:
    """The UUID of each GPU; None where the driver does not say for sure."""
    return None if reading["gpu_error"] else {gpu["index"]: gpu["uuid"] for gpu in reading["gpus"]}


def _expect_gpus(spec: Dict[str, Any], uuids: Dict[int, str]) -> None:
    """Indexes move when a GPU vanishes: the run would get one that was never meant for it, under another's lock."""
    for index, uuid in devices(spec.get("gpus")):
        now = uuids.get(index)
        if uuid and now != uuid and now != "":
            text = "GPU %d is not %s any more, for which this start was decided" % (index, uuid)
            raise Refused("gpu-changed", text)


def _is_of_this_boot(meant: Optional[str]) -> bool:
    """Whether the agent says which boot it means; refused when the machine was restarted since then."""
    if meant is not None and meant != boot_id():
        # All that it had begun here ended with the restart, and the files that would tell may be gone, too.
        raise Refused("other-boot", "the node was restarted after this start was decided")
    return meant is not None


def _expect_root(agent: AgentDir, meant: Optional[str]) -> None:
    """Refused when it is meant for another folder of this machine, as the agent's configuration had it before."""
    if meant is not None and meant != agent.root:
        raise Refused("other-root", "the node's folder is not %s any more, for which this start was decided" % meant)


def remove(call: Call, runs: List[RunDir], remove_one: Callable[[Call, RunDir], None]) -> None:
    answers = Answers(call, runs)
    indexes = iter(range(len(runs)))

    def go_on() -> None:
        for index in itertools.islice(indexes, _AT_ONCE):
            remove_one(answers.slot(index), runs[index])
        if not call.is_done:
            call.program.after(0.0, go_on)

    go_on()
