"""Somebody sets the clock of a machine, and now and then sets it right again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from tests.proof.faults import Hit, Kind, Step, Target
from tests.rig.clock import HOUR_S, YEAR_S, RigClock, compiler
from tests.rig.sshd import SshdNode

_JUMPS = (2 * HOUR_S, -2 * HOUR_S, 10 * YEAR_S, -10 * YEAR_S, 90.0, -90.0)
_AGENT = "agent"
_clocks: dict[str, RigClock] = {}  # of the run that is being made


def _prepare(nodes: Sequence[SshdNode], stack: ExitStack) -> None:
    """Clocks for all nodes, and one for the agents, which commands of this process start."""
    folder = nodes[0].directory.parent / "clocks"
    _clocks.clear()
    _clocks.update({name: RigClock(folder, name) for name in (_AGENT, *(node.name for node in nodes))})
    for node in nodes:
        node.options = replace(node.options, variables=tuple(_clocks[node.name].env.items()))
    for key, value in _clocks[_AGENT].env.items():
        stack.callback(_restore, key, os.environ.get(key))
        os.environ[key] = value


def _restore(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def _set(whose: Callable[[Target, Step], str]) -> Callable[[Target, Step], Hit]:
    def inflict(target: Target, step: Step) -> Hit:
        name = whose(target, step)
        by_s = _JUMPS[int(step.pick * len(_JUMPS))]
        _clocks[name].jump(by_s)
        # Every other one stays as it is.
        is_undone = int(step.pick * 1000) % 2 == 0
        return Hit(f"{name}: {by_s:+g} s", (lambda: _clocks[name].jump(-by_s)) if is_undone else None)

    return inflict


def _no_compiler() -> str | None:
    return None if compiler() else "there is no C compiler"


KINDS = {
    "set the agent's clock": Kind(2, _set(lambda target, step: _AGENT), 4.0, impossible=_no_compiler, prepare=_prepare),
    "set a node's clock": Kind(
        2, _set(lambda target, step: target.nodes[step.node].name), 4.0, impossible=_no_compiler
    ),
}
