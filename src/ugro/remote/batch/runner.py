"""The keeper: a process that looks after many small runs on this node at once, each as a supervisor would.

It outlives the link, the node program and the agent. For each run it holds the lock while the run lives. The node
program that made it hands it runs over a socket and is told over the same how they began and ended; when that closes,
it takes no more, and ends with its last run. Orders come through a pipe with a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from typing import Dict, List, Optional

from ugro.remote import wakeup
from ugro.remote.batch import claim, inline_logs, reaper
from ugro.remote.batch.claim import Claimed, Desk, TakesTime, Wanted
from ugro.remote.batch.ownership import KeptFamily, Kin
from ugro.remote.process import process_tree, terminate
from ugro.remote.process.oom import OomCounter
from ugro.remote.process_id import ProcessName
from ugro.remote.program import Refused
from ugro.remote.runs.run_state import RunLife
from ugro.remote.runs.supervisor import LAST_WORD_S, TICK_S
from ugro.remote.state.rundir import AgentDir, point

CONTROL = "control"
_STARTS_AT_ONCE = 4  # then those that have ended are heard
_MOST_UNREAD = 8 << 20  # a node program that reads no more is left to look at the files
_GATHER_S = 0.005
_AGAIN_S = 1.0


def main(argv: List[str]) -> None:
    root, agent, node_key, link = argv
    os.set_inheritable(int(link), False)  # it came to us by an exec; it must not go to the ranks by another
    begin(AgentDir(root, agent, node_key), int(link))


def begin(agent: AgentDir, link: int) -> None:
    lasting = reaper.fork(agent, link)
    Keeper(agent, socket.socket(fileno=link), lasting).run()


class _Kept:
    def __init__(self, claimed: Claimed, life: RunLife, family: KeptFamily) -> None:
        self.claimed = claimed
        self.life = life
        self.family = family
        self.state = b""
        self.number: Optional[int] = None  # of the start that is not answered yet
        self.look_at = 0.0
        self.give_up_at: Optional[float] = None

    def has_whole_log(self) -> bool:
        return all(rank.log.is_whole for rank in self.life.ranks)


class Keeper:
    def __init__(self, agent: AgentDir, link: socket.socket, lasting: reaper.Lasting) -> None:
        self._agent = agent
        self._link: Optional[socket.socket] = link
        self._lasting = lasting
        self._is_taking = True
        self._wanted: List[Wanted] = []
        self._lives: Dict[str, _Kept] = {}
        self._over: Dict[str, _Kept] = {}  # those with a verdict
        self._by_pid: Dict[int, _Kept] = {}
        self._kin = Kin()
        self._heard = b""
        self._orders = b""
        self._unsent = b""
        self._has_term = False
        self._tick_at = 0.0
        self._flush_at = 0.0
        self._oom = OomCounter()

    def run(self) -> None:
        process_tree.become_subreaper()
        process = ProcessName.own()
        self._started_ticks, self._cgroup = process.started, terminate.own_cgroup()
        name = str(process)
        folder = self._agent.keeper(name)
        self._wake = wakeup.listen(self._note_term)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._control = wakeup.open_control(os.path.join(folder, CONTROL))
        self._desk = Desk(folder, name)
        point("keeper.begun")
        self._poll = select.poll()
        for fd in (self._wake, self._control):
            self._poll.register(fd, select.POLLIN)
        assert self._link is not None
        self._link.setblocking(False)
        self._poll.register(self._link, select.POLLIN)
        self._say(b"ready\n")
        self._flush()
        while not self._is_over():
            self._round(self._pause_s())
        self._desk.clear()

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
        times = [kept_.look_at for kept_ in self._over.values()]
        if self._lives:
            times.append(self._tick_at)
        if self._unsent:
            times.append(self._flush_at)
        return max(0.0, min(times) - now) if times else None

    def _round(self, pause_s: Optional[float]) -> None:
        for fd, what in self._poll.poll(None if pause_s is None else pause_s * 1000):
            if fd == self._wake:
                wakeup.drain(fd)
            elif fd == self._control:
                self._obey()
            elif self._link is not None:
                self._talk(what)
        self._kin.forget_look()
        self._collect()
        for _ in range(min(_STARTS_AT_ONCE, len(self._wanted))):
            self._start(self._wanted.pop(0))
        if self._has_term:
            self._interrupt()
        self._step_all()
        self._lasting.flush()
        self._tick()
        self._flush()
        if self._is_taking and not self._wanted and not self._over:
            self._desk.prepare()

    def _interrupt(self) -> None:
        for name, kept_ in self._lives.items():
            kept_.life.decide("interrupted", "SIGTERM came", None)
            self._over[name] = kept_

    def _collect(self) -> None:
        for pid, wait_status in process_tree.reap().items():
            kept_ = self._by_pid.pop(pid, None)
            self._kin.ranks.pop(pid, None)
            if kept_ is not None:
                kept_.life.note_end(kept_.life.ranks[0], wait_status)
                kept_.life.judge()
                self._over[kept_.life.run.name] = kept_
                kept_.look_at = 0.0

    def _step_all(self) -> None:
        now = time.monotonic()
        for kept_ in [kept_ for kept_ in self._over.values() if kept_.look_at <= now]:
            if kept_.give_up_at is not None or kept_.life.step():
                self._finish(kept_)
            elif kept_.life.ending is not None:
                kept_.look_at = now + min(kept_.life.ending.pause_s, TICK_S)

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        self._oom.sample()
        for kept_ in self._lives.values():
            kept_.life.trim_logs()

    # --- the life of a run --------------------------------------------------------------------------------------

    def _start(self, wanted: Wanted) -> None:
        try:
            run = self._agent.run(wanted.job, wanted.attempt)
            claimed = self._desk.claim(run, wanted)
        except (TakesTime, FileNotFoundError, BlockingIOError):  # the latter: somebody swept its blank, or looks at it
            self._say(b"L%d \n" % wanted.number)
        except Refused as refusal:
            self._refuse(wanted.number, refusal.kind, str(refusal))
        except OSError as error:
            self._refuse(wanted.number, "os", "the run cannot be set up: %s" % error)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            self._refuse(wanted.number, "usage", "bad parameters: %.200s" % error)
        else:
            self._begin(claimed, wanted.number)

    def _refuse(self, number: int, kind: str, text: str) -> None:
        self._say(b"F%d %s\n" % (number, json.dumps({"kind": kind, "message": text}).encode()))

    def _begin(self, claimed: Claimed, number: int) -> None:
        family = KeptFamily(self._kin, claimed.run.mark)
        life = RunLife(claimed.run, claimed.spec, family, self._oom)
        kept_ = self._lives[claimed.run.name] = _Kept(claimed, life, family)
        self._kin.add(family)
        life.start(lambda: self._start_rank(kept_))
        point("keeper.stated")
        if life.verdict is None:
            self._say(b"S%d %s\n" % (number, claim.told(claimed, "running", kept_.state, b"")))
        else:
            kept_.number = number
            self._over[claimed.run.name] = kept_

    def _start_rank(self, kept_: _Kept) -> None:
        life = kept_.life
        try:
            claim.start_rank(life)
        finally:
            for rank in life.ranks:
                if rank.is_running:
                    self._by_pid[rank.pid] = kept_
                    self._kin.begin(kept_.family, rank.pid, rank.start_ticks)
        state = life.state(kept_.claimed.spec_hash, self._started_ticks, self._cgroup)
        kept_.state = claim.write_state(life.run, state)

    def _finish(self, kept_: _Kept) -> None:
        """When its last word cannot be written, it is tried again: others are not kept waiting."""
        if kept_.give_up_at is None:
            point("keeper.ended")
            kept_.give_up_at = time.monotonic() + LAST_WORD_S
        try:
            record = kept_.life.run.write_exit(kept_.life.record())
        except OSError:
            kept_.look_at = time.monotonic() + _AGAIN_S
            if kept_.look_at > kept_.give_up_at:
                self._let_go(kept_)
                self._say(b"Q%s \n" % kept_.life.run.name.encode())
            return
        self._lasting.add(kept_.life.run)
        text = claim.told(kept_.claimed, "exited", kept_.state, record, self._told_with_its_end(kept_.life))
        self._let_go(kept_)
        is_clean = b"-" if self._kin.strangers() or kept_.life.ending or not kept_.has_whole_log() else b"+"
        self._say(b"X%s %s%s\n" % (kept_.life.run.name.encode(), is_clean, text))
        if kept_.number is not None:
            self._say(b"S%d %s\n" % (kept_.number, text))

    def _told_with_its_end(self, life: RunLife) -> bytes:
        logs = self._small_log(life)
        has_outputs = life.spec.outputs or life.run.has_written()
        return (b',"logs":%s' % logs if logs else b"") + (b',"has_outputs":true' if has_outputs else b"")

    def _small_log(self, life: RunLife) -> bytes:
        has_writers = life.ending is not None and life.ending.left
        if life.ranks and life.ranks[0].log.is_whole and not has_writers:
            with contextlib.suppress(OSError):
                content = inline_logs.content_of(life.run.log(0), inline_logs.MOST_BYTES)
                return b"" if content is None else inline_logs.text_of(content)
        return b""

    def _let_go(self, kept_: _Kept) -> None:
        """From now on it does not live; before anybody is told that it is over."""
        name = kept_.life.run.name
        del self._lives[name], self._over[name]
        self._kin.remove(kept_.family)
        for rank in kept_.life.ranks:
            rank.log.close()
        os.close(kept_.claimed.lock)

    # --- talking ------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        self._collect()  # a rank that had failed before an order to stop came is the reason for the end, not the order
        with contextlib.suppress(BlockingIOError):
            self._orders += os.read(self._control, 65536)
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not from us, or over
                order = json.loads(line)
                kept_ = self._lives[order["run"]]
                kept_.life.obey(order)
                kept_.look_at = 0.0
                self._over[order["run"]] = kept_

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
            # It may still want to hear from us; only that it has said all must not be told again and again.
            self._poll.modify(link, 0)
            return
        *lines, self._heard = (self._heard + part).split(b"\n")
        self._wanted += [Wanted(*json.loads(line)) for line in lines]

    def _say(self, line: bytes) -> None:
        if self._link is not None:
            self._unsent += line

    def _flush(self) -> None:
        """Each time that it is told something, a node program has work: told together, it has less."""
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
