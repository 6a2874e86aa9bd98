"""Decides what becomes of a training whose loss or gradients are not finite. Pure, and the same on all ranks.

A GradScaler leaves out steps by itself, and finds its scale in this way, in fewer steps than ``MOST_IN_A_ROW``. A loss
of which nothing comes into the model, such as the mean over no labels, is only said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ugro.core.errors import UsageError

MOST_IN_A_ROW = 32  # then a training learns nothing any more


class OnNan(StrEnum):
    STOP = "stop"  # the run ends with an error
    SKIP = "skip"  # the update is left out, on all ranks
    IGNORE = "ignore"  # it is only said


class Wrong(StrEnum):
    LOSS = "loss"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class Incident:
    """A rank found a loss or gradients that are not finite."""

    rank: str  # as it is called: rank 1 (gpu2)
    step: int
    what: Wrong
    is_harmless: bool = False  # a GradScaler leaves out the update, or its gradients are finite all the same

    @property
    def is_search(self) -> bool:
        """A GradScaler finds its scale so; one that finds none in many steps leaves out all updates."""
        return self.what is Wrong.GRADIENTS and self.is_harmless

    @property
    def words(self) -> str:
        verb = "is" if self.what is Wrong.LOSS else "are"
        return f"the {self.what} of {self.rank} {verb} not finite in step {self.step}"


@dataclass(frozen=True, slots=True)
class Response:
    """What all ranks do with a step. ``stops``: why the run ends."""

    skips: bool = False
    stops: str | None = None
    in_a_row: int = 0


def on_nan(name: str) -> OnNan:
    try:
        return OnNan(name)
    except ValueError:
        raise UsageError(f"unknown choice for nan: {name!r}", hint=f"one of {', '.join(OnNan)}") from None


def response(choice: OnNan, incidents: Sequence[Incident], before: int) -> Response:
    """``before``: steps in a row until now in which something was not finite."""
    if not incidents:
        return Response()
    if choice is OnNan.IGNORE:
        return Response(in_a_row=before + 1)
    first = incidents[0]
    in_a_row = before + 1
    is_harmless = all(one.is_harmless for one in incidents)
    if choice is OnNan.STOP and not is_harmless:
        return Response(stops=first.words)
    if in_a_row >= MOST_IN_A_ROW:
        return Response(stops=f"{first.words}, and so it was in {in_a_row} steps in a row")
    return Response(skips=not is_harmless, in_a_row=in_a_row)
