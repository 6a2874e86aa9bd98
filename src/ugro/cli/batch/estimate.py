"""``ugro estimate``: says whether sharing work out pays, before it is run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ugro.cli.batch.options import MEASURED, input_option, open_pool, shared_of, shared_option
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.support.quantity import format_duration

if TYPE_CHECKING:
    from ugro.core.estimate import Estimate, Place


@click.command()
@click.argument("target", metavar="SCRIPT.py:FUNCTION")
@input_option
@click.option("--engine", type=click.Choice(MEASURED), default="local", show_default=True, help="Also measure on Ray.")
@shared_option
@json_option
@pass_session
def estimate(session: Session, target: str, input_: str, engine: str, shared: tuple[str, ...]) -> int:
    """Predict how long a map takes, here and on a cluster.

    Times a few items from all over the input, for some seconds, and what a pool of processes costs. Nothing is written.
    With --engine ray, it also measures the running Ray cluster. Otherwise, if the agent runs and has a cluster, its
    nodes count with their cores, the measured speed of their network, and assumed overheads.

    \b
    Example:
      ugro estimate score.py:score --input items.jsonl
    """
    from ugro.batch.estimating import run_estimate

    is_ray = engine == "ray"
    found = run_estimate(
        target,
        input_,
        shared_of(shared),
        cluster=partial(open_pool, session, engine) if is_ray else None,
        others=() if is_ray else _cluster(session),
        on_progress=session.output.progress,
    )
    session.output.end_progress()
    _show(session.output, found)
    return 0


def _cluster(session: Session) -> tuple[Place, ...]:
    from ugro.client.batch import cluster_place

    found = cluster_place(session.new_client())
    return (found,) if found else ()


def _show(output: Output, found: Estimate) -> None:
    if output.is_json:
        places = [{"place": one.place.name, "seconds": one.seconds, "bound": one.bound} for one in found.predictions]
        document = {"places": places, "recommended": found.recommended.place.name, "reason": found.reason}
        output.document({"estimate": {**document, "error": found.sample.error, "sampled": len(found.sample.costs_s)}})
        return
    rows = []
    for number, one in enumerate(found.predictions):
        is_best = number == found.best
        remark = "recommended" if is_best else "partly assumed" if one.place.is_assumed else ""
        name = Cell(one.place.name, "good" if is_best else "")
        slots = Cell(str(one.place.slots), is_number=True)
        rows.append([name, slots, Cell(format_duration(one.seconds)), Cell(remark)])
    output.table(["PLACE", "PROCESSES", "TIME", "REMARK"], rows)
    spread = f"± {max(1, round(100 * found.sample.error))} %"
    output.text(f"{found.reason} ({len(found.sample.costs_s):,} items timed, {spread})")
