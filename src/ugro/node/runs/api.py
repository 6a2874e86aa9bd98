"""`runs.*`: what an agent can ask of the runs on this node. Every call can be made again, and does no harm then.

What may take its time (ending processes, waiting for a lock, for a disk, deleting much) is done in a forked process, so
that the node program goes on answering. That process can be killed at any moment: the truth is in the files.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from ugro.node import durable, wire, worker
from ugro.node.clock import moment
from ugro.node.program import Call, Refused, method
from ugro.node.runs import ports
from ugro.node.runs import start as starting
from ugro.node.runs import stop as stopping
from ugro.node.runs.cores import bind
from ugro.node.runs.logs import follow as follow_file
from ugro.node.runs.rundir import MOST_MARK_BYTES, AgentDir, RunDir, agent_of, run_of, seen_agent_of
from ugro.node.runs.runspec import GRACE_S, grace, stop_signal
from ugro.node.runs.supervisors import Supervisors
from ugro.node.runs.watch import watch as watch_runs
from ugro.node.worker import Answer

MOST_TRACED = 1000
MOST_TICKETS = 1000
_MOST_TICKET_BYTES = wire.MAX_PAYLOAD // 4
_EXIT_S = 0.5  # from a run's exit record to the end of its lock
_PAUSE_S = 0.005
# The agents whose leftovers of removals that were cut short were deleted once, since this node program began.
_swept: Set[str] = set()


@method("runs.start")
def start(call: Call, *, runs: List[Dict[str, Any]]) -> None:
    """Starts runs; one run is a list of one."""
    starting.start(call, agent_of(call), runs)


@method("runs.stop")
def stop(
    call: Call, *, job: str, attempt: int, reason: str = "", grace_s: float = GRACE_S, signal: Optional[str] = None
) -> None:
    run, reason, grace_s = run_of(call, job, attempt), str(reason or "asked to"), grace(grace_s)
    signum = stop_signal(signal)
    worker.do(call, lambda: {"run": stopping.stop(run, reason, grace_s, signum)})


@method("runs.remove")
def remove(call: Call, *, runs: List[List[Any]]) -> None:
    """Deletes the directories of runs that have ended: job and attempt of each."""
    agent = agent_of(call)
    starting.remove(call, [agent.run(str(job), int(attempt)) for job, attempt in runs], _remove)


@method("runs.watch", is_standing=True)
def watch(call: Call) -> None:
    """Streams the state of runs as it changes."""
    watch_runs(call, agent_of(call), int(call.asker["generation"]))


@method("runs.follow")
def follow(
    call: Call, *, job: str, attempt: int, file: str, offset: int = 0, promptly: bool = False
) -> None:
    """Streams a run's log from an offset."""
    follow_file(call, run_of(call, job, attempt), str(file), int(offset), promptly=promptly is True)


@method("runs.renew", is_standing=True)
def renew(call: Call, *, as_of: Optional[Dict[str, Any]] = None) -> None:
    """Extends the leases of runs."""
    silent_s = agent_of(call).renew(as_of)
    call.finish({"now": moment(), "silent_s": round(silent_s, 3)})


@method("runs.mark", is_standing=True)
def mark(call: Call, *, mark: Optional[str] = None) -> None:
    """Keeps the agent's mark if there is one in the call; else an agent that was replaced gets an answer, too."""
    if mark is not None:
        agent_of(call).put_mark(str(mark)[:MOST_MARK_BYTES])
    agent = seen_agent_of(call)
    call.finish({"now": moment(), "mark": agent.mark(), "generation": agent.newest_generation})


@method("runs.tickets", is_routine=True)
def tickets(
    call: Call,
    *,
    runs: Optional[Sequence[str]] = None,
    jobs: Sequence[str] = (),
    after: str = "",
    admits: bool = False,
) -> None:
    """Of some runs, or of all. Unless it wants to be obeyed, an agent that was replaced gets an answer, too."""
    agent = agent_of(call) if admits else seen_agent_of(call)
    names = None if runs is None else [str(name) for name in runs][:MOST_TICKETS]
    newest_of, after = [str(job) for job in jobs or ()][:MOST_TICKETS], str(after or "")
    worker.do(call, lambda: {**_tickets(agent, names, after), "started": _started(agent, newest_of)})


def _tickets(agent: AgentDir, names: Optional[List[str]], after: str) -> Dict[str, Any]:
    """In order of their names, those after one; ``more``: after which to ask for the rest."""
    runs = agent.runs() if names is None else [run for run in map(agent.named, sorted(names)) if run is not None]
    found: List[Dict[str, Any]] = []
    size, last = 0, ""
    for run in runs:
        if run.name <= after:
            continue
        if size > _MOST_TICKET_BYTES or len(found) >= MOST_TICKETS:
            return {"runs": found, "more": last}
        ticket, last = run.ticket() if run.exists() else None, run.name
        if ticket is not None:
            size += len(ticket)
            found.append({"job": run.job, "attempt": run.attempt, "status": run.status()["status"], "ticket": ticket})
    return {"runs": found, "more": ""}


def _started(agent: AgentDir, jobs: List[str]) -> Dict[str, int]:
    """The highest attempt of each that ever came here."""
    return {job: agent.fence(job).seen() for job in jobs if agent.is_name(job + ".1")}


@method("runs.reserve_port")
def reserve_port(call: Call, *, job: str, attempt: int, count: int = 1, preferred: Optional[int] = None) -> None:
    run, count = run_of(call, job, attempt), int(count)
    wanted = None if preferred is None else int(preferred)
    worker.do(call, lambda: {"ports": ports.reserve(run, count, wanted)})


@method("runs.free_port")
def free_port(call: Call, *, job: str, attempt: int) -> None:
    call.finish({"now": moment(), "ports": ports.free(run_of(call, job, attempt))})


@method("runs.control")
def control(call: Call, /, *, job: str, attempt: int, binds_cores: bool = False, **params: Any) -> None:
    """A word to the ranks of a run, in a file that they look at now and then; the newest one of its kind holds."""
    run = run_of(call, job, attempt)
    name, word = _part(params) if "part" in params else _tracing(params)
    if run.exit() is not None or not run.is_alive():
        raise Refused("not-running", "%s does not run on this node" % run.name)
    durable.write_json(run.file(name), {"run": run.name, **word}, is_lasting=False)
    if binds_cores:
        worker.do(call, lambda: bind(run, word["part"]))
    else:
        call.finish({"now": moment()})


@method("runs.start_again")
def start_again(call: Call, *, job: str, attempt: int, rank: int, starts: int) -> None:
    """A rank that was lost, of a run that goes on without it; once for each number of starts."""
    run, rank, starts = run_of(call, job, attempt), int(rank), int(starts)
    if run.exit() is not None or not run.is_alive():
        raise Refused("not-running", "%s does not run on this node" % run.name)
    stopping.start_again(run, rank, starts)
    call.finish({"now": moment()})


def _tracing(params: Dict[str, Any]) -> Tuple[str, Dict[str, Any]]:
    steps = int(params["trace_steps"])
    if not 1 <= steps <= MOST_TRACED:
        raise ValueError("between 1 and %d steps can be traced" % MOST_TRACED)
    return "control.json", {"key": str(params["key"])[:64], "trace_steps": steps}


def _part(params: Dict[str, Any]) -> Tuple[str, Dict[str, Any]]:
    part = float(params["part"])
    if not 0 < part <= 1:
        raise ValueError("a part of a share is over 0 and up to 1")
    return "part.json", {"part": part}


def _remove(call: Call, run: RunDir) -> None:
    supervisors = Supervisors.of(call.program, run.agent)
    report = supervisors.report(run.name)
    supervisors.forget(run.name)
    # No process has it open: its supervisor said so after it had let go, and the fence refuses a start that comes now.
    if report is not None and report.is_clean and run.agent.path in _swept and supervisors.pool.take_over(run):
        ports.free(run)
        call.finish({"now": moment()})
    else:
        _Removal(call, run).go_on()


class _Removal:
    """Here where that takes no time, else in a process of its own. What a run wrote last may be a moment old."""

    def __init__(self, call: Call, run: RunDir) -> None:
        self._call = call
        self._run = run
        self._until = time.monotonic() + _EXIT_S
        call.on_cancel = lambda: call.fail("cancelled", "it was cancelled")

    def go_on(self) -> None:
        if self._call.is_done:
            return
        try:
            self._remove()
        except Refused as refusal:
            if refusal.kind == "alive" and time.monotonic() < self._until:
                self._call.program.after(_PAUSE_S, self.go_on)
            else:
                self._call.fail(refusal.kind, str(refusal))
        except OSError as error:
            self._call.fail("os", str(error))

    def _remove(self) -> None:
        # The first time, also what was left by removals that were cut short before we were here.
        if self._run.agent.path in _swept and stopping.remove_quickly(self._run):
            ports.free(self._run)
            self._call.finish({"now": moment()})
        else:
            self._remove_slowly()

    def _remove_slowly(self) -> None:
        _swept.add(self._run.agent.path)

        def remove() -> Answer:
            stopping.remove(self._run)
            ports.free(self._run)
            return {}

        worker.do(self._call, remove)
