"""The data of the pages of jobs, from the agent's state. It renders nothing and decides nothing."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import yaml

from ugro.features.environments.rules.naming import in_words
from ugro.features.planning.model import Forecast, compared
from ugro.features.training.model import Headline, JobProfile, RankProfile
from ugro.kernel.access.caller import shown
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.model import Event
from ugro.kernel.files.results.log_stream import rank_nodes
from ugro.kernel.jobs.config.file import job_file
from ugro.kernel.jobs.engine.finish import exits_of
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.runs import RunStatus
from ugro.kernel.jobs.model import (
    HOLDING_STATES,
    WAITING_STATES,
    Attempt,
    Failure,
    Job,
    JobState,
    Launcher,
    RankExit,
    ranges,
)
from ugro.kernel.jobs.model import places as places
from ugro.kernel.jobs.records import NodePlan, Plan, RankPlan, Why
from ugro.kernel.support import moments as clock
from ugro.kernel.support.quantities import signal_name
from ugro.kernel.support.secrets import HIDDEN, masked
from ugro.kernel.telemetry.curves import Wanted
from ugro.kernel.telemetry.metricstore import job_owner
from ugro.kernel.telemetry.model import KeySummary, is_internal

# --- ranks ------------------------------------------------------------------------------------------------------------
# The ranks of a job's newest attempt: node and state of each, as far as known.
#
# A node reports that it has started its ranks, and their ends when all of them have ended. With several ranks on one
# node it is not known before that whether one has already ended.


_NOT_YET = frozenset({RunState.ABSENT, RunState.STARTING})


@dataclass(frozen=True, slots=True)
class RankRow:
    rank: int
    node: str
    gpus: str
    state: str  # selects the icon
    words: str
    last_step: int | None  # that it logged
    is_culprit: bool


@dataclass(frozen=True, slots=True)
class Known:
    reports: Mapping[str, tuple[NodeRun, RunStatus | None]] = field(default_factory=dict)  # by node, if live
    failure: Failure | None = None
    last_steps: Mapping[int, int] = field(default_factory=dict)  # by rank


def last_steps(summaries: Iterable[KeySummary]) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in summaries:
        found[one.rank] = max(one.last_step, found.get(one.rank, one.last_step))
    return found


def rank_rows(job: Job, nodes: Mapping[int, str], known: Known) -> list[RankRow]:
    """``nodes``: by rank. Each DDP rank has one of its node's GPUs, in order; other launchers share them."""
    exits = _exits(known)
    # With torchrun the ranks here are launchers, while the steps are logged by the ranks that they start.
    steps = known.last_steps if job.spec.launcher not in (Launcher.TORCHRUN, Launcher.RAY) else {}
    culprit = known.failure.rank if known.failure else None
    all_there, seen = Counter(nodes.values()), Counter[str]()
    rows = []
    for rank, node in nodes.items():
        state, words = _state(job, rank, known.reports.get(node), exits.get(rank), all_there[node])
        if rank == culprit and state == "ended":
            state = "failed"
        gpus = _gpus(job, node, seen[node])
        seen[node] += 1
        rows.append(RankRow(rank, node_of(node), gpus, state, words, steps.get(rank), rank == culprit))
    return rows


def exit_words(end: RankExit) -> str:
    if end.signal is not None:
        return f"ended by {signal_name(end.signal)}"
    return "ended" if end.code is None else f"exit code {end.code}"


def _exits(known: Known) -> dict[int, RankExit]:
    """By rank. What a node reports overrides what was recorded."""
    failure = known.failure
    found = {end.rank: end for end in failure.exits} if failure else {}
    if failure and failure.rank is not None and failure.exit_code is not None:
        found.setdefault(failure.rank, RankExit(failure.rank, failure.exit_code))
    live = exits_of(status for _, status in known.reports.values() if status is not None and status.has_ended)
    return {**found, **{end.rank: end for end in live}}


def _state(
    job: Job, rank: int, report: tuple[NodeRun, RunStatus | None] | None, end: RankExit | None, beside: int
) -> tuple[str, str]:
    if end is not None:
        return ("succeeded" if end.code == 0 else "ended"), exit_words(end)
    if job.state is JobState.SUCCEEDED:  # then every rank ended with 0
        return "succeeded", "exit code 0"
    if job.state not in HOLDING_STATES:
        return "ended", "ended"
    return _live(rank, report, beside)


def _live(rank: int, report: tuple[NodeRun, RunStatus | None] | None, beside: int) -> tuple[str, str]:
    if report is None or not report[0].is_reachable:
        return "unknown", "unknown: its node does not answer"
    run, status = report
    if run.state in _NOT_YET:
        return "starting", "not started yet"
    if run.state is not RunState.RUNNING or status is None or rank not in status.started_ranks:
        return "unknown", "unknown"
    return "running", "running" if beside == 1 else "started"


def _gpus(job: Job, node: str, local: int) -> str:
    shares = job.placement.shares if job.placement else ()
    gpus: tuple[int, ...] = next((share.gpus for share in shares if share.node == node), ())
    return ranges(gpus[local : local + 1] if job.spec.launcher is Launcher.DDP else gpus)


# --- job page ---------------------------------------------------------------------------------------------------------


MOST_EVENTS = 200
# The parts of a step, in the order of the bar.
PARTS = ("data", "forward", "backward", "optimizer", "other", "communication", "waiting")


@dataclass(frozen=True, slots=True)
class JobPage:
    job: Job
    attempts: tuple[Attempt, ...]
    why: Why | None  # of a queued job
    failure: Failure | None
    headline: Headline
    has_curves: bool
    ranks: list[RankRow]
    events: list[Event]  # newest first
    has_more_events: bool
    plan: Plan | None
    forecast: Forecast | None = None

    @property
    def command(self) -> str:
        return shlex.join(self.job.spec.argv)

    @property
    def predicted(self) -> str | None:
        """With what is measured so far."""
        if self.forecast is None:
            return None
        speed = self.headline.speed
        return compared(self.forecast.prediction, speed.value if speed and speed.name == "samples/s" else None)

    @property
    def duration_s(self) -> float:
        return duration_s(self.job)

    @property
    def log_rank(self) -> str:
        """The rank whose log is shown first: the one that failed, else rank 0."""
        return str(self.failure.rank) if self.failure and self.failure.rank is not None else "0"

    @property
    def is_log_first(self) -> bool:
        """Curves come before the log, unless the log is what explains a failure."""
        return self.failure is not None

    @property
    def spec(self) -> str:
        return job_file(self.job.spec)

    @property
    def environment(self) -> str | None:
        """The Python environment that was asked for, in words."""
        return in_words(self.job.spec.environment) if self.job.spec.environment else None

    @property
    def retry_key(self) -> str:
        """Idempotency key of *Retry*: it changes only with a new event, so two clicks submit one job."""
        return f"dashboard-{self.job.id}-{self.events[0].seq if self.events else 0}"


async def load(agent: Agent, word: str) -> JobPage:
    details = await agent.jobs.details(word)
    job, attempts = details.job, details.attempts
    failure = attempts[-1].failure if attempts else None
    plan = await agent.store.jobs.plan(job) if job.attempt else None
    events = await agent.store.jobs.newest_events(MOST_EVENTS + 1, job=job.id)
    summaries = await agent.monitoring.metrics.keys(Wanted((job_owner(job.cached_from or job.id),)))
    return JobPage(
        job=shown(job),
        attempts=attempts,
        why=await agent.jobs.why(str(job.id)) if job.state in WAITING_STATES else None,
        failure=failure if job.state in (JobState.FAILED, JobState.RECOVERING, JobState.STOPPING) else None,
        headline=await agent.monitoring.headlines.of(job),
        has_curves=any(not is_internal(one.key) for one in summaries),
        ranks=rank_rows(job, rank_nodes(job, attempts, plan), _known(agent, job, failure, summaries)),
        events=events[:MOST_EVENTS],
        has_more_events=len(events) > MOST_EVENTS,
        plan=_shown_plan(plan, job),
        forecast=await agent.store.trials.forecast(job.id),
    )


def _shown_plan(plan: Plan | None, job: Job) -> Plan | None:
    """Without the values of the job's variables, unless they are the reader's own."""
    if plan is None or shown(job) is job:
        return plan
    theirs = {name for name, _ in job.spec.env}

    def hidden(rank: RankPlan) -> RankPlan:
        return replace(rank, env=tuple((name, HIDDEN if name in theirs else value) for name, value in rank.env))

    return replace(plan, nodes=tuple(replace(node, ranks=tuple(map(hidden, node.ranks))) for node in plan.nodes))


def _known(agent: Agent, job: Job, failure: Failure | None, summaries: Iterable[KeySummary]) -> Known:
    """Reports from nodes count only while the attempt is active; after that, its recorded failure."""
    reports = agent.parts.engine.reports(job) if job.state in HOLDING_STATES else {}
    return Known(reports, failure, last_steps([one for one in summaries if one.attempt == job.attempt]))


# --- for templates ------------------------------------------------------------------------------------------------


def duration_s(job: Job) -> float:
    return job.lasts_s(clock.now())


def as_yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100) if document else ""


def plan_text(plan: Plan) -> str:
    """The plan as YAML, by node. What all ranks of a node share is written once."""
    head: dict[str, Any] = {"rendezvous": _plain(asdict(plan.rendezvous))} if plan.rendezvous else {}
    return as_yaml({**head, "nodes": [_node_plan(node) for node in plan.nodes]})


def _node_plan(node: NodePlan) -> dict[str, Any]:
    envs = [masked(rank.env) for rank in node.ranks]
    common = {key: value for key, value in envs[0].items() if all(env.get(key) == value for env in envs)}
    commands = [shlex.join(rank.argv) for rank in node.ranks]
    is_same = len(set(commands)) == 1
    ranks = [
        {"rank": rank.rank, **({} if is_same else {"command": command}), **_differing(env, common)}
        for rank, command, env in zip(node.ranks, commands, envs, strict=True)
    ]
    return {
        "node": node.node,
        **({"cwd": node.cwd} if node.cwd else {}),
        **({"command": commands[0]} if is_same else {}),
        "env": common,
        "ranks": ranks,
    }


def _differing(env: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key not in common}


def bar(rank: RankProfile, step_s: float) -> list[tuple[str, float, float]]:
    """Name, start and length of each part, in thousandths of a step."""
    pieces, at = [], 0.0
    for part in PARTS:
        length = 1000 * getattr(rank, f"{part}_s") / step_s if step_s else 0.0
        pieces.append((part, round(at, 1), round(min(length, max(0.0, 1000 - at)), 1)))
        at += length
    return pieces


def share(rank: RankProfile, profile: JobProfile) -> float:
    if (pipeline := profile.pipeline) is not None:  # its ranks share the layers
        return pipeline.layers_of(rank.rank) / (sum(pipeline.layers) or 1)
    return rank.samples / (sum(one.samples for one in profile.ranks) or 1.0)


def _plain(value: Any) -> Any:
    """Plain types, which YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, str) else value
