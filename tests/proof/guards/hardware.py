"""The guards of measurements: no job beside them, nobody else on their sockets, nothing left on a disk."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_NETWORK = "src/ugro/remote/bench/network.py"
_STORAGE = "src/ugro/remote/bench/storage.py"
_SERVICE = "src/ugro/agent/hardware/service.py"
_INPUT = "src/ugro/agent/tracking/scheduler_input.py"
_WIRING = "src/ugro/agent/wiring.py"
_DECLINE = "src/ugro/policy/hardware/decline.py"

REMOTE = ("tests/unit/remote/test_bench.py",)
DECLINE = ("tests/unit/policy/hardware/test_decline.py",)
LINES = ("tests/unit/agent/test_bench_lines.py",)
USE = ("tests/integration/nodes/test_bench_use.py", "-k")
COMMAND = ("tests/integration/nodes/test_bench.py", "-k")

MUTANTS = (
    Mutant(
        "anybody who connects is measured with",
        (Edit(_NETWORK, "if hmac.compare_digest(_exactly(peer, _PROOF), _proof(secret, challenge)):", "if True:"),),
        (*REMOTE, "-k", "stranger"),
    ),
    Mutant(
        "the listener is open at every address",
        (Edit(_NETWORK, 'socket.create_server((str(params["address"]), 0)', 'socket.create_server(("0.0.0.0", 0)'),),
        (*REMOTE, "-k", "bound_to_its_address"),
    ),
    Mutant(
        "a disk is filled to the brim",
        (Edit(_STORAGE, "    if shortage is not None:\n", "    if False:\n"),),
        (*REMOTE, "-k", "little_room"),
    ),
    Mutant(
        "jobs start on a node that is measured",
        (Edit(_INPUT, "        return self.held\n", "        return None\n"),),
        (*COMMAND, "no_job_starts"),
    ),
    Mutant(
        "a node with a job is measured",
        (Edit(_SERVICE, "if found and not wish.is_forced:", "if False:"),),
        (*COMMAND, "unless_forced"),
    ),
    Mutant(
        "one low run is a finding",
        (Edit(_DECLINE, "before, now = median(earlier), max(low)", "before, now = median(earlier), min(low)"),),
        DECLINE,
    ),
    Mutant(
        "any change of a quick fsync is a finding",
        (Edit(_DECLINE, "min(before * (1 - _SYNC_MARGIN), 1 / _LONG_SYNC_S)", "before * (1 - _SYNC_MARGIN)"),),
        DECLINE,
    ),
    Mutant(
        "static shares ignore what was measured",
        (Edit(_WIRING, "    planner.measured = base.measured.latest_of\n", ""),),
        (*USE, "static_shares"),
    ),
    Mutant(
        "nodes are chosen without what was measured",
        (Edit(_WIRING, "    health.speeds = base.measured.speeds\n", ""),),
        (*USE, "equal_nodes"),
    ),
    Mutant(
        "a node's figures are believed whatever they are",
        (Edit("src/ugro/agent/hardware/lines.py", "or not 0 <= value <= _LARGEST:", "and False:"),),
        LINES,
    ),
)
