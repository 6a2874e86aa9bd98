"""``ugro sweep --dry-run``: what would be searched, and the first trials."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict

from ugro.cli.output import Output
from ugro.core.support.quantity import format_duration
from ugro.core.sweep import Budget, SweepPlan


def show_plan(output: Output, plan: SweepPlan) -> None:
    output.end_progress()
    if output.is_json:
        first = [{"number": one.number, "parameters": one.values, "argv": one.argv} for one in plan.first]
        output.document({"plan": {**asdict(plan), "first": first}})
        return
    for note in plan.notes:
        output.note(f"note: {note}")
    for line in _lines(plan):
        output.text(line)
    output.note("nothing was started")


def _lines(plan: SweepPlan) -> Iterator[str]:
    prune = f", ends early by {plan.prune}" if plan.prune else ""
    goal = f"{plan.goal} {plan.metric}" if plan.metric else "no metric: the trials are not compared"
    yield f"sweep {plan.name}: {plan.method}, {goal}{prune}"
    width = max(len(one.name) for one in plan.space)
    for one in plan.space:
        yield f"  {one.name:{width}}  {one.words}"
    yield f"points: {plan.points if plan.points is not None else 'without end'}; {_budget(plan.total, plan.budget)}"
    if plan.starts_now:
        yield f"the first trial would start now on {plan.where}: {plan.reason}"
    else:
        where = f" for {plan.where}" if plan.where else ""
        yield f"the first trial would wait{where}: {plan.reason}"
    yield "the first trials, if none of them ends meanwhile:"
    for trial in plan.first:
        yield f"  {trial.number}  {shlex.join(trial.argv)}"
    if plan.total is None or plan.total > len(plan.first):
        yield "  …"


def _budget(total: int | None, budget: Budget) -> str:
    parts = [f"at most {total} trials" if total is not None else "trials without a limit"]
    if budget.time_s is not None:
        parts.append(f"{format_duration(budget.time_s)} of time")
    if budget.gpu_s is not None:
        parts.append(f"{budget.gpu_s / 3600:g} GPU-hours")
    if budget.no_improvement is not None:
        parts.append(f"ends after {budget.no_improvement} trials without improvement")
    parts.append(f"{budget.parallel} at once" if budget.parallel is not None else "as many at once as fit")
    if budget.trials_per_gpu > 1:
        parts.append(f"{budget.trials_per_gpu} on each GPU")
    return ", ".join(parts)
