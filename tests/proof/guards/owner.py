"""The guards of the owner of a machine: who counts as one, and that jobs do not thrash."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_TERMINALS = "ugro.features.power.node.presence"
_GPU_USERS = "ugro.features.power.node.presence"
_POLICY = "ugro.features.power.rules"
_INPUT = "ugro.kernel.jobs.engine.scheduler_input"

SIGNS = ("tests/unit/remote/test_presence.py",)
RULES = ("tests/unit/policy/nodes/test_owner.py",)
PEOPLE = ("tests/integration/engine/test_owners.py",)

MUTANTS = (
    Mutant(
        "a terminal of our own jobs counts as a person",
        (Edit(_TERMINALS, "used_by_people", "people - ours", "people | ours"),),
        (*SIGNS, "-k", "our_own_jobs"),
    ),
    Mutant(
        "a job of ours that is about to end counts as somebody's process",
        (
            Edit(
                _GPU_USERS,
                "GpuUsers.look",
                "[text for pid, text in theirs if pid in before]",
                "[text for _, text in theirs]",
            ),
        ),
        (*SIGNS, "-k", "seen_twice"),
    ),
    Mutant(
        "a node takes jobs again as soon as nobody types",
        (Edit(_POLICY, "judge", "idle_s < rule.quiet_s", "idle_s < 0.3"),),
        (*PEOPLE, "-k", "again_and_again"),
    ),
    Mutant(
        "jobs start on a machine whose owner is there",
        (Edit(_INPUT, "_Standing.objection", "if self.owner is not None:\n    return self.owner", ""),),
        (*PEOPLE, "-k", "makes_way"),
    ),
    Mutant(
        "an owner who goes takes a person's drain with him",
        (Edit(_INPUT, "SchedulerInput._nodes", "drained_machines(drained, seconds)", "{}"),),
        (*PEOPLE, "-k", "drain_of_a_person"),
    ),
    Mutant(
        "a job that ends already is asked to make way, too",
        (
            Edit(
                _POLICY,
                "stops",
                "not there or job.ending is not None or job.state not in _STOPPED or (job.placement is None)",
                "not there or job.state not in _STOPPED or job.placement is None",
            ),
        ),
        (*RULES, "-k", "ends_already"),
    ),
    Mutant(
        "the next agent does not know who was there",
        (Edit("ugro.features.power.node.signs", "Watch.look", "self._record.save()", ""),),
        (*SIGNS, "-k", "outlives"),
    ),
)
