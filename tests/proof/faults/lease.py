"""A node is cut off and its supervisors with a lease are stopped, for longer than the lease lasts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.proof.faults import Hit, Kind, Step, Target, root_of
from tests.rig import netns
from tests.rig.netns import NetnsNode, Way
from tests.rig.sshd import SshdNode
from tests.rig.waiting import is_alive, signal_all
from ugro.node.process.terminate import ProcessName

# Beyond the lease, the grace and the agent's margin, so that a second attempt begins meanwhile.
_PAUSE_S = 45.0


def leased_supervisors(root: Path) -> Iterator[int]:
    for path in root.glob(".ugro/agents/*/runs/*/spec.json"):
        with suppress(OSError, ValueError, KeyError):
            envelope = json.loads(path.read_text())
            pid = ProcessName.parse(envelope["supervisor"]).pid
            if envelope["spec"].get("lease_s") and not path.with_name("exit.json").exists() and is_alive(pid):
                yield pid


def _pause_and_cut(target: Target, step: Step) -> Hit | None:
    for node in (*target.nodes[step.node :], *target.nodes[: step.node]):
        found = list(leased_supervisors(root_of(node)))
        if found:
            return _paused(node, found)
    return None


def _paused(node: SshdNode, pids: list[int]) -> Hit:
    assert isinstance(node, NetnsNode)
    node.cut(Way.BOTH)
    signal_all(signal.SIGSTOP, pids)

    def undo() -> None:
        node.heal()
        signal_all(signal.SIGCONT, pids)

    return Hit(f"{node.name}, with supervisors {pids}", undo)


KINDS = {"pause and cut": Kind(2, _pause_and_cut, _PAUSE_S, impossible=netns.available)}
