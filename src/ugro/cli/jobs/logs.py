"""``ugro logs``."""

from __future__ import annotations

from typing import Literal

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import ranks
from ugro.cli.jobs.log_printer import Bytes, Documents, Prefixed, Printer
from ugro.cli.jobs.moment import MOMENT, SINCE
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.job_logs import LogChoice
from ugro.core.errors import UsageError
from ugro.core.job import Job


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.option(
    "--rank", "-r", type=click.IntRange(0), metavar="N", multiple=True, help="Show only this rank. May be repeated."
)
@click.option(
    "--node",
    "-n",
    multiple=True,
    shell_complete=candidates.node_names,
    help="Show only the ranks on this node. May be repeated.",
)
@click.option("--attempt", default="newest", metavar="N|all", help="Show this attempt, or all; default: the newest.")
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines of each rank.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
@click.option("--raw", is_flag=True, help="Print all bytes to a terminal, also those that steer it.")
@json_option
@pass_session
def logs(
    session: Session,
    /,
    job: str,
    rank: tuple[int, ...],
    node: tuple[str, ...],
    attempt: str,
    follow: bool,
    **more: float | int | bool | None,
) -> int:
    """Print the logs of a job.

    JOB is an id, a name, or last (the default). The output of one rank is printed as it was written, on a terminal
    without control characters other than colours (--raw prints them, too); with several ranks, each line begins with
    its rank and node. --since compares the time at which a line reached this machine; for a node that could not be
    reached, that is later than it was written.

    \b
    Examples:
      ugro logs train -f
      ugro logs 12 --rank 3 --tail 50
    """
    session.output.trusts_programs = bool(more["raw"])
    since, tail = more["since"], more["tail"]
    choice = LogChoice(rank, node, _attempt(attempt), since, None if tail is None else int(tail), follow)
    client = session.client()
    found = client.jobs.get(job)
    if not found.attempt and not follow:
        session.output.note(f"job {found.id} has not started yet; see: ugro why {found.id}")
    printer = _printer(session.output, found, choice)
    try:
        for piece in client.jobs.logs(found.id, choice):
            printer.piece(piece)
    finally:
        printer.close()
    return 0


def _attempt(text: str) -> int | Literal["newest", "all"]:
    if text == "all":
        return "all"
    if text == "newest":
        return "newest"
    if not text.isdigit() or not int(text):
        raise UsageError(f"--attempt: expected a number, all or newest, got {text}")
    return int(text)


def _printer(output: Output, job: Job, choice: LogChoice) -> Printer:
    if output.is_json:
        return Documents(output)
    is_one = len(choice.ranks) == 1 or (not choice.ranks and ranks(job) == 1)
    return Bytes(output) if is_one else Prefixed(output, has_attempts=choice.attempt == "all")
