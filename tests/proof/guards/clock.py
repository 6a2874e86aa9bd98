"""Durations by a clock that nobody sets, and what is done while the wall clock cannot be believed."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_MOMENT = "src/ugro/core/support/moment.py"
_RULES = "src/ugro/policy/lifecycle/clock.py"
_SYNC = "src/ugro/agent/artifacts/checkpoint_sync.py"
_DIR = "src/ugro/remote/files/checkpoint_dir.py"
_ORDER = "src/ugro/remote/files/checkpoint_order.py"

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
                "src/ugro/agent/engine/reconciler.py",
                "return by.now.boot_s > due_s(started, limit_s, by)",
                "return by.now.wall_s - started.wall_s > limit_s",
            ),
        ),
        JUMPS,
    ),
    Mutant(
        "the pause before a retry ends by the wall clock",
        (
            Edit(
                "src/ugro/agent/tracking/scheduler_input.py",
                "not_before=due_s(*pause, by) if pause else None",
                "not_before=by.now.boot_s + pause[0].wall_s + pause[1] - by.now.wall_s if pause else None",
            ),
        ),
        JUMPS,
    ),
    Mutant(
        "within a boot, too, the wall clock decides",
        (Edit(_MOMENT, "        return since.boot_s + duration_s", f"        return {_BY_WALL}"),),
        MOMENTS,
    ),
    Mutant(
        "after a restart of the machine a duration is over at once",
        (Edit(_MOMENT, "max(by_wall_s, by.started.boot_s + min(duration_s, PATIENCE_S))", "by_wall_s"),),
        MOMENTS,
    ),
    Mutant(
        "after a restart of the machine a duration is never over",
        (Edit(_MOMENT, "return min(latest_s, max(", "return max(latest_s, max("),),
        MOMENTS,
    ),
    Mutant(
        "a clock that is years off is believed",
        (Edit(_RULES, "return known.before is not None and not _is_likely(known.before, now)", "return False"),),
        BELIEVED,
    ),
    Mutant(
        "a jump forward holds no removals",
        (Edit(_RULES, "is_held = jump.is_restart or jump.by_s >= _HELD_FROM_S", "is_held = False"),),
        BELIEVED,
    ),
    Mutant(
        "old jobs are removed while the clock is not believed",
        (Edit("src/ugro/agent/jobs/retention.py", "if not self._may_remove():", "if False:"),),
        BELIEVED,
    ),
    Mutant(
        "a clock that is set is not noticed",
        (Edit(_RULES, "return Jump(now, by_s) if is_set else None", "return None"),),
        BELIEVED,
    ),
    Mutant(
        "the newest checkpoint has the newest time",
        (Edit(_SYNC, "    if own[:2] != known:\n        return own[:2] > known\n", ""),),
        NEWEST,
    ),
    Mutant(
        "checkpoints of two nodes are ordered by their clocks",
        (Edit(_SYNC, "attempt = min(found.attempt, job.attempt)", "off_ns = attempt = 0"),),
        HOURS_OFF,
    ),
    Mutant(
        "a checkpoint is of the attempt that looks",
        (Edit(_ORDER, "if attempt > self._begun:", "if False:"),),
        NEWEST,
    ),
    Mutant(
        "what is older than the start of a run is decided by a clock that was set back",
        (Edit("src/ugro/remote/clock.py", "return min(wall_then_s,", "return max(wall_then_s,"),),
        ("tests/unit/remote/test_workdir.py", "-k", "clock"),
    ),
    Mutant(
        "in a folder of the user, the agent's clock says what is older than the job",
        (
            Edit(
                _DIR,
                "self._since_ns = 0 if age_s is None else time.time_ns() - int(float(age_s) * 1e9)",
                "self._since_ns = 0 if age_s is None else time.time_ns() + 18000 * 10**9 - int(float(age_s) * 1e9)",
            ),
        ),
        HOURS_OFF,
    ),
)
