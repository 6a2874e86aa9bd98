"""The start of a run, up to its supervisor: the fence, the run's folder, the end of older attempts, the launch.

Where there is nothing to wait for, all of it happens in the node program and leaves the disk alone: the supervisor
sees to it that what must last does, before it starts a rank.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.remote import trees, worker
from ugro.remote.cas import contents
from ugro.remote.clock import boot_id, moment
from ugro.remote.program import Call, Refused
from ugro.remote.runs import daemonize, stop
from ugro.remote.state.rundir import AgentDir, RunDir, point
from ugro.remote.state.runspec import RunSpec

# Ranks whose program is on a slow file server; the run goes on when this is over, only the answer says "starting".
_START_S = 90.0
_LOOK_S = 0.02
_FENCE_S = 10.0
_OLDER_GRACE_S = 30.0


class _TakesTime(Exception):
    """It has to be waited for."""


class Order(NamedTuple):
    """What is to be started. ``is_of_this_boot``: the order is void after a restart of the machine."""

    spec: Dict[str, Any]
    as_of: Optional[Dict[str, Any]] = None
    is_of_this_boot: bool = False


def is_of_this_boot(meant: Optional[str]) -> bool:
    """Whether the agent says which boot it means. Refused when the machine was started anew since then."""
    if meant is not None and meant != boot_id():
        # Whatever it had begun here went with the restart, and so may have the files that would tell.
        raise Refused("other-boot", "the node was restarted after this start was decided")
    return meant is not None


def expect_root(agent: AgentDir, meant: Optional[str]) -> None:
    """Refused when it is meant for another folder of this machine, as the agent's configuration had it before."""
    if meant is not None and meant != agent.root:
        raise Refused("other-root", "the node's folder is not %s any more, for which this start was decided" % meant)


def begin(call: Call, run: RunDir, order: Order) -> None:
    """Soon: a thousand starts that come at once must not keep others from being heard."""
    call.on_cancel = lambda: call.fail("cancelled", "it was cancelled before it had begun")
    call.program.after(0.0, lambda: _begin(call, run, order))


def _begin(call: Call, run: RunDir, order: Order) -> None:
    if call.is_done:
        return
    launch = _Launch(call, run)
    try:
        launch.go_on(_prepare(run, order, is_patient=False))
    except _TakesTime:
        worker.do(
            call,
            lambda: {"is_claimed": _prepare(run, order, is_patient=True)},
            lambda answer: launch.go_on(answer["is_claimed"]),
        )
    except Refused as refusal:
        call.fail(refusal.kind, str(refusal))
    except OSError as error:
        call.fail("os", str(error))


def _prepare(run: RunDir, order: Order, *, is_patient: bool) -> bool:
    """Everything up to the launch; true when somebody has claimed it already. Does no harm when it is done again."""
    point("start.admitted")
    try:
        held = run.fence.held(_FENCE_S if is_patient else 0)
        with held:
            seen = run.fence.seen()
            if not (run.attempt == seen and run.is_claimed()):
                run.fence.enter(run.attempt)
            point("start.fenced")
            run.make(order.spec, order.as_of, order.is_of_this_boot)
            point("start.specified")
    except Refused as refusal:
        if refusal.kind != "busy" or is_patient:
            raise
        raise _TakesTime from refusal
    # From here on no older attempt can begin on this node; those that have begun are ended.
    for older in _older(run) if seen else ():
        if not is_patient:
            raise _TakesTime
        grace_s = min(_OLDER_GRACE_S, _grace_of(older))
        stop.stop(older, "attempt %d takes its place" % run.attempt, grace_s)
    if order.spec.get("code") is not None and not run.is_claimed():
        if not is_patient:
            raise _TakesTime
        contents.check_out(run, trees.parse_id(order.spec["code"]))
    point("start.alone")
    return run.is_claimed()


def _older(run: RunDir) -> List[RunDir]:
    return [
        older
        for older in run.agent.runs()
        if older.job == run.job and older.attempt < run.attempt and older.exit() is None
    ]


def _grace_of(run: RunDir) -> float:
    envelope = run.envelope()
    return RunSpec(envelope["spec"]).grace_s if envelope else 0.0


class _Launch:
    """In the node program: it alone can give a supervisor a life outside of its own."""

    def __init__(self, call: Call, run: RunDir) -> None:
        self._call = call
        self._run = run
        self._ways: List[List[str]] = []
        self._ready = -1
        self._said = b""
        self._deadline = time.monotonic() + _START_S

    def go_on(self, is_claimed: bool) -> None:
        self._call.on_cancel = self._give_up
        if is_claimed:
            self._await()
            return
        self._ways = daemonize.ways_here(self._run.name)
        self._launch()

    def _launch(self) -> None:
        self._ready, say = os.pipe()
        try:
            daemonize.launch(daemonize.supervisor(self._run), self._ways.pop(0), say)
        except OSError:
            os.close(self._ready)
            raise
        self._said = b""
        self._call.program.watch(self._ready, self._hear)

    def _hear(self) -> None:
        part = os.read(self._ready, 65536)
        self._said += part
        if part:
            return
        self._call.program.unwatch(self._ready)
        os.close(self._ready)
        if self._call.is_done:
            return
        if self._said:
            complaint = json.loads(self._said)
            self._call.fail(complaint["kind"], complaint["message"])
        else:
            self._await()

    def _await(self) -> None:
        """Until it is more than starting: perhaps another link's supervisor is at it, or ours is about to be gone."""
        if self._call.is_done:
            return
        try:
            status = self._run.status()
            if status["status"] == "starting" and time.monotonic() < self._deadline:
                self._call.program.after(_LOOK_S, self._await)
            elif status["status"] != "dead" or status["is_claimed"]:
                self._call.finish({"now": moment(), "run": status})
            elif self._ways:
                self._launch()
            else:
                self._call.fail("not-started", "the supervisor of %s ended before it had begun" % self._run.name)
        except OSError as error:
            self._call.fail("os", str(error))

    def _give_up(self) -> None:
        self._call.fail("cancelled", "it was cancelled; what was begun goes on")
