"""The supervisor: a process that starts, watches and ends runs on this node, and records how they ended.

It has one run or many, outlives the link, the node program and the agent, and holds the lock of each run while that
lives. The node program that started it sends it runs over a socket and hears over the same how they began and ended;
when that closes, it takes no more, and ends with its last run. Orders come through a named pipe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from typing import Any, Dict, List, Optional, Tuple

from ugro.node import durable, foreign
from ugro.node import machine as disk
from ugro.node.clock import boot_id
from ugro.node.files import checkpoint_dir
from ugro.node.files.workdir import WorkDir
from ugro.node.process import execute as wakeup
from ugro.node.process import process_tree, terminate
from ugro.node.process.terminate import ProcessName
from ugro.node.program import Refused
from ugro.node.runs import logs as inline_logs
from ugro.node.runs import ranks as elastic
from ugro.node.runs import reaper
from ugro.node.runs.claim import Claimed, Claims, Known, TakesTime, Wanted
from ugro.node.runs.logs import CappedLog
from ugro.node.runs.ownership import Ownership, RunFamily
from ugro.node.runs.ranks import NotStarted, OomCounter, Rank
from ugro.node.runs.reaper import LOOK_S, Reaper, grace_left_s
from ugro.node.runs.run_state import RunLife
from ugro.node.runs.rundir import AgentDir, point

try:
    from ugro.features.training.on_node import Meter
except ModuleNotFoundError:  # the feature is left out: nobody asks for energy
    Meter = None  # type: ignore[assignment,misc]

CONTROL = "control"
_TICK_S = LOOK_S
_EXIT_RECORD_S = 120.0  # how long a record that cannot be written (a full disk, and no space kept) is tried again
_STARTS_AT_ONCE = 4  # then those that have ended are heard
_MOST_UNREAD = 8 << 20  # a node program that reads no more is left to look at the files
_GATHER_S = 0.005
_AGAIN_S = 1.0
_encode = json.JSONEncoder(separators=(",", ":")).encode


def main(argv: List[str]) -> None:
    root, agent, node_key, is_shared, link = argv
    os.set_inheritable(int(link), False)  # it came to us by an exec; it must not go to the ranks by another
    begin(AgentDir(root, agent, node_key), is_shared == "shared", int(link))


def begin(agent: AgentDir, is_shared: bool, link: int) -> None:
    second = reaper.fork(agent)
    Supervisor(agent, is_shared, socket.socket(fileno=link), second).run()


class _Run:
    def __init__(self, claimed: Claimed, life: RunLife, family: RunFamily) -> None:
        self.claimed = claimed
        self.life = life
        self.family = family
        self.name = claimed.run.name
        self.state = b""
        self.number: Optional[int] = None  # of the start that is not answered yet
        self.look_at = 0.0
        self.give_up_at: Optional[float] = None
        self.meter: Optional[Meter] = None

    def status(self, word: str, record: bytes, more: bytes = b"") -> bytes:
        """As ``RunDir.status`` has it, from what was written to the run's files."""
        run = self.claimed.run
        head = '{"job":"%s","attempt":%d,"status":"%s","is_claimed":true,"claimed_in":"%s","spec_hash":"%s"' % (
            run.job, run.attempt, word, boot_id(), self.claimed.spec_hash,
        )  # fmt: skip
        return b'%s,"state":%s,"exit":%s%s}' % (head.encode(), self.state or b"null", record or b"null", more)

    def has_whole_logs(self) -> bool:
        return all(rank.log.is_whole for rank in self.life.ranks)

    def with_exit(self, record: Dict[str, Any]) -> bytes:
        """What is sent along with its exit record."""
        ranks = [rank.number for rank in self.life.ranks]
        logs = inline_logs.whole(self.claimed.run, ranks, record) if self.has_whole_logs() else None
        run, spec = self.claimed.run, self.life.spec
        has_outputs = spec.outputs or run.has_written() or WorkDir(run, spec).has_any()
        text = b"" if logs is None else b',"logs":%s' % _encode(logs).encode()
        return text + (b',"has_outputs":true' if has_outputs else b"")


class Supervisor:
    def __init__(self, agent: AgentDir, is_shared: bool, link: socket.socket, second: Reaper) -> None:
        self._agent = agent
        self._is_shared = is_shared
        self._link: Optional[socket.socket] = link
        self._reaper = second
        self._is_taking = True
        self._wanted: List[Wanted] = []
        self._lives: Dict[str, _Run] = {}
        self._ending: Dict[str, _Run] = {}  # those of them with a verdict
        self._by_pid: Dict[int, Tuple[_Run, Rank]] = {}
        self._heard = b""
        self._orders = b""
        self._unsent = b""
        self._has_term = False
        self._tick_at = 0.0
        self._flush_at = 0.0
        self._oom = OomCounter()

    def run(self) -> None:
        try:
            self._set_up()
        except OSError as error:
            kind, text = disk.refusal(error, self._agent.root, "the supervisor cannot be set up: ")
            complaint = {"kind": kind, "message": text}
            self._say(b"E %s\n" % json.dumps(complaint).encode())
            self._flush()
            raise
        self._say(b"ready\n")
        self._flush()
        while not self._is_over():
            self._round(self._pause_s())
        self._claims.clear()

    def _set_up(self) -> None:
        self._ownership = Ownership(adopts_orphans=process_tree.become_subreaper())
        process = ProcessName.own()
        self._started_ticks, self._cgroup = process.started, terminate.own_cgroup()
        folder = self._agent.supervisor(str(process))
        self._wake = wakeup.listen(self._note_term)
        durable.make_folder(folder)
        self._control = wakeup.open_control(os.path.join(folder, CONTROL))
        self._folder = folder
        self._write_reaper()
        self._claims = Claims(folder, str(process), self._reaper.shared, is_patient=not self._is_shared)
        point("supervisor.begun")
        self._poll = select.poll()
        for fd in (self._wake, self._control, self._reaper.fileno()):
            self._poll.register(fd, select.POLLIN)
        assert self._link is not None
        self._link.setblocking(False)
        self._poll.register(self._link, select.POLLIN)

    def _note_term(self) -> None:
        self._has_term = True
        self._is_taking = False

    def _is_over(self) -> bool:
        return not (self._is_taking or self._wanted or self._lives or self._unsent)

    # --- one round ----------------------------------------------------------------------------------------------

    def _pause_s(self) -> Optional[float]:
        if self._wanted:
            return 0.0
        now = time.monotonic()
        times = [run.look_at for run in self._ending.values()]
        if self._lives:
            times.append(self._tick_at)
        if self._unsent:
            times.append(self._flush_at)
        return max(0.0, min(times) - now) if times else None

    def _round(self, pause_s: Optional[float]) -> None:
        self._listen(pause_s)
        self._ownership.forget_look()
        self._collect()
        for _ in range(min(_STARTS_AT_ONCE, len(self._wanted))):
            self._start(self._wanted.pop(0))
        if self._has_term:
            self._interrupt()
        self._step_all()
        self._reaper.flush()
        self._tick()
        self._flush()
        if self._is_shared and self._is_taking and not self._wanted and not self._ending:
            self._claims.prepare()

    def _listen(self, pause_s: Optional[float]) -> None:
        ready = self._poll.poll(None if pause_s is None else pause_s * 1000)
        if any(fd == self._reaper.fileno() for fd, _ in ready):
            self._hear_reaper()  # first: it says why ranks have ended
        for fd, what in ready:
            if fd == self._wake:
                wakeup.drain(fd)
            elif fd == self._control:
                self._obey()
            elif self._link is not None and fd == self._link.fileno():
                self._talk(what)

    def _interrupt(self) -> None:
        for run in self._lives.values():
            self._end(run, "interrupted", "SIGTERM came")

    def _end(self, run: _Run, outcome: str, reason: str) -> None:
        if run.life.verdict is None:
            run.life.decide(outcome, reason, None)
            self._note_verdict(run)

    def _note_verdict(self, run: _Run) -> None:
        if run.life.verdict is not None:
            self._ending[run.name] = run
            run.look_at = 0.0

    def _collect(self) -> None:
        for pid, wait_status in process_tree.reap().items():
            self._ownership.ranks.pop(pid, None)
            run, rank = self._by_pid.pop(pid, (None, None))
            if run is not None and rank is not None:
                run.life.note_end(rank, wait_status)
                run.life.judge()
                self._note_verdict(run)
                if run.life.spec.is_elastic:
                    self._tell_change(run)

    def _step_all(self) -> None:
        now = time.monotonic()
        for run in [run for run in self._ending.values() if run.look_at <= now]:
            if run.give_up_at is not None or run.life.step():
                self._finish(run)
            elif run.life.ending is not None:
                run.look_at = now + min(run.life.ending.pause_s, _TICK_S)

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._tick_at:
            return
        self._tick_at = now + _TICK_S
        self._oom.sample()
        for run in self._lives.values():
            run.life.trim_logs()
            run.claimed.gpus.hear()
            has_news = [run.life.look_at_members(), run.life.look_at_notices()]
            if any(has_news):
                self._tell_change(run)
            if run.claimed.is_lease_over():
                self._expire(run, run.claimed.silent_s())
        if self._reaper.is_gone:
            self._replace_reaper()

    # --- the life of a run --------------------------------------------------------------------------------------

    def _start(self, wanted: Wanted) -> None:
        try:
            claimed = self._claims.claim(self._agent.run(wanted.job, wanted.attempt), wanted)
        except TakesTime:
            self._say(b"L%d \n" % wanted.number)
        except Known:
            self._say(b"K%d \n" % wanted.number)
        except Refused as refusal:
            self._refuse(wanted.number, refusal.kind, str(refusal))
        except OSError as error:
            self._refuse(wanted.number, *disk.refusal(error, self._agent.root, "the run cannot be set up: "))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            self._refuse(wanted.number, "usage", "bad parameters: %.200s" % error)
        else:
            self._begin(claimed, wanted.number)

    def _refuse(self, number: int, kind: str, text: str) -> None:
        self._say(b"F%d %s\n" % (number, json.dumps({"kind": kind, "message": text}).encode()))

    def _begin(self, claimed: Claimed, number: int) -> None:
        family = RunFamily(self._ownership, claimed.run.mark)
        life = RunLife(claimed.run, claimed.spec, family, self._oom)
        run = self._lives[claimed.run.name] = _Run(claimed, life, family)
        self._ownership.add(family)
        if claimed.lease is not None:
            self._reaper.keep(claimed.lease)
        life.start(lambda: self._start_ranks(run))
        point("supervisor.stated")
        if life.verdict is None:
            self._say(b"S%d %s\n" % (number, run.status("running", b"")))
        else:
            run.number = number
            self._note_verdict(run)

    def _start_ranks(self, run: _Run) -> None:
        life = run.life
        if life.spec.checkpoint_dir is not None:
            _gather_checkpoints(life)
        for spec in life.spec.ranks:
            try:
                log = CappedLog(life.run.log(spec.number), life.spec.log_cap_bytes, is_there=spec.number == 0)
            except OSError as error:
                raise NotStarted(spec.number, error.errno or 0, "its log") from error
            life.ranks.append(Rank(spec, log, life.limits.begin()))
        cwd = life.spec.cwd or os.fsencode(life.run.file("work"))
        self._start_meter(run)
        self._start_store(run, cwd)
        for rank in life.ranks:
            self._start_rank(run, rank, cwd)
            if rank is life.ranks[0]:
                point("supervisor.first")
        point("supervisor.all")
        self._write_state(run)

    def _write_state(self, run: _Run) -> None:
        state = run.life.state(run.claimed.spec_hash, self._started_ticks, self._cgroup)
        run.state = run.life.run.write_state({**state, **({"is_metered": True} if run.meter is not None else {})})

    def _start_store(self, run: _Run, cwd: bytes) -> None:
        """Beside the ranks: whatever becomes of them, it ends with the run."""
        life = run.life
        if life.spec.store is None:
            return
        life.store = Rank(life.spec.store, life.ranks[0].log, life.limits.begin())
        life.store.start(life.environment(life.store.spec.env), cwd)
        self._ownership.begin(run.family, life.store.pid, life.store.start_ticks)

    def _tell_change(self, run: _Run) -> None:
        """Which of its ranks are lost, and who trains on."""
        life = run.life
        if life.verdict is not None:
            return
        life.changes += 1
        with contextlib.suppress(OSError):  # a full disk; the next change tells it, too
            self._write_state(run)
        self._say(b"U%s %d %s\n" % (run.name.encode(), life.changes, run.status("running", b"")))

    def _start_again(self, run: _Run, number: int, starts: int) -> None:
        life = run.life
        at = next((at for at, rank in enumerate(life.ranks) if rank.number == number), None)
        if at is None or life.verdict is not None or not life.spec.is_elastic:
            return
        if not elastic.may_start_again(life.ranks[at], starts, self._ownership):
            return  # the agent orders it again
        rank = life.ranks[at] = life.ranks[at].again()
        try:
            self._start_rank(run, rank, life.spec.cwd or os.fsencode(life.run.file("work")))
        except NotStarted as problem:
            if rank.wait_status is None:  # there is no process of it at all
                rank.end(problem.code << 8)
            rank.was_lost = True
        self._tell_change(run)

    def _start_meter(self, run: _Run) -> None:
        run.meter = Meter.start(run.life.run, run.life.spec) if Meter is not None else None
        if run.meter is not None:
            self._ownership.meters.add(run.meter.pid)

    def _end_meter(self, run: _Run) -> None:
        """Before the exit record: who reads that finds all that was measured."""
        meter, run.meter = run.meter, None
        if meter is not None:
            meter.finish()
            self._ownership.meters.discard(meter.pid)

    def _start_rank(self, run: _Run, rank: Rank, cwd: bytes) -> None:
        start = rank.start_quickly if self._is_shared else rank.start
        try:
            start(run.life.environment(rank.spec.env), cwd)
        finally:
            if rank.is_running:
                self._by_pid[rank.pid] = (run, rank)
                self._ownership.begin(run.family, rank.pid, rank.start_ticks)

    def _finish(self, run: _Run) -> None:
        """A record that cannot be written is tried again: other runs are not kept waiting."""
        if run.give_up_at is None:
            point("supervisor.ended")
            self._end_meter(run)
            run.life.trim_logs()
            run.give_up_at = time.monotonic() + _EXIT_RECORD_S
        record = run.life.record()
        try:
            written = run.life.run.write_exit(record)
        except OSError:
            run.look_at = time.monotonic() + _AGAIN_S
            if run.look_at > run.give_up_at:
                self._let_go(run)
                self._say(b"Q%s \n" % run.name.encode())
            return
        self._reaper.add(run.life.run)
        text = run.status("exited", written, run.with_exit(record))
        self._let_go(run)
        is_clean = b"-" if self._ownership.orphans() or run.life.ending or not run.has_whole_logs() else b"+"
        self._say(b"X%s %s%s\n" % (run.name.encode(), is_clean, text))
        if run.number is not None:
            self._say(b"S%d %s\n" % (run.number, text))

    def _let_go(self, run: _Run) -> None:
        """From now on it does not live; before its exit is reported."""
        del self._lives[run.name], self._ending[run.name]
        self._ownership.remove(run.family)
        self._reaper.drop(run.life.run)
        for rank in run.life.ranks:
            rank.log.close()
        run.life.let_go()
        ending = run.life.ending
        run.claimed.let_go(is_over=ending is None or not ending.left)

    # --- leases, and who keeps them with us -----------------------------------------------------------------------

    def _expire(self, run: _Run, silent_s: float) -> None:
        """Also a run that ends for another reason has no more time than this."""
        spec = run.life.spec
        assert spec.lease_s is not None
        grace_s = grace_left_s(spec.lease_s, spec.grace_s, silent_s)
        run.life.decide("lease-expired", "the agent was silent for %.1f s" % silent_s, grace_s)
        if run.life.ending is not None:
            run.life.ending.hasten(grace_s)
        self._note_verdict(run)

    def _hear_reaper(self) -> None:
        for name, silent_s in self._reaper.expired():
            if name in self._lives:
                self._expire(self._lives[name], silent_s)
        if self._reaper.is_gone:  # the next tick makes another
            self._poll.unregister(self._reaper)

    def _replace_reaper(self) -> None:
        with contextlib.suppress(OSError):  # tried again at the next tick, if nothing has changed
            self._reaper.replace()
            self._ownership.helper = self._reaper.pid
            self._poll.register(self._reaper, select.POLLIN)
            self._write_reaper()

    def _write_reaper(self) -> None:
        pid = self._reaper.pid
        name = ProcessName.own()._replace(pid=pid, started=terminate.start_time(pid) or 0)
        path = os.path.join(self._folder, reaper.FILE)
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(str(name))
        os.rename(path + ".new", path)

    # --- talking ------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        self._collect()  # a rank that had failed before an order to stop came is the reason for the end, not the order
        with contextlib.suppress(BlockingIOError):
            self._orders += os.read(self._control, 65536)
        *lines, self._orders = self._orders.split(b"\n")
        self._orders = self._orders[: foreign.MOST_BYTES]  # no order of ours is that long
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not from us, or over
                order = foreign.parsed(line)
                run = self._lives[order["run"]]
                if "rank" in order:
                    self._start_again(run, order["rank"], order["starts"])
                else:
                    run.life.obey(order)
                    self._note_verdict(run)

    def _talk(self, what: int) -> None:
        if self._link is not None and what & select.POLLIN:
            self._hear(self._link)
        elif what & (select.POLLHUP | select.POLLERR):
            self._hang_up()

    def _hear(self, link: socket.socket) -> None:
        try:
            part = link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()
            return
        if not part:
            self._is_taking = False
            # It may still want to hear from us; but its end of file must not wake us again and again.
            self._poll.modify(link, 0)
            return
        *lines, self._heard = (self._heard + part).split(b"\n")
        self._wanted += [Wanted(*json.loads(line)) for line in lines]

    def _say(self, line: bytes) -> None:
        if self._link is not None:
            self._unsent += line

    def _flush(self) -> None:
        """Each message costs the node program time: several at once cost it less."""
        now = time.monotonic()
        if self._link is None or not self._unsent or now < self._flush_at:
            return
        self._flush_at = now + _GATHER_S
        try:
            self._unsent = self._unsent[self._link.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNREAD:
                self._hang_up()
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._poll.unregister(self._link)
            self._link.close()
            self._link = None
            self._is_taking = False
            self._unsent = b""


def _gather_checkpoints(life: RunLife) -> None:
    folder = checkpoint_dir.of_run(life.run)
    assert folder is not None
    try:
        folder.gather()
    except (OSError, Refused) as error:
        number = getattr(error, "errno", None) or errno.EBUSY
        what = "its folder for checkpoints"
        raise NotStarted(life.spec.ranks[0].number, number, what, is_of_node=True) from error
