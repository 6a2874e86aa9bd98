"""A model as it is spread over the ranks: what a step, a checkpoint and the balancer need to know about it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ugro.core.errors import UsageError
from ugro.train import checkpoint
from ugro.train.group import Group

if TYPE_CHECKING:
    from ugro.train.parallel.sharded_exchange import Exchanges
    from ugro.train.stepping import Stepping


class Way:
    """Here every rank has a complete model. Other ways override what is different with them."""

    # Ranks communicate inside forward and backward, so all compute the same number of micro-batches.
    is_lockstep = False
    # Waiting for others inside forward and backward is reported, so that what is left is a rank's own time.
    reports_waits = False
    # No rank has the complete model: each writes its part of a checkpoint.
    is_sharded = False
    # Profiles are of ranks, also where several ranks of a unit share the work on its samples.
    profiles_ranks = False
    # Inside forward and backward, where they can be counted.
    exchanges: Exchanges | None = None

    def __init__(self, model: Any, group: Group, units: Sequence[int] | None = None) -> None:
        self.model = model  # as the script uses it
        # Of each rank; ranks of one unit compute the same samples together.
        self.units = tuple(range(group.ranks)) if units is None else tuple(units)
        self._trained = self.trained()

    @property
    def unit_count(self) -> int:
        return max(self.units) + 1

    @property
    def adds_shares(self) -> bool:
        """Gradients of several shares are added up in each step."""
        return self.unit_count > 1

    def names(self, nodes: Sequence[str]) -> list[str]:
        """Of the units: the nodes of their ranks, which are made distinct."""
        members: list[dict[str, None]] = [{} for _ in range(self.unit_count)]
        for unit, node in zip(self.units, nodes, strict=True):
            members[unit][node] = None
        return distinct(["+".join(names) for names in members])

    # --- layers that are frozen and thawed ----------------------------------------------------------------------

    def trained(self) -> list[Any]:
        """The parameters that get gradients."""
        return [one for one in self.model.parameters() if one.requires_grad]

    def follow(self) -> None:
        """Before a step, on all ranks: what was frozen or thawed since the last one is so on all of them."""
        if not self.is_current():
            known = {id(one) for one in self._trained}
            self.change(has_thawed=any(id(one) not in known for one in self.trained()))
            self.settle()

    def settle(self) -> None:
        """What is trained now is known to all ranks."""
        self._trained = self.trained()

    def is_current(self) -> bool:
        now = self.trained()
        return len(now) == len(self._trained) and all(map(operator.is_, now, self._trained))

    def change(self, *, has_thawed: bool) -> None:
        """Other parameters are trained from now on. What another library has put in DDP, it must put there again."""
        if has_thawed and hasattr(self.model, "reducer"):
            raise UsageError(
                "layers were thawed after the model was put in DDP, which would not exchange their gradients",
                hint="thaw them before, and freeze them with a learning rate of 0 until then; or train on one device",
            )

    def expect_unchanged(self) -> None:
        """At the end of a step: raises if its gradients are wrong."""
        self.follow()

    # --- steps and checkpoints ----------------------------------------------------------------------------------

    def guard(self, stepping: Stepping) -> Any:
        """What runs complete steps, if that is its own."""
        return None

    def check_block(self) -> None:
        """Raises if a step cannot be a ``with`` block."""

    def states(self, kept: Mapping[str, Any], group: Group) -> dict[str, Any]:
        """What a checkpoint holds of these objects. All ranks call it; the first one gets it."""
        return checkpoint.states(kept) if group.rank == 0 else {}

    def close(self) -> None:
        """Releases what must not outlive the process group."""

    def recover(self) -> None:
        """Forgets a step that failed in its middle."""

    def release(self) -> None:
        """Lets go of the process group."""
        if hasattr(self.model, "reducer"):  # it is in DDP
            self.model.reducer = self.model.logger = self.model.process_group = None


def distinct(names: Sequence[str]) -> list[str]:
    return [name if list(names).count(name) == 1 else f"{name}:{place}" for place, name in enumerate(names)]


def of_units(speeds: Sequence[float], units: Sequence[int]) -> tuple[float, ...]:
    """The speeds of ranks, added up in their units."""
    if len(speeds) != len(units):  # none, or a number of them that is refused later
        return tuple(speeds)
    found = [0.0] * (max(units) + 1)
    for speed, unit in zip(speeds, units, strict=True):
        found[unit] += speed
    return tuple(found)
