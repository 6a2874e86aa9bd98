"""The guards of measurements: no job beside them, nobody else on their sockets, nothing left on a disk."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_NETWORK = "ugro.features.hardware.node.network"
_STORAGE = "ugro.features.hardware.node.machine"
_SERVICE = "ugro.features.hardware.service"
_INPUT = "ugro.kernel.jobs.engine.scheduler_input"
_WIRING = "ugro.kernel.agent.wiring"
_DECLINE = "ugro.features.hardware.rules"

REMOTE = ("tests/unit/remote/test_bench.py",)
DECLINE = ("tests/unit/policy/hardware/test_decline.py",)
LINES = ("tests/unit/agent/test_bench_lines.py",)
USE = ("tests/integration/nodes/test_bench_use.py", "-k")
COMMAND = ("tests/integration/nodes/test_bench.py", "-k")

MUTANTS = (
    Mutant(
        "anybody who connects is measured with",
        (Edit(_NETWORK, "_admit", "hmac.compare_digest(_exactly(peer, _PROOF), _proof(secret, challenge))", "True"),),
        (*REMOTE, "-k", "stranger"),
    ),
    Mutant(
        "the listener is open at every address",
        (Edit(_NETWORK, "listen", "str(params['address'])", "'0.0.0.0'"),),
        (*REMOTE, "-k", "bound_to_its_address"),
    ),
    Mutant(
        "a disk is filled to the brim",
        (Edit(_STORAGE, "storage", "shortage is not None", "False"),),
        (*REMOTE, "-k", "little_room"),
    ),
    Mutant(
        "jobs start on a node that is measured",
        (Edit(_INPUT, "_Standing.objection", "self.held", "None"),),
        (*COMMAND, "no_job_starts"),
    ),
    Mutant(
        "a node with a job is measured",
        (Edit(_SERVICE, "HardwareService._refuse", "found and (not wish.is_forced)", "False"),),
        (*COMMAND, "unless_forced"),
    ),
    Mutant(
        "one low run is a finding",
        (Edit(_DECLINE, "declined", "max", "min"),),
        DECLINE,
    ),
    Mutant(
        "any change of a quick fsync is a finding",
        (
            Edit(
                _DECLINE,
                "Series.least",
                "min(before * (1 - _SYNC_MARGIN), 1 / _LONG_SYNC_S)",
                "before * (1 - _SYNC_MARGIN)",
            ),
        ),
        DECLINE,
    ),
    Mutant(
        "static shares ignore what was measured",
        (Edit(_WIRING, "_footing", "base.measured.latest_of", "lambda node: None"),),
        (*USE, "static_shares"),
    ),
    Mutant(
        "nodes are chosen without what was measured",
        (Edit(_WIRING, "_view", "measured.speeds", "lambda gpus: {}"),),
        (*USE, "equal_nodes"),
    ),
    Mutant(
        "a node's figures are believed whatever they are",
        (
            Edit(
                "ugro.features.hardware.subject",
                "_number",
                "not isinstance(value, int | float) or not math.isfinite(value) or (not 0 <= value <= _LARGEST)",
                "not isinstance(value, int | float) or (not math.isfinite(value) and False)",
            ),
        ),
        LINES,
    ),
)
