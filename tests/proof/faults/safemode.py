"""An older state is put back: a copy is made, and some seconds later the agent is killed and goes on with the copy.

The key, the mark and the journal stay. Then the user decides, as soon as every node has said what it runs.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

from tests.proof.faults import Hit, Kind, Step, Target
from tests.rig.judge import now_s
from tests.rig.older_state import is_in_safe_mode, put_back, saved
from ugro import Client
from ugro.features.safe_mode.operations import ReconcileAgent
from ugro.kernel.support.errors import UgroError

_LONGEST_S = 6.0
_DECIDE_S = 600.0  # nodes are cut off and agents killed meanwhile, and each new one asks them all again
_AGAIN_S = 0.2


def _older_state(target: Target, step: Step) -> Hit | None:
    if not (target.home / "state.db").exists():
        return None
    before_s = now_s()
    copy = saved(target.home, Path(tempfile.mkdtemp(dir=target.home.parent)) / "state.db")
    saved_s = min(before_s, target.book.known_until(is_undecided=is_in_safe_mode(copy)))

    def undo() -> None:
        put_back(target.home, copy)
        target.book.was_put_back(saved_s)
        back_s = now_s()
        # Nodes that are cut off come back by steps of this thread: the decision has one of its own.
        Thread(target=_adopt, args=(target, saved_s, back_s), name="adopt", daemon=True).start()

    return Hit(f"a copy of {step.length_s:g} s", undo)


def _adopt(target: Target, saved_s: float, back_s: float) -> None:
    deadline = time.monotonic() + _DECIDE_S
    while time.monotonic() < deadline:
        with suppress(UgroError), Client(home=target.home, cluster=target.cluster) as client:
            if client.agent().safe_mode is None:
                break
            client.ask(ReconcileAgent("adopt"))
        time.sleep(_AGAIN_S)
    target.book.was_restored(saved_s, back_s)


KINDS = {"older state": Kind(2, _older_state, longest_s=_LONGEST_S)}
