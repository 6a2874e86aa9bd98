"""What a source of machines is. What it says is not trusted: ``candidates`` checks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ugro.core.errors import UgroError

Offers = Sequence["Offer"]


class SourceDown(UgroError):
    """A source cannot be read now. That says nothing about its machines."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source says of one machine. Nothing of it is checked, not even its type."""

    name: object
    host: object = None  # without one: the name
    user: object = None
    port: object = None
    labels: object = ()


class Source(Protocol):
    @property
    def name(self) -> str:
        """Its key in the cluster file."""

    @property
    def place(self) -> str:
        """Where it looks, for people."""

    @property
    def is_polled(self) -> bool:
        """Whether it looks now and then, so that a look now may find more."""

    @property
    def may_name_users(self) -> bool:
        """Whether the user trusts it to choose the account that is logged in to."""

    def watch(self) -> AsyncGenerator[Offers]:
        """Yields all machines that it lists, at once and after every change. Raises SourceDown."""
