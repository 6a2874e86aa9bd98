"""``ugro cluster``: Ray clusters on the nodes, whose head and workers are ordinary jobs."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.logs import Bytes, Documents, Printer
from ugro.cli.jobs.options import NodeNumber, environment_options
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.client.client import Client
from ugro.client.job_logs import LogChoice
from ugro.features.ray import client as calls
from ugro.features.ray.client import connection, token_file, token_path
from ugro.features.ray.model import ClusterView, ClusterWish, Part, Phase, WorkerSize
from ugro.features.ray.operations import (
    ONLY,
    GetRayCluster,
    GetRayClusterAccess,
    ListRayClusters,
    ScaleRayCluster,
    StopRayCluster,
)
from ugro.kernel.support.errors import Interrupted, NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import parse_duration, parse_size

_STYLES: dict[Phase, Style] = {
    Phase.STARTING: "warn",
    Phase.RUNNING: "good",
    Phase.STOPPING: "warn",
    Phase.STOPPED: "dim",
    Phase.FAILED: "bad",
}
_PRIORITIES = {"urgent": 90, "normal": 50, "batch": 10}


class _Quantity(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value) if self.name == "duration" else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param)


_SIZE, _DURATION = _Quantity("size"), _Quantity("duration")
_name = click.argument("name", required=False)


@click.group(cls=CommandGroup)
def cluster() -> None:
    """Run Ray clusters on the nodes: start, scale, stop.

    The head and each worker of a cluster are jobs: ugro status, why and logs show them, too. A command without NAME
    means the only cluster that runs.
    """


@cluster.command()
@click.option("--name", default="ray", show_default=True, help="Name of the cluster.")
@click.option("--nodes", type=NodeNumber(), metavar="N|all", help="Number of nodes; default: all that can be used.")
@click.option("--label", multiple=True, shell_complete=candidates.labels, help="Use only nodes with this label.")
@click.option("--only", multiple=True, metavar="NODE", shell_complete=candidates.node_names, help="Use only this node.")
@click.option("--head", metavar="NODE", shell_complete=candidates.node_names, help="The node of the head.")
@click.option("--workers-per-node", type=click.IntRange(1), default=1, metavar="N", help="Workers on each node.")
@click.option("--cpus", type=click.IntRange(1), metavar="N", help="CPU cores of each worker; default: its node's part.")
@click.option("--memory", type=_SIZE, metavar="SIZE", help="Memory of each worker, with its objects.")
@click.option("--object-store-memory", type=_SIZE, metavar="SIZE", help="Of that, memory for objects; default: 30%.")
@click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="GPUs of each worker.")
@click.option("--priority", default="normal", metavar="PRIORITY", help="urgent, normal, batch, or 0 to 100.")
@click.option("--time-limit", type=_DURATION, metavar="DURATION", help="Stop the cluster after this time.")
@click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="A variable of the head and the workers.")
@environment_options
@click.option("--detach", "-d", is_flag=True, help="Do not wait until the workers have joined.")
@json_option
@pass_session
def start(session: Session, /, detach: bool, **given: Any) -> int:
    """Start a Ray cluster.

    Before anything starts, Ray and Python are compared on all its nodes, and ports and shared memory looked at. Waits
    until the workers have joined. Ctrl-C stops the waiting, not the cluster.

    \b
    Examples:
      ugro cluster start --nodes 3
      ugro cluster start --only gpu1 --workers-per-node 4 --cpus 2 --memory 4GB
    """
    output = session.output
    wish, environment = _wish(given), _environment(given)
    client = session.client(uses_nodes=True)
    output.waiting("looking at the nodes")
    found = calls.start(client, wish, environment=environment, on_progress=output.waiting)
    if (cheaper := wish.advice) is not None:
        output.note(f"note: {cheaper}")
    if not detach:
        found = _wait(output, client, found)
    _show_one(output, found)
    _expect_well(found)
    if not output.is_json:
        output.note(f'connect to it: eval "$(ugro cluster env {found.name})"; stop it: ugro cluster stop {found.name}')
    return 0


def _expect_well(found: ClusterView) -> None:
    if found.phase is Phase.FAILED:
        raise UgroError(f"the Ray cluster {found.name} failed: {found.reason}", hint=_log_hint(found))
    if (lost := found.lost) is not None:
        hint = f"its log: ugro logs {lost.job}; replace it: ugro cluster scale {len(found.workers)} {found.name}"
        raise UgroError(f"worker {lost.number} of {found.name} is {lost.state}: {lost.reason}", hint=hint)


def _wish(given: dict[str, Any]) -> ClusterWish:
    size = WorkerSize(given["cpus"], given["memory"], given["object_store_memory"], given["gpus"])
    return ClusterWish(
        given["name"],
        given["nodes"],
        tuple(given["label"]),
        tuple(given["only"]),
        given["head"],
        given["workers_per_node"],
        size,
        _priority(given["priority"]),
        given["time_limit"],
        _variables(given["env"]),
    )


def _variables(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Those without a value have the one that they have here."""
    found: dict[str, str] = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if not has_value and name not in os.environ:
            hint = f"give it: --env {name}=VALUE, or export {name}"
            raise UsageError(f"--env {name}: it has no value here", hint=hint)
        found[name] = value if has_value else os.environ[name]
    return tuple(sorted(found.items()))


def _priority(text: str) -> int:
    if text in _PRIORITIES:
        return _PRIORITIES[text]
    if text.isdigit() and int(text) <= 100:
        return int(text)
    raise UsageError(f"--priority: expected urgent, normal, batch, or 0 to 100, got {text}")


def _environment(given: dict[str, Any]) -> dict[str, Any]:
    names = {parameter.name for parameter in _environment_parameters()}
    return {name: value for name, value in given.items() if name in names and value not in (None, (), [])}


def _environment_parameters() -> list[click.Parameter]:
    @click.command()
    @environment_options
    def nothing(**given: Any) -> None:
        pass

    return nothing.params


def _wait(output: Output, client: Client, found: ClusterView) -> ClusterView:
    try:
        return calls.wait(client, found.name, on_progress=output.waiting)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: the Ray cluster {found.name} goes on",
            hint=f"see: ugro cluster status {found.name}; stop it: ugro cluster stop {found.name}",
        ) from None


@cluster.command()
@_name
@click.option("--all", "everything", is_flag=True, help="Show clusters that have ended, too.")
@json_option
@pass_session
def status(session: Session, name: str | None, everything: bool) -> int:
    """Show Ray clusters, or one with its head and workers."""
    client, output = session.client(), session.output
    if name is None:
        found = client.ask(ListRayClusters(everything)).clusters
        if len(found) != 1 or output.is_json:
            _show_list(output, found)
            return 0
        _show_one(output, found[0])
        return 0
    _show_one(output, client.ask(GetRayCluster(name)).cluster)
    return 0


@cluster.command()
@_name
@click.option("--detach", "-d", is_flag=True, help="Do not wait until everything has ended.")
@json_option
@pass_session
def stop(session: Session, name: str | None, detach: bool) -> int:
    """Stop a Ray cluster and everything that it has started."""
    client, output = session.client(), session.output
    found = client.ask(StopRayCluster(name or ONLY)).cluster
    token_path(client.home, found.name).unlink(missing_ok=True)
    if not detach:
        found = calls.wait_stopped(client, found.name, on_progress=output.progress)
    if output.is_json:
        output.document({"cluster": _document(found)})
    else:
        output.note(f"the Ray cluster {found.name} is {found.phase}")
    return 0


@cluster.command()
@click.argument("workers", type=click.IntRange(0))
@_name
@click.option("--detach", "-d", is_flag=True, help="Do not wait until new workers have joined.")
@json_option
@pass_session
def scale(session: Session, workers: int, name: str | None, detach: bool) -> int:
    """Change the number of workers.

    New workers go to the nodes that have the fewest; of those that go, the newest go first, and Ray runs their tasks
    again elsewhere.
    """
    client, output = session.client(uses_nodes=True), session.output
    found = client.ask(ScaleRayCluster(workers, name or ONLY), timeout_s=calls.PREPARE_S).cluster
    if not detach:
        found = _wait(output, client, found)
    _show_one(output, found)
    _expect_well(found)
    return 0


@cluster.command()
@_name
@click.option("--worker", "-w", type=click.IntRange(1), metavar="N", help="Of this worker; default: of the head.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until it ends.")
@json_option
@pass_session
def logs(session: Session, name: str | None, worker: int | None, tail: int | None, follow: bool) -> int:
    """Print the log of a cluster's head, or of a worker.

    It says which ports and how much memory Ray got, which nodes are alive, and why Ray ended. What tasks print goes
    to their driver.
    """
    client = session.client()
    found = client.ask(GetRayCluster(name or ONLY)).cluster
    part = found.head if worker is None else next((one for one in found.workers if one.number == worker), None)
    if part is None:
        raise NotFound(f"the Ray cluster {found.name} has no worker {worker}", hint=f"ugro cluster status {found.name}")
    if part.job is None:
        session.output.note(f"{part.title} has not been submitted yet")
        return 0
    printer: Printer = Documents(session.output) if session.output.is_json else Bytes(session.output)
    try:
        for piece in client.jobs.logs(part.job, LogChoice(tail=tail, follow=follow)):
            printer.piece(piece)
    finally:
        printer.close()
    return 0


@cluster.command()
@_name
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Local port; default: a free one.")
@json_option
@pass_session
def dashboard(session: Session, name: str | None, port: int | None) -> int:
    """Forward Ray's dashboard to this machine, until Ctrl-C.

    It goes through UGRO's own connection to the head's node: the dashboard listens on that node's loopback only. Its
    page asks for the token, which the printed file holds.
    """
    client, output = session.client(), session.output
    access = client.ask(GetRayClusterAccess(name or ONLY)).access
    file = token_file(client.home, access)
    with client.tunnel(access.head_node, access.dashboard_port, local_port=port or 0) as local:
        url = f"http://127.0.0.1:{local}"
        if output.is_json:
            output.document({"dashboard": {"url": url, "token_file": str(file)}})
        else:
            output.text(url)
            output.note(f"it asks for a token: cat {shlex.quote(str(file))}", "end it with Ctrl-C")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 0
    return 0


@cluster.command()
@_name
@json_option
@pass_session
def env(session: Session, name: str | None) -> int:
    """Print shell commands that let programs connect to a cluster.

    They set RAY_ADDRESS, and name a file with the token that only you can read. ray.init() must run on one of the
    cluster's nodes; ray.init("ray://HOST:10001") connects from any machine that has the token and reaches the head.

    \b
    Example:
      eval "$(ugro cluster env)" && python driver.py
    """
    client = session.client()
    access = client.ask(GetRayClusterAccess(name or ONLY)).access
    variables = connection(client.home, access)
    if session.output.is_json:
        session.output.document({"env": variables, "client_address": access.client_address})
        return 0
    session.output.note(f'# from other machines, with the token: ray.init("{access.client_address}")')
    for key, value in variables.items():
        session.output.text(f"export {key}={shlex.quote(value)}")
    return 0


# --- what is shown -------------------------------------------------------------------------------------------------


def _show_list(output: Output, found: Sequence[ClusterView]) -> None:
    if output.is_json:
        output.document({"clusters": [_document(one) for one in found]})
        return
    if not found:
        output.note("there is no Ray cluster; start one: ugro cluster start")
        return
    rows = [
        [
            Cell(one.name, "bold"),
            Cell(str(one.phase), _STYLES[one.phase]),
            Cell(f"{sum(worker.is_ready for worker in one.workers)}/{len(one.workers)}", is_number=True),
            Cell(one.head.node),
            Cell(one.address),
            Cell(one.user),
            Cell(one.reason),
        ]
        for one in found
    ]
    output.table(("NAME", "STATE", "WORKERS", "HEAD", "ADDRESS", "USER", "REASON"), rows, spare=("USER", "ADDRESS"))


def _show_one(output: Output, found: ClusterView) -> None:
    if output.is_json:
        output.document({"cluster": _document(found)})
        return
    reason = f": {found.reason}" if found.reason else ""
    output.text(f"{found.name} is {found.phase}{reason}")
    output.text(f"address {found.address}, Ray {found.ray_version}, dashboard port {found.dashboard_port}")
    output.text(f"from other machines {found.client_address}")
    header = ("PART", "JOB", "NODE", "STATE", "RAY", "CPUS", "GPUS", "RESTARTS", "REASON")
    output.table(header, [_row(part) for part in (found.head, *found.workers)], spare=("GPUS",))


def _row(part: Part) -> list[Cell]:
    alive = {True: Cell("alive", "good"), False: Cell("not seen", "warn"), None: Cell("")}[part.is_alive]
    is_well = part.is_ready or part.state is None
    return [
        Cell(f"worker {part.number}" if part.number else "head", "bold"),
        Cell(str(part.job or ""), "id"),
        Cell(part.node),
        Cell(str(part.state or "not submitted"), "good" if part.is_ready else ""),
        alive,
        Cell(str(part.cpus), is_number=True),
        Cell(str(part.gpus), is_number=True),
        Cell(str(part.restarts), is_number=True),
        Cell("" if is_well else part.reason),
    ]


def _document(found: ClusterView) -> dict[str, Any]:
    return {
        "id": found.key,
        "name": found.name,
        "state": found.phase,
        "reason": found.reason,
        "user": found.user,
        "address": found.address,
        "client_address": found.client_address,
        "dashboard_port": found.dashboard_port,
        "ray_version": found.ray_version,
        "made_at": found.made_at,
        "ended_at": found.ended_at,
        "head": found.head,
        "workers": found.workers,
    }


def _log_hint(found: ClusterView) -> str:
    return f"see: ugro cluster logs {found.name}"
