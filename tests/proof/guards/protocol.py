"""The guards of the protocol between agent and nodes, of the engine, the store and collected files."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

NODE = ("tests/integration/runs/test_attempts.py", "tests/unit/remote/test_rundir.py")
SHARED = ("tests/integration/runs/test_batch.py", "-k", "at_once or again or older or answer or restart or files_say")
SHARED_ENDS = (
    "tests/integration/runs/test_batch_ends.py",
    "-k",
    "killed_supervisor or lives or has_changed or had_its_folder",
)
FILES = ("tests/integration/runs/test_run_files.py", "-k", "full_disk")
TREES = ("tests/integration/runs/test_supervisor.py", "-k", "hostile or left or killed_supervisor")
GPUS = ("tests/integration/runs/test_gpu_locks.py", "-k", "another_agent or second_name or rank_is_dead or moved")
ONE_MACHINE = ("tests/integration/engine/test_one_machine.py", "-k", "two_names")
LEASES = ("tests/proof/test_leases.py",)
MACHINE = ("tests/proof/test_state_machine.py",)
# A walk of the state machine comes by some moments only now and then; the rule itself is a unit.
RULES = ("tests/unit/policy/lifecycle/test_attempt.py", *MACHINE)
CRASHES = ("tests/proof/test_crash_points.py", "-k", "start.answered or conclude.recorded or finish.")
STRAYS = ("tests/proof/test_crash_points.py", "-k", "sweep")
MADE = ("tests/integration/artifacts/test_workdir_cli.py", "-k", "code_does_not or somebody_asks")
CHECKPOINTS = ("tests/integration/artifacts/test_checkpoints.py", "-k", "next_attempt")
AGENTS = ("tests/integration/agent/test_agent.py",)

_RUNDIR = "src/ugro/remote/state/rundir.py"
_SUPERVISOR = "src/ugro/remote/runs/supervisor.py"
_STOPPING = "src/ugro/remote/runs/stop.py"
_FENCE = "src/ugro/remote/state/fence.py"
_CLAIM = "src/ugro/remote/runs/claim.py"
_SCHEDULER_INPUT = "src/ugro/agent/tracking/scheduler_input.py"
_OWNERSHIP = "src/ugro/remote/runs/ownership.py"
_ORPHANS = "src/ugro/agent/engine/orphan_runs.py"
_GPU_LOCKS = "src/ugro/remote/hardware/gpu_locks.py"
_MOVES = "src/ugro/store/job_moves.py"
_SUBMISSIONS = "src/ugro/store/submissions.py"
_ENGINE = "src/ugro/agent/engine/reconciler.py"
_ATTEMPT = "src/ugro/policy/lifecycle/attempt.py"

_NO_CLAIM = Edit(
    _RUNDIR,
    "        except FileExistsError:\n            return False\n        try:\n            with",
    "        except FileExistsError:\n            return True\n        try:\n            with",
)
_CLAIM_UNSEEN = Edit(_RUNDIR, 'return os.path.exists(self.file("claim"))', "return False")
_NO_LOCK = Edit(_RUNDIR, "if durable.lock_within(fd, fcntl.LOCK_EX, timeout_s):", "if True:")
_NO_FENCE = Edit(_FENCE, "if attempt < self.seen or attempt <= self.closed:", "if False:")
_CLAIMED_TWICE = Edit(_CLAIM, "raise Known from error", "pass")
_STRAY = "self._watch.others(under_way)"

MUTANTS = (
    Mutant("a claim can be made twice, and is not looked for", (_NO_CLAIM, _CLAIM_UNSEEN, _CLAIMED_TWICE), NODE),
    Mutant("the lock is not taken, and the claim not looked for", (_NO_LOCK, _CLAIM_UNSEEN, _NO_CLAIM), NODE),
    Mutant(
        "the lock proves nothing",
        (Edit(_RUNDIR, "return not durable.lock_within(fd, fcntl.LOCK_SH, 0)", "return False"),),
        NODE,
    ),
    Mutant("the fence lets older attempts in", (_NO_FENCE,), NODE),
    Mutant(
        "a start of before a restart of the machine is taken",
        (Edit("src/ugro/remote/runs/start.py", "if meant is not None and meant != boot_id():", "if False:"),),
        SHARED,
    ),
    Mutant(
        "a start that is meant for another folder is taken",
        (Edit("src/ugro/remote/runs/start.py", "if meant is not None and meant != agent.root:", "if False:"),),
        SHARED,
    ),
    Mutant(
        "what has a node's name now is asked for what another has",
        (
            Edit(
                "src/ugro/agent/engine/reconciler.py",
                "is_elsewhere = job.placement is not None and self._watch.is_elsewhere(job.placement.on(node))",
                "is_elsewhere = False",
            ),
        ),
        MACHINE,
    ),
    Mutant("a shared supervisor lets closed and older attempts in", (_NO_FENCE,), SHARED),
    Mutant(
        "a supervisor begins what has begun: by fence and claim",
        (_NO_FENCE, _CLAIM_UNSEEN, _CLAIMED_TWICE),
        SHARED,
    ),
    Mutant(
        "a shared supervisor does not look for older attempts",
        (Edit(_CLAIM, "if seen and not self._is_patient and _older(run):", "if False:"),),
        SHARED,
    ),
    Mutant(
        "a supervisor does not take the lock of a run",
        (Edit(_CLAIM, "take_lock(path, _LOCK_S if self._is_patient else 0)", "os.open(path, os.O_RDWR)"),),
        SHARED,
    ),
    Mutant(
        "the lock of a GPU is not taken",
        (
            Edit(_GPU_LOCKS, "is_held = not durable.lock_within(file, fcntl.LOCK_EX, _LOCK_S)", "is_held = False"),
            Edit(_GPU_LOCKS, "(record and not is_over(record))", "False"),
        ),
        GPUS,
    ),
    Mutant(
        "what a killed supervisor left does not hold its GPU",
        (Edit(_GPU_LOCKS, "if is_held or (record and not is_over(record)):", "if is_held:"),),
        GPUS,
    ),
    Mutant(
        "a second name for a machine gets work",
        (Edit(_SCHEDULER_INPUT, "        if self.same_as is not None:", "        if False:"),),
        ONE_MACHINE,
    ),
    Mutant(
        "a GPU at an index is taken for the one that was there",
        (Edit("src/ugro/remote/runs/start.py", "if uuid and now != uuid and now != \"\":", "if False:"),),
        GPUS,
    ),
    Mutant(
        "nobody ends what a killed supervisor left",
        (Edit("src/ugro/remote/runs/reaper.py", "if is_ended := _end_all():", "if is_ended := True:"),),
        SHARED_ENDS,
    ),
    Mutant(
        "a run is over while something it left lives",
        (Edit(_OWNERSHIP, "return not self._running() and not self._ownership.orphans_of(self)", "return True"),),
        SHARED_ENDS,
    ),
    Mutant(
        "a process that kept nothing but its log is nobody's",
        (Edit(_OWNERSHIP, "_user_of_folder(pid, possible)", "None"),),
        SHARED_ENDS,
    ),
    Mutant(
        "a folder is used again whatever its run did to it",
        (Edit("src/ugro/remote/runs/dir_pool.py", "        if not _is_plain(run):\n            return False\n", ""),),
        SHARED_ENDS,
    ),
    Mutant(
        "a stop that comes first does not close the fence",
        (Edit(_STOPPING, "fence.close(run.attempt)  # a start", "pass  # a start"),),
        NODE,
    ),
    Mutant(
        "an older generation is admitted",
        (Edit(_RUNDIR, "        if generation < newest:\n", "        if False:\n"),),
        NODE,
    ),
    Mutant(
        "older attempts are not ended before a newer starts",
        (Edit(_CLAIM, "older.attempt < run.attempt and", "False and"),),
        NODE,
    ),
    Mutant(
        "no space is kept for the exit record",
        (Edit(_CLAIM, "        dir_pool.reserve_exit(path, LEAST", "        (path, LEAST"),),
        FILES,
    ),
    Mutant(
        "the lease is not looked at while a run goes on",
        (
            Edit(_SUPERVISOR, "if run.claimed.is_lease_over():", "if False:"),
            Edit("src/ugro/remote/runs/reaper.py", "            self._keep_leases()\n", ""),
        ),
        NODE,
    ),
    Mutant(
        "the lease is not looked at before a run starts",
        (Edit(_CLAIM, "if wanted.is_lease_over():", "if False:"),),
        NODE,
    ),
    Mutant(
        "a lease is taken for over too soon",
        (
            Edit(
                "src/ugro/agent/engine/leases.py",
                "return boot_clock_s() > vouched_s + dead_after_s(limit_s, job.spec.stop.grace_s)",
                "return True",
            ),
        ),
        LEASES,
    ),
    Mutant(
        "what a dead supervisor left is not ended",
        (Edit(_STOPPING, "            left = _end_leftovers(run)\n", "            left = Ending(dict, dict, 0.0)\n"),),
        TREES,
    ),
    Mutant(
        "only ranks are ended, not what they started",
        (
            Edit(
                _OWNERSHIP,
                "{**terminate.with_start(roots), **terminate.below(roots), **terminate.marked(self.mark)}",
                "terminate.with_start(self._running())",
            ),
            Edit(_OWNERSHIP, "return not self._running() and not", "return not self._running() or not"),
        ),
        TREES,
    ),
    Mutant(
        "a run is removed that is not over",
        (
            Edit(
                _STOPPING,
                'if run.exit() is None:\n            raise Refused("not-exited"',
                'if False:\n            raise Refused("not-exited"',
            ),
        ),
        NODE,
    ),
    Mutant(
        "an older view may move a job",
        (Edit(_MOVES, "    if (state, attempt) != (seen", "    if False and (state, attempt) != (seen"),),
        MACHINE,
    ),
    Mutant(
        "a move that the table does not have",
        (
            Edit("src/ugro/core/job.py", "    if new not in MOVES[old]:\n", "    if False:\n"),
            Edit(_MOVES, "    if (state, attempt) != (seen", "    if False and (state, attempt) != (seen"),
        ),
        MACHINE,
    ),
    Mutant(
        "a submit is not known by its key",
        (Edit(_SUBMISSIONS, "if (known := submitted(db, key)) is not None:", "if (known := None):"),),
        MACHINE,
    ),
    Mutant(
        "devices are given twice: by the scheduler and by the store",
        (
            Edit(
                "src/ugro/store/migrations/0002_jobs.sql",
                "    attempt INTEGER NOT NULL,\n    PRIMARY KEY (node, device)\n",
                "    attempt INTEGER NOT NULL\n",
            ),
            Edit("tests/proof/model.py", "for job in live.holding() if job.placement is not None", "for job in []"),
        ),
        MACHINE,
    ),
    Mutant(
        "devices are released before the ranks are proven dead",
        (
            Edit(
                _ATTEMPT,
                "return run.is_gone or run.state in (RunState.DONE, RunState.FAILED)",
                "return run.is_gone or run.state in (RunState.DONE, RunState.FAILED, RunState.DEAD)",
            ),
        ),
        RULES,
    ),
    Mutant(
        "a silent node counts as over",
        (Edit(_ATTEMPT, "return run.is_gone or run.state", "return not run.is_reachable or run.is_gone or run.state"),),
        MACHINE,
    ),
    Mutant(
        "a cancel is acknowledged and not written down",
        (
            Edit(
                _MOVES,
                '        db.execute("UPDATE jobs SET ending = ? WHERE id = ?", (ending, job))\n',
                "        pass\n",
            ),
        ),
        MACHINE,
    ),
    Mutant(
        "a job that was cancelled is started",
        (
            Edit(
                _MOVES,
                "    if current.ending is not None:\n        raise StaleMove",
                "    if False:\n        raise StaleMove",
            ),
            Edit("src/ugro/agent/engine/live_jobs.py", "if job.ending is None:", "if True:"),
            Edit(_ENGINE, "await self._drop(self.live.cancelled())", "pass"),
        ),
        MACHINE,
    ),
    Mutant(
        "strays are left alone",
        (
            Edit(_ENGINE, _STRAY, "()"),
        ),
        STRAYS,
    ),
    Mutant(
        "strays are left alone (model)",
        (
            Edit(_ENGINE, _STRAY, "()"),
        ),
        MACHINE,
    ),
    Mutant(
        "an attempt under way counts as stray",
        (
            Edit(_ENGINE, _STRAY, "self._watch.others(set())"),
            Edit(
                "src/ugro/agent/engine/orphan_runs.py",
                "elif not (job.state in HOLDING_STATES and job.attempt == status.attempt):",
                "else:",
            ),
        ),
        CRASHES,
    ),
    Mutant(
        "logs are not waited for",
        (
            Edit("src/ugro/agent/artifacts/collector.py", "        return all(done)\n", "        return True\n"),
            Edit(
                "src/ugro/agent/artifacts/log_mirror.py",
                "            await asyncio.wait(tasks, timeout=timeout_s)\n",
                "            pass\n",
            ),
        ),
        CRASHES,
    ),
    Mutant(
        "the logs of small commands are not recorded with their end",
        (
            Edit(_MOVES, "    smalllogs.put(db, log)\n", ""),
        ),
        CRASHES,
    ),
    Mutant(
        "two agents in one state directory",
        (Edit("src/ugro/agent/lock.py", "os.close(descriptor)\n                return None\n", "break\n"),),
        AGENTS,
    ),
    Mutant(
        "a run goes before its files were fetched",
        (Edit(_ORPHANS, "        await self._collector.fetch_outputs(node, status)\n", ""),),
        MADE,
    ),
    Mutant(
        "files that are not fetched go with their run",
        (
            Edit(
                "src/ugro/agent/artifacts/output_sync.py",
                "            await transfer.files.keep(transfer.source, names, with_unlisted=unlisted > 0)\n",
                "",
            ),
        ),
        MADE,
    ),
    Mutant(
        "checkpoints go with their run",
        (Edit(_STOPPING, "                checkpoints.save(run)\n", "                pass\n"),),
        CHECKPOINTS,
    ),
    Mutant(
        "checkpoints go with a run that is removed quickly",
        (Edit(_STOPPING, " or checkpoint_dir.of_run(run) is not None", ""),),
        CHECKPOINTS,
    ),
)
