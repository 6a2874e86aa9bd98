"""``--dry-run``: the trials that a sweep would make first. It records and starts nothing."""

from __future__ import annotations

import asyncio
import json

from ugro.agent.jobs.service import JobService
from ugro.agent.sweep.creation import trial_spec
from ugro.agent.sweep.sampler import Chooser, UsedUp
from ugro.core.job import JobSpec
from ugro.core.support.codec import decode
from ugro.core.sweep import PlannedTrial, Searched, SweepPlan, Trial, TrialState
from ugro.policy.sweep.decision import total
from ugro.policy.sweep.reading import read
from ugro.policy.sweep.space import grid_size
from ugro.policy.sweep.spec import SweepSpec
from ugro.policy.sweep.words import words_of
from ugro.store.sweeps import NewSweep

_SHOWN = 5


async def preview(new: NewSweep, number: int, jobs: JobService) -> SweepPlan:
    """``number``: that the sweep would get, on which its points depend."""
    spec, base = read(json.loads(new.document)), decode(JobSpec, json.loads(new.spec))
    trials = await asyncio.to_thread(_first, spec, number, min(_SHOWN, total(spec, new.budget) or _SHOWN))
    specs = [trial_spec(base, f"{new.name}-{trial.number}", trial.settings, spec.options) for trial in trials]
    dry = await jobs.preview(specs[0], new.user)
    return SweepPlan(
        new.name,
        spec.method,
        spec.metric.name if spec.metric else None,
        spec.goal,
        spec.pruning.kind if spec.pruning else None,
        tuple(Searched(one.name, words_of(one)) for one in spec.parameters),
        grid_size(spec.parameters),
        total(spec, new.budget),
        new.budget,
        tuple(PlannedTrial(one.number, one.settings, made.argv) for one, made in zip(trials, specs, strict=True)),
        dry.starts_now,
        ", ".join(dry.placement.nodes) if dry.placement else "",
        dry.reason,
        spec.notes,
    )


def _first(spec: SweepSpec, number: int, count: int) -> list[Trial]:
    chooser, trials = Chooser(number, spec, []), list[Trial]()
    for at in range(1, count + 1):
        try:
            chosen = chooser.choose(trials, at)
        except UsedUp:
            break
        trials.append(Trial(at, chosen.settings, chosen.asked, TrialState.RUNNING, memory=chosen.memory))
        chooser.note(trials[-1])
    return trials
