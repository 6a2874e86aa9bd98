"""``client.planning``: predicts how fast a training is on each set of nodes, before it is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ugro.client.http import asked_for, lines
from ugro.client.jobs import Ask, body_of
from ugro.features.planning.model import LaunchPlan
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import UgroError


@dataclass(frozen=True, slots=True)
class PlanWish:
    """How to plan. The fields of the job are named like the command line's options."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    most_nodes: int | None = None
    is_fresh: bool = False  # measures again what is known
    limit_s: float | None = None  # of the steps of one trial; None: 30 s
    force: bool = False  # even if its code is very large


class Planning:
    """Created by ``Client``."""

    def __init__(self, stream: Ask) -> None:
        self._stream = stream

    def plan(
        self,
        file: Path | None = None,
        wish: PlanWish | None = None,
        *,
        env: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> LaunchPlan:
        """Runs trials on nodes that were not measured with this training, and predicts. Submits nothing else.

        If this is interrupted, the trials end.
        """
        wish = wish or PlanWish()
        submit = {**body_of(file, wish.fields, None), "force": wish.force}
        body: dict[str, Any] = {"submit": submit, "most_nodes": wish.most_nodes, "is_fresh": wish.is_fresh}
        if wish.limit_s is not None:
            body["limit_s"] = wish.limit_s
        for document in self._documents(body, env):
            if "plan" in document:
                return decode(LaunchPlan, document["plan"])
            on_progress(str(document["progress"]))
        raise UgroError("the agent has ended before the plan was made", hint="try it again")

    def _documents(self, body: dict[str, Any], env: Mapping[str, str] | None) -> Iterator[dict[str, Any]]:
        for document in lines(self._stream("POST", "/v1/plans", body, timeout_s=None)):
            if "needs" in document:
                asked = asked_for(document["needs"], env)
                yield from self._documents({**body, "submit": {**body["submit"], "env": asked}}, env)
                return
            yield document
