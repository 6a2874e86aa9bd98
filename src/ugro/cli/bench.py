"""``ugro node bench``: measures the hardware of nodes and the links between them."""

from __future__ import annotations

import click

from ugro.cli import candidates, doctor, figures
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.errors import Interrupted
from ugro.core.figures import Measurement, Mode, Part, Progress
from ugro.core.node import by_name
from ugro.core.support.quantity import format_duration

_MOST_NAMED = 4


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--quick", is_flag=True, help="Take at most 15 seconds instead of two minutes.")
@click.option("--only", multiple=True, type=click.Choice([str(part) for part in Part]), help="Measure only this part.")
@click.option("--force", is_flag=True, help="Measure busy nodes, too. Their figures are marked and not compared.")
@json_option
@pass_session
def bench(session: Session, nodes: tuple[str, ...], quick: bool, only: tuple[str, ...], force: bool) -> int:
    """Measure devices, CPU, memory, storage and the network.

    NODES are names, @all or @label; the default is all nodes. Devices and all-reduces need PyTorch on the nodes. What
    cannot be measured is listed with the reason. The nodes take no jobs meanwhile. Ctrl-C ends everything on them.

    The figures are kept. `balance: static`, the choice of nodes and `ugro node show` use them, and `ugro doctor`
    reports a device that has become much slower.

    \b
    Examples:
      ugro node bench --quick
      ugro node bench gpu1 gpu2 --only network --only allreduce
    """
    parts = [Part(word) for word in only] or list(Part)
    mode = Mode.QUICK if quick else Mode.FULL
    measured = _measured(session, nodes, parts, mode=mode, force=force)
    if session.output.is_json:
        session.output.document({"measurement": measured})
    else:
        figures.show_measurement(session.output, measured)
        doctor.show(session.output, measured.findings)
    session.output.note(f"measured in {format_duration(measured.took_s)}")
    return 0 if measured.nodes or measured.links or measured.allreduces else 1


def _measured(
    session: Session, nodes: tuple[str, ...], parts: list[Part], *, mode: Mode, force: bool
) -> Measurement:
    at: dict[str, str] = {}
    try:
        for said in session.client(uses_nodes=True).hardware.measure(nodes, mode=mode, parts=parts, force=force):
            if isinstance(said, Measurement):
                return said
            _show_progress(session.output, said, at)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the measurement was ended on the nodes, and nothing was recorded") from None
    raise AssertionError("the agent sends the measurement or an error")


def _show_progress(output: Output, said: Progress, at: dict[str, str]) -> None:
    """``at``: what each node is at; what is about all of them replaces that."""
    if said.node:
        at[said.node] = said.phase
    else:
        at.clear()
    words = [f"{node} {at[node]}" for node in sorted(at, key=by_name)] or [said.phase]
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    left = f", at most {said.left_s:.0f} s left" if said.left_s is not None else ""
    output.progress(f"measuring: {' · '.join(words[:_MOST_NAMED])}{more}{left}")
