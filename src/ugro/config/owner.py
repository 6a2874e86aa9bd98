"""The keys under ``owner``: of the cluster file, and of a node."""

from __future__ import annotations

from ugro.config.kinds import Choice, Duration
from ugro.config.section import Section, key, section
from ugro.core.owner import OwnerRule, Then, When


@section
class Owner(Section):
    """What jobs do while somebody uses a machine. Off by default. A node's own keys come before the common ones."""

    when: When = key(
        When.NEVER,
        Choice(When),
        "How UGRO notices its owner. `active`: somebody types or uses the display; `gpu_busy`: a process that is not a "
        "job of UGRO uses one of its GPUs; `never`: not at all.",
        example="active",
    )
    then: Then = key(
        Then.PAUSE,
        Choice(Then),
        "What happens then, besides that no new jobs start there. `pause`: running jobs are stopped with their "
        "checkpoints and queued again; `shrink`: trainings on several nodes leave the node a small part of each "
        "batch, and other jobs without GPUs get a small part of its cores; `drain`: running jobs continue.",
        example="drain",
    )
    quiet: float = key(600.0, Duration(), "After this time without a sign of the owner, the node takes jobs again.")

    def rule(self, common: Owner) -> OwnerRule | None:
        """None: its owner is not looked for."""
        when, then, quiet_s = (
            getattr(self if name in self.given_keys else common, name) for name in ("when", "then", "quiet")
        )
        return None if when is When.NEVER else OwnerRule(when, then, quiet_s)
