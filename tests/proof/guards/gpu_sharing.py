"""Guards of GPUs that trials share: each keeps strangers out on its own."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_LOCKS = ("tests/integration/runs/test_gpu_locks.py", "-k", "one_group or last_rank")
_SCHEDULER = ("tests/unit/policy/scheduling/test_sharing.py",)
_STORE = ("tests/unit/store/test_jobs.py", "-k", "one_group")
_GPU_LOCKS = "src/ugro/remote/hardware/gpu_locks.py"
_SHARING = "src/ugro/policy/scheduling/sharing.py"
_DEVICES = "src/ugro/store/devices.py"

MUTANTS = (
    Mutant(
        "a node gives a shared GPU to strangers",
        (Edit(_GPU_LOCKS, "if is_stranger and not _is_free(seat):", "if False:"),),
        _LOCKS,
    ),
    Mutant(
        "what a killed supervisor left does not hold its seat",
        (Edit(_GPU_LOCKS, "return not is_held and (not record or is_over(record))", "return not is_held"),),
        _LOCKS,
    ),
    Mutant(
        "the groups of two agents with the same name are one",
        (Edit("src/ugro/remote/runs/claim.py", 'group="%s %s" % (run.agent.name, share.group)', "group=share.group"),),
        _LOCKS,
    ),
    Mutant(
        "the scheduler lets trials of another sweep join",
        (Edit(_SHARING, "if group != sharing.group or count >= sharing.most", "if count >= sharing.most"),),
        _SCHEDULER,
    ),
    Mutant(
        "the scheduler lets too many join",
        (Edit(_SHARING, "if group != sharing.group or count >= sharing.most", "if group != sharing.group"),),
        _SCHEDULER,
    ),
    Mutant(
        "a GPU that a job waits for is joined",
        (Edit(_SHARING, "if not room.kept and room.node.name not in avoid", "if room.node.name not in avoid"),),
        _SCHEDULER,
    ),
    Mutant(
        "the database lets strangers share a GPU",
        (Edit(_DEVICES, "return not strangers and", "return"),),
        _STORE,
    ),
)
