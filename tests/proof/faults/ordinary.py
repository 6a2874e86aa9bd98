"""Processes are killed and frozen, machines lose power, cables are cut, disks are full."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.proof.faults import Hit, Kind, Step, Target, root_of
from tests.rig import disk, netns
from tests.rig.agent import holder
from tests.rig.judge import processes_of_runs
from tests.rig.netns import NetnsNode, Way
from tests.rig.sshd import SshdNode
from tests.rig.waiting import descendants, is_alive, name_of, signal_all
from ugro.node.process.terminate import ProcessName

_PROGRAM = b"sys.stdin.readline"
_WAYS = (Way.BOTH, Way.BOTH, Way.TO_NODE, Way.FROM_NODE)
_FREEZE_S = 10.0
# Long enough for the keepalive (8 s) to give a node up, now and then.
_CUT_S = 14.0


def to_one(whom: str, act: Callable[[int, str], Hit]) -> Callable[[Target, Step], Hit | None]:
    """Does it to one such process: from the chosen node on, the first that has one, as many stand idle."""

    def inflict(target: Target, step: Step) -> Hit | None:
        for candidate in (*target.nodes[step.node :], *target.nodes[: step.node]):
            pids = _processes(target, whom, candidate)
            if pids:
                return act(pids[int(step.pick * len(pids))], candidate.name)
        return None

    return inflict


def _processes(target: Target, whom: str, node: SshdNode) -> list[int]:
    if whom == "rank":
        inside = set(processes_of_runs([root_of(node)]))
        return [entry.pid for entry in target.ledger.alive() if entry.event == "begin" and entry.pid in inside]
    if whom == "supervisor":
        return supervisors(root_of(node))
    if whom == "node program":
        return [pid for pid in node.sessions() if _PROGRAM in _command(pid)]
    agent = holder(target.home)
    if agent is None or whom == "agent":
        return [agent] if agent else []
    return [pid for pid in descendants([agent]) if name_of(pid) == "ssh" and node.name.encode() in _words(pid)]


def supervisors(root: Path) -> list[int]:
    """Each has a folder of its process's name."""
    pids = [ProcessName.parse(path.name).pid for path in root.glob(".ugro/agents/*/supervisors/*")]
    return [pid for pid in sorted(pids) if is_alive(pid)]


def kill(pid: int, where: str) -> Hit:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Hit(f"{pid} ({where})")


def freeze(pid: int, where: str) -> Hit:
    signal_all(signal.SIGSTOP, [pid])
    return Hit(f"{pid} ({where})", lambda: signal_all(signal.SIGCONT, [pid]))


def cut(target: Target, step: Step) -> Hit:
    node = target.nodes[step.node]
    assert isinstance(node, NetnsNode)
    way = _WAYS[int(step.pick * len(_WAYS))]
    node.cut(way)
    return Hit(f"{node.name} {way}", node.heal)


def _fill(target: Target, step: Step) -> Hit | None:
    if not target.disks:
        return None
    name, full = list(target.disks.items())[int(step.pick * len(target.disks))]
    return Hit(f"{name}: {full.fill()} bytes taken", full.free)


def _kill_sessions(target: Target, step: Step) -> Hit:
    node = target.nodes[step.node]
    count = len(node.sessions())
    node.kill_sessions(commands=False)
    return Hit(f"{node.name}: {count} processes in sessions")


def _power_off(target: Target, step: Step) -> Hit | None:
    node = target.nodes[step.node]
    if node.pid is None:
        return None
    count = len(node.processes())
    node.power_off()
    return Hit(f"{node.name}: {count} processes", lambda: node.start() if node.pid is None else None)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _words(pid: int) -> Sequence[bytes]:
    return _command(pid).split(b"\0")


KINDS = {
    "kill rank": Kind(4, to_one("rank", kill)),
    "kill supervisor": Kind(4, to_one("supervisor", kill)),
    "kill node program": Kind(4, to_one("node program", kill)),
    "kill session": Kind(3, _kill_sessions),
    "kill ssh": Kind(3, to_one("ssh", kill)),
    "kill agent": Kind(5, to_one("agent", kill)),
    "freeze node program": Kind(2, to_one("node program", freeze), _FREEZE_S),
    "freeze supervisor": Kind(2, to_one("supervisor", freeze), _FREEZE_S),
    "freeze agent": Kind(1, to_one("agent", freeze), _FREEZE_S),
    "power off": Kind(1, _power_off),
    "cut": Kind(3, cut, _CUT_S, impossible=netns.available),
    "fill disk": Kind(2, _fill, impossible=disk.available),
}
