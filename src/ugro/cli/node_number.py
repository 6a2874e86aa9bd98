"""The option ``--nodes`` of commands that are not about one job."""

from __future__ import annotations

from typing import Any

import click


class NodeNumber(click.IntRange):
    """A number of nodes, or ``all``."""

    def __init__(self, most: int | None = None, *, everything: int | None = None) -> None:
        super().__init__(1, most)
        self.everything = everything  # what ``all`` is

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.everything if value == "all" else super().convert(value, param, ctx)
