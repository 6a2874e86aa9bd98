"""How services look: a table, live on a terminal, and as a document."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.client.client import Client
from ugro.features.services.model import Phase, ReplicaPhase, ReplicaReport, ServiceReport
from ugro.features.services.operations import CreateServiceKey, ListServiceKeys, RevokeServiceKey
from ugro.kernel.support.errors import Interrupted, UgroError
from ugro.kernel.support.quantities import format_duration

# --- keys -------------------------------------------------------------------------------------------------------------
# ``ugro serve key``: API keys of a service.


_name = click.argument("name", shell_complete=candidates.services)


@click.group(cls=CommandGroup)
def key() -> None:
    """Create, list and revoke the API keys of a service.

    Only hashes of keys are kept. A key that is revoked is refused at once.
    """


@key.command()
@_name
@click.option("--label", default="", help="What it is for.")
@json_option
@pass_session
def create(session: Session, name: str, label: str) -> None:
    """Create a key, and print it this once."""
    created = session.client().ask(CreateServiceKey(name, label))
    made, secret = created.key, created.secret
    if session.output.is_json:
        session.output.document({"key": {"id": made.id, "label": made.label, "secret": secret}})
        return
    session.output.text(secret)
    session.output.note(f"this is key {made.id}; it is not shown again. Clients send it as: Authorization: Bearer KEY")


@key.command()
@_name
@json_option
@pass_session
def ls(session: Session, name: str) -> None:
    """List keys, without the keys themselves."""
    found = session.client().ask(ListServiceKeys(name)).keys
    if session.output.is_json:
        session.output.document({"keys": found})
    elif found:
        rows = [[Cell(one.id, "id"), Cell(one.label), Cell(one.made_at)] for one in found]
        session.output.table(("KEY", "LABEL", "CREATED"), rows)
    else:
        session.output.note(f"no keys; create one: ugro serve key create {name}")


@key.command()
@_name
@click.argument("key_id", metavar="KEY")
@pass_session
def revoke(session: Session, name: str, key_id: str) -> None:
    """Revoke a key, by its id."""
    session.client().ask(RevokeServiceKey(name, key_id))
    session.output.note(f"key {key_id} of {name} is revoked")


# --- show -------------------------------------------------------------------------------------------------------------


_STYLES: dict[Phase, Style] = {
    Phase.READY: "good",
    Phase.IDLE: "dim",
    Phase.STOPPED: "dim",
    Phase.FAILED: "bad",
    Phase.DOWN: "bad",
    Phase.DEGRADED: "warn",
}
_REPLICA_STYLES: dict[ReplicaPhase, Style] = {
    ReplicaPhase.READY: "good",
    ReplicaPhase.FAILED: "bad",
    ReplicaPhase.UNREACHABLE: "bad",
    ReplicaPhase.DRAINING: "dim",
    ReplicaPhase.STOPPING: "dim",
}
_LISTED = ("NAME", "STATE", "READY", "URL", "REQ/S", "P50", "P99", "SOURCE", "REASON")
_REPLICAS = ("REPLICA", "STATE", "NODE", "JOB", "REV", "WEIGHT", "REQ/S", "P50", "P99", "ERRORS", "RESTARTS", "REASON")


def show_list(output: Output, found: Sequence[ServiceReport]) -> None:
    if output.is_json:
        output.document({"services": list(found)})
    elif found:
        output.table(_LISTED, [_row(one) for one in found], spare=("SOURCE", "REASON"))
    else:
        output.note("no services; start one: ugro serve JOB, or: ugro serve -- CMD --port {port}")


def show(output: Output, found: ServiceReport) -> None:
    if output.is_json:
        output.document({"service": found})
        return
    for line in headlines(found):
        output.text(line)
    output.table(_REPLICAS, [_replica(one) for one in found.replicas], spare=("REASON",))
    for note in found.notes:
        output.warn(note)


def headlines(found: ServiceReport) -> list[str]:
    reason = f": {found.reason}" if found.reason else ""
    own = f"{found.name} is {found.state}{reason}"
    scale = f" (between {found.least} and {found.most})" if found.most is not None else ""
    traffic = found.traffic
    figures = f"{traffic.requests} requests, {traffic.errors} errors"
    figures += f", {traffic.active} running, {traffic.queued} waiting"
    lines = [
        own,
        f"{found.url} · {found.ready} of {found.wanted} replicas ready{scale} · door on {found.door.node}",
        f"serves {found.source} ({found.engine}), revision {found.revision} · {figures}",
    ]
    if found.update:
        lines.append(f"update {found.update}")
    elif found.note:
        lines.append(found.note)
    if found.is_canary:
        lines.append(f"decide: ugro serve update {found.name} --promote, or: --rollback")
    if found.needs_keys:
        lines.append(f"clients need one of {found.keys} keys: ugro serve key create {found.name}")
    return lines


def live(output: Output, client: Client, found: ServiceReport) -> int:
    """Until it is over, or Ctrl-C."""
    try:
        for seen in client.services.watch(found.name):
            found = seen
            rows = output.table_lines(_REPLICAS, [_replica(one) for one in found.replicas], spare=("REASON",))
            output.progress(*headlines(found), table=rows)
    except KeyboardInterrupt:
        pass
    output.end_progress()
    show(output, found)
    return 0


def wait_ready(output: Output, client: Client, found: ServiceReport) -> ServiceReport:
    try:
        found = client.services.wait(found.name, on_progress=output.progress)
    except KeyboardInterrupt:
        hint = f"see: ugro serve status {found.name}; stop it: ugro serve stop {found.name}"
        raise Interrupted(f"interrupted: the service {found.name} goes on", hint=hint) from None
    output.end_progress()
    return found


def expect_well(found: ServiceReport) -> None:
    """Raises UgroError if it has failed, or somebody has stopped it."""
    if found.is_over:
        raise UgroError(f"the service {found.name} was stopped", hint="see: ugro events")
    if found.state is Phase.FAILED:
        failed = next((one for one in found.replicas if one.state is ReplicaPhase.FAILED), None)
        hint = f"its log: ugro serve logs {found.name}" + (f" --replica {failed.number}" if failed else "")
        raise UgroError(f"the service {found.name} failed: {found.reason}", hint=hint)


def _row(found: ServiceReport) -> list[Cell]:
    traffic = found.traffic
    return [
        Cell(found.name, "bold"),
        Cell(str(found.state), _STYLES.get(found.state, "warn")),
        Cell(f"{found.ready}/{found.wanted}", is_number=True),
        Cell(found.url),
        Cell(_rate(traffic.rate), is_number=True),
        Cell(_time(traffic.p50_s), is_number=True),
        Cell(_time(traffic.p99_s), is_number=True),
        Cell(found.source),
        Cell(found.update or found.reason),
    ]


def _replica(one: ReplicaReport) -> list[Cell]:
    traffic = one.traffic
    return [
        Cell(str(one.number), "id", is_number=True),
        Cell(str(one.state), _REPLICA_STYLES.get(one.state, "warn")),
        Cell(one.devices or one.node or ""),
        Cell(str(one.job or ""), is_number=True),
        Cell(f"{one.revision}{' new' if one.is_new else ''}", is_number=True),
        Cell("" if one.weight is None else str(one.weight), is_number=True),
        Cell(_rate(traffic.rate), is_number=True),
        Cell(_time(traffic.p50_s), is_number=True),
        Cell(_time(traffic.p99_s), is_number=True),
        Cell(str(traffic.errors or ""), is_number=True),
        Cell(str(one.restarts or ""), is_number=True),
        Cell("" if one.state is ReplicaPhase.READY else one.reason),
    ]


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate else ""


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


# --- services ---------------------------------------------------------------------------------------------------------
# Draws the services of ``ugro top``: a line for each, and one below it where something is wrong.


_HEADER = ("", "SERVICE", "STATE", "REPLICAS", "REQ/S", "P50", "P99", "WAITING", "ERRORS", "ADDRESS")
_SPARE = ("ADDRESS", "P50")
_SIGNS: dict[Phase, tuple[str, Style]] = {
    Phase.READY: ("●", "good"),
    Phase.DEGRADED: ("!", "warn"),
    Phase.DOWN: ("✗", "bad"),
    Phase.FAILED: ("✗", "bad"),
}


def service_lines(output: Output, found: Sequence[ServiceReport]) -> list[str]:
    below = [Cell(output.cut_below(_about(one)), _SIGNS.get(one.state, ("", "dim"))[1] or "dim") for one in found]
    drawn = output.table_groups(_HEADER, [_services_row(one) for one in found], spare=_SPARE, below=below)
    return [line for lines in drawn for line in lines]


def _services_row(one: ServiceReport) -> list[Cell]:
    sign, style = _SIGNS.get(one.state, ("◌", ""))
    traffic = one.traffic
    return [
        Cell(sign, style),
        Cell(one.name, "bold"),
        Cell(one.state, style),
        _number(f"{one.ready}/{one.wanted}"),
        _number(f"{traffic.rate:.3g}"),
        _seconds(traffic.p50_s),
        _seconds(traffic.p99_s),
        _number(str(traffic.queued)),
        _number(str(traffic.errors), "warn" if traffic.errors else ""),
        Cell(one.url),
    ]


def _about(one: ServiceReport) -> str:
    """Nothing for one that is ready."""
    return one.update or ("" if one.state is Phase.READY else one.reason)


def _seconds(value: float | None) -> Cell:
    return _number("" if value is None else format_duration(value))


def _number(text: str, style: Style = "") -> Cell:
    return Cell(text, style, is_number=True)
