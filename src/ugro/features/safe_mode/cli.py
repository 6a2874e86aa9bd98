"""``ugro agent reconcile``: how the user ends safe mode."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.safe_mode.model import JobChange, Reconciliation, SafeMode
from ugro.features.safe_mode.operations import PreviewReconciliation, ReconcileAgent
from ugro.kernel.support.errors import UsageError

_MOST_RUNS = 20


@click.command()
@click.option("--adopt", is_flag=True, help="Record what the nodes run, and go on with it.")
@click.option("--forget", is_flag=True, help="End what the state does not know, and go on without it.")
@click.option("--skip-unreachable", is_flag=True, help="Decide without nodes that do not say what they run.")
@json_option
@pass_session
def reconcile(session: Session, adopt: bool, forget: bool, skip_unreachable: bool) -> None:
    """Decide what becomes of jobs that the agent's state does not know.

    The agent is in safe mode after an older state was restored: it starts, ends and removes nothing. Without an option
    this shows what each decision would do. New jobs get ids that were never used.

    \b
    Examples:
      ugro agent reconcile
      ugro agent reconcile --adopt
    """
    if adopt and forget:
        raise UsageError("--adopt and --forget exclude each other", hint="see what each would do: ugro agent reconcile")
    client = session.client(shows_safe_mode=True)
    if not adopt and not forget:
        found = client.ask(PreviewReconciliation())
    else:
        session.output.progress("asking the nodes")
        found = client.ask(ReconcileAgent("adopt" if adopt else "forget", skip_unreachable))
    if session.output.is_json:
        session.output.document({"reconciliation": found})
    elif found.done is None:
        _show_plan(session.output, found)
    else:
        _show_done(session.output, found)


def _show_plan(output: Output, plan: Reconciliation) -> None:
    _show_changes(output, "ugro agent reconcile --adopt", plan.adopt)
    _show_changes(output, "ugro agent reconcile --forget", plan.forget)
    output.text(f"after either, the next job gets id {plan.first_id}")
    if plan.not_asked:
        output.warn(f"not asked yet: {plan.unasked}", "see: ugro health; without them: --skip-unreachable")


def _show_done(output: Output, done: Reconciliation) -> None:
    word = "adopted" if done.done == "adopt" else "forgotten"
    _show_changes(output, word, done.adopt or done.forget)
    output.note(f"the agent has left safe mode; the next job gets id {done.first_id}")


def _show_changes(output: Output, title: str, changes: Sequence[JobChange]) -> None:
    output.text(f"{title}:")
    for change in changes:
        output.text(f"  {change.text}" if change.what == "lost" else f"  job {change.job}  {change.text}")
    if not changes:
        output.text("  no job changes")


def show_safe_mode(output: Output, mode: SafeMode) -> None:
    """For ``ugro agent status``."""
    for number, reason in enumerate(mode.reasons):
        output.text(f"{'' if number else 'state':9}{reason}")
    for run in mode.runs[:_MOST_RUNS]:
        output.text(f"  {run.node}: job {run.job} {run.name}, attempt {run.attempt}, {run.status}")
    if len(mode.runs) > _MOST_RUNS:
        output.text(f"  and {len(mode.runs) - _MOST_RUNS} more")
    if mode.not_asked:
        output.text(f"not asked yet: {mode.unasked}")
