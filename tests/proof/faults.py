"""What a chaos run does to a cluster, each to one target that is there at the time, and how it is undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.proof.schedule import Step
from tests.rig.agent import holder
from tests.rig.disk import SmallDisk
from tests.rig.judge import Ledger, processes_of_runs
from tests.rig.netns import NetnsNode, Way
from tests.rig.sshd import SshdNode
from tests.rig.waiting import descendants, is_alive, name_of, signal_all
from ugro.remote.process_id import ProcessName

Undo = Callable[[], None]
_PROGRAM = b"sys.stdin.readline"
_WAYS = (Way.BOTH, Way.BOTH, Way.TO_NODE, Way.FROM_NODE)


@dataclass(frozen=True)
class Hit:
    """What was done, and how to undo it; None as undo: nothing is to be undone."""

    text: str
    undo: Undo | None = None


@dataclass
class Faults:
    home: Path
    ledger: Ledger
    nodes: Sequence[SshdNode]
    disks: dict[str, SmallDisk] = field(default_factory=dict)

    def inflict(self, step: Step) -> Hit | None:
        """None: there was nothing to do it to."""
        node = self.nodes[step.node]
        if step.kind == "power off":
            return _power_off(node)
        if step.kind == "cut":
            return _cut(node, step.pick)
        if step.kind == "fill disk":
            return self._fill(step.pick)
        if step.kind == "kill session":
            return _kill_sessions(node)
        what, _, whom = step.kind.partition(" ")
        # From the chosen node on, the first that has such a process: many stand idle.
        for candidate in (*self.nodes[step.node :], *self.nodes[: step.node]):
            pid = _one_of(self._processes(whom, candidate), step.pick)
            if pid is not None:
                return _kill(pid, candidate.name) if what == "kill" else _freeze(pid, candidate.name)
        return None

    def _processes(self, whom: str, node: SshdNode) -> list[int]:
        if whom == "rank":
            inside = set(processes_of_runs([root_of(node)]))
            return [entry.pid for entry in self.ledger.alive() if entry.event == "begin" and entry.pid in inside]
        if whom == "supervisor":
            return _supervisors(root_of(node))
        if whom == "node program":
            return [pid for pid in node.sessions() if _PROGRAM in _command(pid)]
        agent = holder(self.home)
        if agent is None or whom == "agent":
            return [agent] if agent else []
        return [pid for pid in descendants([agent]) if name_of(pid) == "ssh" and node.name.encode() in _words(pid)]

    def _fill(self, pick: float) -> Hit | None:
        name = list(self.disks)[int(pick * len(self.disks))] if self.disks else None
        if name is None:
            return None
        disk = self.disks[name]
        return Hit(f"{name}: {disk.fill()} bytes taken", disk.free)


def root_of(node: SshdNode) -> Path:
    return node.home / "grid_workspace"


def _one_of(pids: Sequence[int], pick: float) -> int | None:
    return pids[int(pick * len(pids))] if pids else None


def _kill(pid: int, where: str) -> Hit:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Hit(f"{pid} ({where})")


def _freeze(pid: int, where: str) -> Hit:
    signal_all(signal.SIGSTOP, [pid])
    return Hit(f"{pid} ({where})", lambda: signal_all(signal.SIGCONT, [pid]))


def _kill_sessions(node: SshdNode) -> Hit:
    count = len(node.sessions())
    node.kill_sessions(commands=False)
    return Hit(f"{node.name}: {count} processes in sessions")


def _power_off(node: SshdNode) -> Hit | None:
    if node.pid is None:
        return None
    count = len(node.processes())
    node.power_off()
    return Hit(f"{node.name}: {count} processes", lambda: node.start() if node.pid is None else None)


def _cut(node: SshdNode, pick: float) -> Hit:
    assert isinstance(node, NetnsNode)
    way = _WAYS[int(pick * len(_WAYS))]
    node.cut(way)
    return Hit(f"{node.name} {way}", node.heal)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _words(pid: int) -> list[bytes]:
    return _command(pid).split(b"\0")


def _supervisors(root: Path) -> list[int]:
    """Each has a folder of its process's name."""
    pids = [ProcessName.parse(path.name).pid for path in root.glob(".ugro/agents/*/supervisors/*")]
    return [pid for pid in sorted(pids) if is_alive(pid)]
