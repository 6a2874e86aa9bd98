"""Guards of GPUs that trials share: each keeps strangers out on its own."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_LOCKS = ("tests/integration/runs/test_gpu_locks.py", "-k", "one_group or last_rank")
_SCHEDULER = ("tests/unit/policy/scheduling/test_sharing.py",)
_STORE = ("tests/unit/store/test_jobs.py", "-k", "one_group")
_GPU_LOCKS = "ugro.node.hardware.gpu_locks"
_SHARING = "ugro.kernel.jobs.scheduling.placement"
_DEVICES = "ugro.kernel.jobs.moves"

MUTANTS = (
    Mutant(
        "a node gives a shared GPU to strangers",
        (Edit(_GPU_LOCKS, "_expect_no_seats", "is_stranger and (not _is_free(seat))", "False"),),
        _LOCKS,
    ),
    Mutant(
        "what a killed supervisor left does not hold its seat",
        (Edit(_GPU_LOCKS, "_is_free", "not is_held and (not record or is_over(record))", "not is_held"),),
        _LOCKS,
    ),
    Mutant(
        "the groups of two agents with the same name are one",
        (
            Edit(
                "ugro.node.runs.claim", "Claims._take_gpus", "'%s %s' % (run.agent.name, share.group)", "share.group"
            ),
        ),
        _LOCKS,
    ),
    Mutant(
        "the scheduler lets trials of another sweep join",
        (
            Edit(
                _SHARING,
                "_seats",
                "group != sharing.group or count >= sharing.most or gpu.is_foreign or gpu.is_broken",
                "count >= sharing.most or gpu.is_foreign or gpu.is_broken",
            ),
        ),
        _SCHEDULER,
    ),
    Mutant(
        "the scheduler lets too many join",
        (
            Edit(
                _SHARING,
                "_seats",
                "group != sharing.group or count >= sharing.most or gpu.is_foreign or gpu.is_broken",
                "group != sharing.group or gpu.is_foreign or gpu.is_broken",
            ),
        ),
        _SCHEDULER,
    ),
    Mutant(
        "a GPU that a job waits for is joined",
        (Edit(_SHARING, "join", "not room.kept and room.node.name not in avoid", "room.node.name not in avoid"),),
        _SCHEDULER,
    ),
    Mutant(
        "the database lets strangers share a GPU",
        (
            Edit(
                _DEVICES,
                "_is_open",
                "not strangers and (sharing is None or len(held) < sharing.most)",
                "sharing is None or len(held) < sharing.most",
            ),
        ),
        _STORE,
    ),
)
