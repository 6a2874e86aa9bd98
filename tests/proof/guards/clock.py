"""Durations by a clock that nobody sets, and what is done while the wall clock cannot be believed."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_MOMENT = "ugro.kernel.support.moments"
_RULES = "ugro.kernel.agent.rules"
_SYNC = "ugro.kernel.files.results.checkpoints"
_DIR = "ugro.node.files.checkpoint_dir"
_ORDER = "ugro.node.files.checkpoint_dir"

JUMPS = ("tests/integration/engine/test_clock.py", "-k", "no_time_limit")
MOMENTS = ("tests/unit/core/test_moment.py",)
BELIEVED = ("tests/unit/policy/lifecycle/test_clock.py", "tests/unit/agent/test_retention.py")
NEWEST = ("tests/unit/agent/test_checkpoints.py", "-k", "attempt")
HOURS_OFF = ("tests/integration/artifacts/test_checkpoints.py", "-k", "clock")
_BY_WALL = "by.now.boot_s + duration_s - (by.now.wall_s - since.wall_s)"

MUTANTS = (
    Mutant(
        "a time limit counts by the wall clock",
        (
            Edit(
                "ugro.kernel.jobs.engine.reconciler",
                "Engine._is_over_time",
                "by.now.boot_s",
                "by.now.wall_s - started.wall_s",
            ),
            Edit(
                "ugro.kernel.jobs.engine.reconciler", "Engine._is_over_time", "due_s(started, limit_s, by)", "limit_s"
            ),
        ),
        JUMPS,
    ),
    Mutant(
        "the pause before a retry ends by the wall clock",
        (
            Edit(
                "ugro.kernel.jobs.engine.scheduler_input",
                "waiting_view",
                "due_s(*pause, by)",
                "by.now.boot_s + pause[0].wall_s + pause[1] - by.now.wall_s",
            ),
        ),
        JUMPS,
    ),
    Mutant(
        "within a boot, too, the wall clock decides",
        (
            Edit(
                _MOMENT,
                "due_s",
                "since.boot_s + duration_s",
                "by.now.boot_s + duration_s - (by.now.wall_s - since.wall_s)",
            ),
        ),
        MOMENTS,
    ),
    Mutant(
        "after a restart of the machine a duration is over at once",
        (Edit(_MOMENT, "due_s", "max(by_wall_s, by.started.boot_s + min(duration_s, PATIENCE_S))", "by_wall_s"),),
        MOMENTS,
    ),
    Mutant(
        "after a restart of the machine a duration is never over",
        (
            Edit(
                _MOMENT,
                "due_s",
                "min(latest_s, max(by_wall_s, by.started.boot_s + min(duration_s, PATIENCE_S)))",
                "max(latest_s, max(by_wall_s, by.started.boot_s + min(duration_s, PATIENCE_S)))",
            ),
        ),
        MOMENTS,
    ),
    Mutant(
        "a clock that is years off is believed",
        (Edit(_RULES, "is_doubtful", "known.before is not None and (not _is_likely(known.before, now))", "False"),),
        BELIEVED,
    ),
    Mutant(
        "a jump forward holds no removals",
        (Edit(_RULES, "look", "jump.is_restart or jump.by_s >= _HELD_FROM_S", "False"),),
        BELIEVED,
    ),
    Mutant(
        "old jobs are removed while the clock is not believed",
        (Edit("ugro.features.retention.service", "Retention.look", "not self._limits.may_remove()", "False"),),
        BELIEVED,
    ),
    Mutant(
        "a clock that is set is not noticed",
        (Edit(_RULES, "_jump", "Jump(now, by_s) if is_set else None", "None"),),
        BELIEVED,
    ),
    Mutant(
        "the newest checkpoint has the newest time",
        (Edit(_SYNC, "is_newer", "if own[:2] != known:\n    return own[:2] > known", ""),),
        NEWEST,
    ),
    Mutant(
        "checkpoints of two nodes are ordered by their clocks",
        (Edit(_SYNC, "CheckpointSync._offer", "attempt = min(found.attempt, job.attempt)", "off_ns = attempt = 0"),),
        HOURS_OFF,
    ),
    Mutant(
        "a checkpoint is of the attempt that looks",
        (Edit(_ORDER, "Order.begin", "attempt > self._begun", "False"),),
        NEWEST,
    ),
    Mutant(
        "what is older than the start of a run is decided by a clock that was set back",
        (Edit("ugro.node.clock", "wall_s", "min", "max"),),
        ("tests/unit/remote/test_workdir.py", "-k", "clock"),
    ),
    Mutant(
        "in a folder of the user, the agent's clock says what is older than the job",
        (Edit(_DIR, "CheckpointDir.__init__", "time.time_ns()", "time.time_ns() + 18000 * 10 ** 9"),),
        HOURS_OFF,
    ),
)
