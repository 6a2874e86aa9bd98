"""The guards of jobs in the accounts of their users: who is dialled, what counts as refused, what stays whose."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_NODE = "ugro.kernel.links.node"
_TRACKER = "ugro.kernel.jobs.engine.run_tracker"
_LOGINS = "ugro.kernel.links.logins"

DIALLED = ("tests/unit/nodes/test_node.py",)
OPENED = ("tests/unit/agent/test_logins.py",)

MUTANTS = (
    Mutant(
        "what runs in the background dials a node that denies the login",
        (Edit(_NODE, "Node._is_left_alone", "self.is_resting or is_lasting", "self.is_resting"),),
        DIALLED,
    ),
    Mutant(
        "what runs in the background dials a node that sleeps",
        (Edit(_NODE, "Node._is_left_alone", "self.is_resting or is_lasting", "is_lasting"),),
        DIALLED,
    ),
    Mutant(
        "everybody who asks has a denied login dialled",
        (
            Edit(
                _NODE,
                "Node.wake",
                "_WAKE_DENIED_AT_MOST_EVERY_S if self._is_denied_login else _WAKE_AT_MOST_EVERY_S",
                "_WAKE_AT_MOST_EVERY_S",
            ),
        ),
        DIALLED,
    ),
    Mutant(
        "a login that is denied once counts as taken away",
        (Edit(_TRACKER, "RunTracker.is_refused", "_REFUSED_S", "0"),),
        DIALLED,
    ),
    Mutant(
        "a login that may have runs counts as one that nobody has used",
        (
            Edit(
                _TRACKER,
                "RunTracker.has_no_account",
                "login not in self.inventory.known_logins.unclear and self.is_refused(login)",
                "self.is_refused(login)",
            ),
        ),
        DIALLED,
    ),
    Mutant(
        "logins are opened where nobody's jobs may run",
        (
            Edit(
                _LOGINS,
                "Logins._needed",
                "{one.user for one in waiting if one.may_use(node.spec.name, node.spec.labels)}",
                "{one.user for one in waiting}",
            ),
        ),
        OPENED,
    ),
    Mutant(
        "a login whose account is gone is dialled for ever",
        (
            Edit(
                _LOGINS,
                "Logins._may_say_more",
                "self._watch.has_runs(name) and (not self._watch.is_refused(name))",
                "self._watch.has_runs(name)",
            ),
        ),
        OPENED,
    ),
    Mutant(
        "a login whose account is gone is taken for empty",
        (
            Edit(
                _LOGINS,
                "Logins.close",
                "name in self._known.unclear and (not self._watch.is_refused(name))",
                "name in self._known.unclear",
            ),
        ),
        OPENED,
    ),
    Mutant(
        "a Ray cluster is everybody's when the configuration has no accounts any more",
        (
            Edit(
                "ugro.features.ray.service",
                "RayClusters.expect_open_to",
                "self._starting.is_personal(cluster) or await self._was_placed_on_login(cluster)",
                "self._starting.is_personal(cluster)",
            ),
        ),
        ("tests/unit/agent/test_ray_clusters.py",),
    ),
)
