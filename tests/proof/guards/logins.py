"""The guards of jobs in the accounts of their users: who is dialled, what counts as refused, what stays whose."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_NODE = "src/ugro/nodes/node.py"
_TRACKER = "src/ugro/agent/tracking/run_tracker.py"
_LOGINS = "src/ugro/agent/tracking/logins.py"

DIALLED = ("tests/unit/nodes/test_node.py",)
OPENED = ("tests/unit/agent/test_logins.py",)

MUTANTS = (
    Mutant(
        "what runs in the background dials a node that denies the login",
        (Edit(_NODE, "return self.is_resting or is_lasting", "return self.is_resting"),),
        DIALLED,
    ),
    Mutant(
        "what runs in the background dials a node that sleeps",
        (Edit(_NODE, "return self.is_resting or is_lasting", "return is_lasting"),),
        DIALLED,
    ),
    Mutant(
        "everybody who asks has a denied login dialled",
        (Edit(_NODE, "_WAKE_DENIED_AT_MOST_EVERY_S if self._is_denied_login else ", ""),),
        DIALLED,
    ),
    Mutant(
        "a login that is denied once counts as taken away",
        (Edit(_TRACKER, "node.denied_s >= _REFUSED_S", "node.denied_s >= 0"),),
        DIALLED,
    ),
    Mutant(
        "a login that may have runs counts as one that nobody has used",
        (Edit(_TRACKER, "not self.may_have_runs(login) and ", ""),),
        DIALLED,
    ),
    Mutant(
        "logins are opened where nobody's jobs may run",
        (Edit(_LOGINS, " if one.may_use(node.spec.name, node.spec.labels)", ""),),
        OPENED,
    ),
    Mutant(
        "a login whose account is gone is dialled for ever",
        (Edit(_LOGINS, " and not self._watch.is_refused(name)\n\n", "\n\n"),),
        OPENED,
    ),
    Mutant(
        "a login whose account is gone is taken for empty",
        (Edit(_LOGINS, "if name in self._unclear and not self._watch.is_refused(name):", "if name in self._unclear:"),),
        OPENED,
    ),
    Mutant(
        "a Ray cluster is everybody's when the configuration has no accounts any more",
        (Edit("src/ugro/agent/ray_cluster/service.py", " or await self._was_placed_on_login(cluster)", ""),),
        ("tests/unit/agent/test_ray_clusters.py",),
    ),
    Mutant(
        "what somebody chose before that was recorded is the owner's",
        (
            Edit(
                "src/ugro/agent/python_env/reading.py",
                "return replace(request, whose=Whose.OTHER, user=user)",
                "return replace(request, whose=Whose.OWNER)",
            ),
        ),
        ("tests/integration/environments/test_older_records.py",),
    ),
)
