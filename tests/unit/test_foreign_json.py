"""JSON of others is read by ``node/foreign.py``: ``json.loads`` has no bound, and ends a program by nesting."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "ugro"

# Who reads JSON otherwise: whole rooms, and files.
OURS = {
    "lab/": "simulated nodes",
    "train/": "a training process reads what its own ranks, its job and its node program wrote",
    "client/": "the own agent's answers, and files of this account",
    "kernel/store/": "the state, which the agent alone writes",
    "features/batches/": "a user's own program reads what the workers of its own job say",
    "features/safe_mode/": "sealed by the agent, or of its state",
    "features/sweeps/": "values of trials and rows, which the agent wrote",
    "features/hardware/node/bench.py": "the parameters of the node program",
    "features/hooks/service.py": "its own words",
    "features/ray/on_node.py": "settings of ours; programs that are sent without that module catch RecursionError",
    "features/remote_access/client/master.py": "the own agent's answers, and files of this account",
    "features/services/service/door.py": (
        "settings of ours; programs that are sent without that module catch RecursionError"
    ),
    "features/trackers/delivery.py": "its own file",
    "kernel/config/allowance.py": "its own file",
    "kernel/files/results/checkpoints.py": "records that the agent wrote beside what it collected",
    "kernel/files/results/file_store.py": "records that the agent wrote beside what it collected",
    "kernel/files/results/output_store.py": "records that the agent wrote beside what it collected",
    "kernel/jobs/engine/plan.py": "sealed by the agent",
    "kernel/jobs/rows.py": "the state, which the agent alone writes",
    "kernel/jobs/script.py": "settings of ours; programs that are sent without that module catch RecursionError",
    "kernel/operations/audit_rules.py": "its own answer",
    "web/access.py": "its own file",
    "web/api_allowlist.py": "its own answer",
    "web/pages/outputs.py": "previews and services' answers, bounded",
    "features/services/node/": "settings of ours; programs that are sent without that module catch RecursionError",
    "node/check.py": "a fork of the node program",
    "node/hardware/sampler.py": "a fork of the node program",
    "node/process/execute.py": "a fork of the node program",
    "node/worker.py": "a fork of the node program",
    "node/loader.py": "the program itself, whose hash was compared",
    "node/runs/supervisor.py": "the node program, over a socket of its own",
    # These catch RecursionError themselves, and know better what is too much.
    "node/foreign.py": "the reader",
    "node/wire.py": "frames are bounded",
    "node/files/listing.py": "lines in frames",
    "node/hardware/gpu_tools.py": "the driver's tools, with warnings around their document",
    "kernel/telemetry/rules.py": "many lines at once, as fast as can be; values are taken out by hand",
    "kernel/telemetry/collector.py": "the plan, bounded",
    "kernel/telemetry/records.py": "the core imports nothing; lines are bounded",
}


def test_json_of_others_is_read_within_bounds() -> None:
    readers = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if re.search(r"\bjson\.loads?\b|JSONDecoder\(", path.read_text())
    }
    # A store reads the state, which the agent alone writes.
    others = sorted(one for one in readers if not one.startswith(tuple(OURS)) and not one.endswith("/store.py"))
    assert not others, "use node/foreign.py, or say in OURS who wrote it"
    assert all(any(one.startswith(known) for one in readers) for known in OURS), "one of these is not needed any more"
