"""`runs.*`: what an agent can ask of the runs on this node. Every call can be made again, and does no harm then.

What may take its time (ending processes, waiting for a lock, deleting) is done in a forked process, so that the node
program goes on answering. That process can be killed at any moment: the truth is in the files.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

from ugro.remote import detach, ports, stopping, tree, wire
from ugro.remote.execute import close_all_but
from ugro.remote.follow import follow as follow_file
from ugro.remote.program import Call, Refused
from ugro.remote.rundir import AgentDir, RunDir, moment, point
from ugro.remote.runspec import GRACE_S, RunSpec, grace

# Ranks whose program is on a slow file server; the run goes on when this is over, only the answer says "starting".
_START_S = 90.0
_LOOK_S = 0.02
_OLDER_GRACE_S = 30.0
_LIST_BYTES = wire.MAX_PAYLOAD // 2

Answer = Dict[str, Any]


def start(call: Call, params: Dict[str, Any]) -> None:
    run = _run(call, params)
    spec = dict(params["spec"])
    RunSpec(spec)
    as_of = params.get("as_of")
    if as_of is not None:
        as_of = {"boot_id": str(as_of["boot_id"]), "clock_s": float(as_of["clock_s"])}
    _Work(call, lambda: _prepare(run, spec, as_of), lambda answer: _Start(call, run).go_on(answer))


def stop(call: Call, params: Dict[str, Any]) -> None:
    run = _run(call, params)
    reason, grace_s = str(params.get("reason") or "asked to"), grace(params.get("grace_s", GRACE_S))
    _Work(call, lambda: {"run": stopping.stop(run, reason, grace_s)})


def remove(call: Call, params: Dict[str, Any]) -> None:
    run = _run(call, params)

    def work() -> Answer:
        stopping.remove(run)
        ports.free(run)
        return {}

    _Work(call, work)


def list_(call: Call, params: Dict[str, Any]) -> None:
    agent = _agent(call, params)
    after = params.get("after")
    found: List[Answer] = []
    size = 0
    has_more = False
    for run in agent.runs():
        if after is not None and run.name <= str(after):
            continue
        status = _without_tail(run.status())
        size += len(json.dumps(status))
        if size > _LIST_BYTES:
            has_more = True
            break
        found.append(status)
    call.finish({"now": moment(), "runs": found, "has_more": has_more})


def follow(call: Call, params: Dict[str, Any]) -> None:
    follow_file(call, _run(call, params), str(params["file"]), int(params.get("offset", 0)))


def renew(call: Call, params: Dict[str, Any]) -> None:
    silent_s = _agent(call, params).renew(params.get("as_of"))
    call.finish({"now": moment(), "silent_s": round(silent_s, 3)})


def reserve_port(call: Call, params: Dict[str, Any]) -> None:
    run, count = _run(call, params), int(params.get("count", 1))
    _Work(call, lambda: {"ports": ports.reserve(run, count)})


def free_port(call: Call, params: Dict[str, Any]) -> None:
    call.finish({"now": moment(), "ports": ports.free(_run(call, params))})


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "start": start,
    "stop": stop,
    "remove": remove,
    "list": list_,
    "follow": follow,
    "renew": renew,
    "reserve_port": reserve_port,
    "free_port": free_port,
}


def _agent(call: Call, params: Dict[str, Any]) -> AgentDir:
    agent = AgentDir(call.program.root, str(params["agent"]))
    agent.admit(int(params["generation"]))
    return agent


def _run(call: Call, params: Dict[str, Any]) -> RunDir:
    return _agent(call, params).run(str(params["job"]), int(params["attempt"]))


def _without_tail(status: Answer) -> Answer:
    """Logs are asked for by name; in a list they would only be in the way."""
    record = status["exit"]
    if record is None or record.get("failure") is None:
        return status
    failure = {key: value for key, value in record["failure"].items() if key != "tail"}
    return {**status, "exit": {**record, "failure": failure}}


# --- starting ---------------------------------------------------------------------------------------------------


def _prepare(run: RunDir, spec: Dict[str, Any], as_of: Optional[Dict[str, Any]]) -> Answer:
    """Everything up to the launch. The answer's run is still to be launched if nobody has claimed it."""
    point("start.admitted")
    with run.fence.held():
        run.fence.enter(run.attempt)
        point("start.fenced")
        run.make(spec, as_of)
        point("start.specified")
    # From here on no older attempt can begin on this node; those that have begun are ended.
    for older in run.agent.runs():
        if older.job == run.job and older.attempt < run.attempt and older.exit() is None:
            grace_s = min(_OLDER_GRACE_S, _grace_of(older))
            stopping.stop(older, "attempt %d takes its place" % run.attempt, grace_s)
    point("start.alone")
    return {"run": run.status()}


def _grace_of(run: RunDir) -> float:
    envelope = run.envelope()
    return RunSpec(envelope["spec"]).grace_s if envelope else 0.0


class _Start:
    """The launch itself, in the node program: it alone can give a supervisor a life outside of its own."""

    def __init__(self, call: Call, run: RunDir) -> None:
        self._call = call
        self._run = run
        self._ways: List[List[str]] = []
        self._ready = -1
        self._said = b""
        self._deadline = time.monotonic() + _START_S

    def go_on(self, answer: Answer) -> None:
        self._call.on_cancel = self._give_up
        if answer["run"]["is_claimed"]:
            self._await()
            return
        self._ways = detach.ways_here(self._run)
        self._launch()

    def _launch(self) -> None:
        self._ready = detach.launch(self._run, self._ways.pop(0))
        self._said = b""
        self._call.program.watch(self._ready, self._hear)

    def _hear(self) -> None:
        part = os.read(self._ready, 65536)
        self._said += part
        if part:
            return
        self._call.program.unwatch(self._ready)
        os.close(self._ready)
        if not self._call.is_done:
            self._conclude()

    def _conclude(self) -> None:
        if self._said:
            complaint = json.loads(self._said)
            self._call.fail(complaint["kind"], complaint["message"])
            return
        status = self._run.status()
        if status["is_claimed"] or status["status"] == "starting":
            self._await()
        elif self._ways:
            self._launch()
        else:
            self._call.fail("not-started", "the supervisor of %s ended before it had begun" % self._run.name)

    def _await(self) -> None:
        """Until it is more than starting: perhaps another link's supervisor is at it."""
        if self._call.is_done:
            return
        status = self._run.status()
        if status["status"] != "starting" or time.monotonic() > self._deadline:
            self._call.finish({"now": moment(), "run": status})
        else:
            self._call.program.after(_LOOK_S, self._await)

    def _give_up(self) -> None:
        self._call.fail("cancelled", "it was cancelled; what was begun goes on")


# --- work of its own process ------------------------------------------------------------------------------------


class _Work:
    """The node program's side: waits for the answer, without waiting."""

    def __init__(
        self, call: Call, work: Callable[[], Answer], then: Optional[Callable[[Answer], None]] = None
    ) -> None:
        self._call = call
        self._then = then or (lambda answer: call.finish({"now": moment(), **answer}))
        self._said = b""
        self._pipe, self._pid = _fork(work)
        call.program.watch(self._pipe, self._receive)
        call.on_cancel = self._cancel

    def _receive(self) -> None:
        part = os.read(self._pipe, wire.CHUNK)
        self._said += part
        if part:
            return
        self._call.program.unwatch(self._pipe)
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        self._call.on_cancel = None  # its pid may be another's from now on
        if not self._call.is_done:
            self._conclude()

    def _conclude(self) -> None:
        if not self._said:
            self._call.fail("crashed", "it ended without an answer")
            return
        said = json.loads(self._said)
        if "kind" in said:
            self._call.fail(said["kind"], said["message"])
            return
        try:
            self._then(said["answer"])
        except Refused as refusal:
            self._call.fail(refusal.kind, str(refusal))
        except OSError as error:
            self._call.fail("os", str(error))

    def _cancel(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # reaped when its pipe closes
        self._call.fail("cancelled", "it was cancelled")


def _fork(work: Callable[[], Answer]) -> Tuple[int, int]:
    pipe, say = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(pipe)
        os.close(say)
        raise
    if pid == 0:
        _do(work, say, parent)
    os.close(say)
    return pipe, pid


def _do(work: Callable[[], Answer], say: int, parent: int) -> NoReturn:
    """Runs in the forked process and never returns to the node program's code."""
    try:
        tree.die_with_parent()
        if os.getppid() == parent:
            close_all_but([say])
            with open(say, "w", encoding="utf-8", errors="replace") as pipe:
                pipe.write(json.dumps(_outcome(work)))
    finally:
        os._exit(0)


def _outcome(work: Callable[[], Answer]) -> Dict[str, Any]:
    try:
        return {"answer": work()}
    except Refused as refusal:
        return {"kind": refusal.kind, "message": str(refusal)}
    except OSError as error:
        return {"kind": "os", "message": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {"kind": "usage", "message": "bad parameters: %.200s" % error}
