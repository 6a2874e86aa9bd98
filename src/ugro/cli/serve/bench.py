"""``ugro serve bench``: a bounded load through the door of a service."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import ExitStack

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output
from ugro.cli.serve.load import Bounds, Load, Outcome, Target, request_bytes
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import NotAllowed, UgroError
from ugro.core.service import ENGINE_COMMAND, ServiceReport
from ugro.core.support.quantity import format_duration

KEY_VARIABLE = "UGRO_SERVICE_KEY"
_REQUESTS = 200
_FIGURES_S = 20.0  # the agent asks the door every second, if the machine has time for that
_CHAT = "/v1/chat/completions"
_REFUSED = "status 401"


@click.command()
@click.argument("name", shell_complete=candidates.services)
@click.option("--requests", "-n", type=click.IntRange(1, 10_000_000), help="How many in all. Default: 200.")
@click.option("--seconds", "-s", type=click.FloatRange(min=0, max=3600, min_open=True), help="For so long instead.")
@click.option("--clients", "-c", type=click.IntRange(1, 1000), default=8, show_default=True, help="At once.")
@click.option("--prompt", default="Tell me about clusters.", help="What to ask a model.")
@click.option("--max-tokens", type=click.IntRange(1, 100_000), default=16, show_default=True, help="Of each answer.")
@click.option("--url-path", metavar="PATH", help="Ask for this with GET, instead of a chat.")
@json_option
@pass_session
def bench(
    session: Session,
    /,
    name: str,
    requests: int | None,
    seconds: float | None,
    clients: int,
    **what: str | int | None,
) -> int:
    """Load a service, and print throughput and latencies.

    Sends chat requests to a model, and GET to a command. A key is taken from $UGRO_SERVICE_KEY.
    """
    client, output = session.client(), session.output
    before = client.services.get(name)
    if before.is_over:
        raise NotAllowed(f"the service {name} is {before.state}", hint="see: ugro serve ls")
    bounds = Bounds(requests if requests or seconds else _REQUESTS, seconds, clients)
    with ExitStack() as stack:
        target = _target(client, before, _request(before, what), stack)
        outcome = _run(output, Load(target, bounds))
    shares = _shares(client, before, len(outcome.times_s))
    _show(output, outcome, shares)
    if outcome.failed:
        worst = max(outcome.failures, key=lambda text: outcome.failures[text])
        hint = f"set UGRO_SERVICE_KEY to a key of {name}" if worst == _REFUSED else f"ugro serve status {name}"
        raise UgroError(f"{outcome.failed} requests failed, most with: {worst}", hint=hint)
    return 0


def _run(output: Output, load: Load) -> Outcome:
    async def both() -> Outcome:
        work = asyncio.create_task(load.run())
        while not work.done():
            done = len(load.outcome.times_s)
            output.progress(f"{done} requests answered, {load.outcome.failed} failed")
            await asyncio.wait([work], timeout=0.5)
        return work.result()

    try:
        return asyncio.run(both())
    except KeyboardInterrupt:  # what was measured so far is shown
        return load.outcome
    finally:
        output.end_progress()


def _target(client: Client, found: ServiceReport, request: bytes, stack: ExitStack) -> Target:
    """Directly, if the door is on this machine or open to others; else through UGRO's connection to its node."""
    port = int(found.url.rpartition(":")[2])
    if found.door.is_here or found.is_open:
        host = found.url.partition("://")[2].rpartition(":")[0].strip("[]")
        return Target(host, port, request, found.has_tls)
    local = stack.enter_context(client.tunnel(found.door.node, port))
    return Target("127.0.0.1", local, request, found.has_tls)


def _request(found: ServiceReport, what: dict[str, str | int | None]) -> bytes:
    host, key = found.url.partition("://")[2], os.environ.get(KEY_VARIABLE)
    path = what["url_path"] or ("/" if found.engine == ENGINE_COMMAND else None)
    if path is not None:
        return request_bytes("GET", str(path), host, key=key)
    messages = [{"role": "user", "content": what["prompt"]}]
    body = {"model": found.model, "messages": messages, "max_tokens": what["max_tokens"]}
    return request_bytes("POST", _CHAT, host, json.dumps(body).encode(), key)


def _shares(client: Client, before: ServiceReport, wanted: int) -> dict[int, int]:
    """How many requests each replica got, as the door counted them; its figures are up to two seconds old."""
    known = {one.number: one.traffic.requests for one in before.replicas}
    deadline = time.monotonic() + _FIGURES_S
    while True:
        after = client.services.get(before.name)
        found = {one.number: max(0, one.traffic.requests - known.get(one.number, 0)) for one in after.replicas}
        if sum(found.values()) >= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _show(output: Output, outcome: Outcome, shares: dict[int, int]) -> None:
    times = {f"p{int(100 * share)}_s": outcome.percentile_s(share) for share in (0.5, 0.9, 0.99)}
    if output.is_json:
        own = {"requests": len(outcome.times_s), "failed": outcome.failed, "seconds": outcome.took_s}
        output.document({"bench": {**own, "rate": outcome.rate, **times, "replicas": shares}})
        return
    took = format_duration(outcome.took_s)
    output.text(f"{len(outcome.times_s)} requests in {took}: {outcome.rate:.1f} per second, {outcome.failed} failed")
    shown = ", ".join(f"{name[:-2]} {format_duration(value)}" for name, value in times.items() if value is not None)
    if shown:
        output.text(shown)
    total = sum(shares.values()) or 1
    rows = [
        [Cell(str(number), "id", is_number=True), Cell(str(count), is_number=True), Cell(f"{100 * count / total:.0f}%")]
        for number, count in shares.items()
    ]
    output.table(("REPLICA", "REQUESTS", "SHARE"), rows)
