"""JSON of others is read by ``remote/foreign.py``: ``json.loads`` has no bound, and ends a program by nesting."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "ugro"

# Who reads JSON otherwise: whole rooms, and files.
OURS = {
    "store/": "the state, which the agent alone writes",
    "cli/demo/": "our own demo",
    "lab/": "simulated nodes",
    "train/": "a training process reads what its own ranks, its job and its node program wrote",
    "batch/": "a user's own program reads what the workers of its own job say",
    "client/": "the own agent's answers, and files of this account",
    "policy/sweep/": "values of trials, which the agent wrote",
    "core/sweep.py": "values of trials, which the agent wrote",
    "core/ticket.py": "sealed by the agent",
    "agent/safe_mode/": "sealed by the agent, or of its state",
    "agent/sweep/": "rows and the journal of its own state",
    "agent/artifacts/": "records that the agent wrote beside what it collected",
    "agent/hooks/occasions.py": "its own words",
    "agent/relocation.py": "asked by its own command",
    "agent/api/audit_rules.py": "its own answer",
    "config/allowance.py": "its own file",
    "web/tokens.py": "its own file",
    "web/api_allowlist.py": "its own answer",
    "telemetry/export/spool.py": "its own file",
    "remote/bench/main.py": "the parameters of the node program",
    "remote/checks/check.py": "a fork of the node program",
    "remote/hardware/sampler.py": "a fork of the node program",
    "remote/process/execute.py": "a fork of the node program",
    "remote/worker.py": "a fork of the node program",
    "remote/loader.py": "the program itself, whose hash was compared",
    "remote/runs/supervisor.py": "the node program, over a socket of its own",
    "workloads/": "settings of ours; two programs that are sent without this module catch RecursionError",
    # These catch RecursionError themselves, and know better what is too much.
    "remote/foreign.py": "the reader",
    "remote/wire.py": "frames are bounded",
    "remote/files/listing.py": "lines in frames",
    "remote/hardware/gpu_tools.py": "the driver's tools, with warnings around their document",
    "telemetry/records.py": "many lines at once, as fast as can be; values are taken out by hand",
    "telemetry/sources/discovery.py": "the plan, bounded",
    "core/training.py": "the core imports nothing; lines are bounded",
    "web/views/": "previews and services' answers, bounded",
}


def test_json_of_others_is_read_within_bounds() -> None:
    readers = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if re.search(r"\bjson\.loads?\b|JSONDecoder\(", path.read_text())
    }
    others = sorted(one for one in readers if not one.startswith(tuple(OURS)))
    assert not others, "use remote/foreign.py, or say in OURS who wrote it"
    assert all(any(one.startswith(known) for one in readers) for known in OURS), "one of these is not needed any more"
