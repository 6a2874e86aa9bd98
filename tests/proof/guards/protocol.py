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

_RUNDIR = "ugro.node.runs.rundir"
_SUPERVISOR = "ugro.node.runs.supervisor"
_STOPPING = "ugro.node.runs.stop"
_FENCE = "ugro.node.runs.fence"
_CLAIM = "ugro.node.runs.claim"
_SCHEDULER_INPUT = "ugro.kernel.jobs.engine.scheduler_input"
_OWNERSHIP = "ugro.node.runs.ownership"
_ORPHANS = "ugro.kernel.jobs.engine.finish"
_GPU_LOCKS = "ugro.node.hardware.gpu_locks"
_MOVES = "ugro.kernel.jobs.moves"
_SUBMISSIONS = "ugro.kernel.jobs.moves"
_ENGINE = "ugro.kernel.jobs.engine.reconciler"
_ATTEMPT = "ugro.kernel.jobs.engine.rules.attempt"

_NO_CLAIM = Edit(_RUNDIR, "RunDir.claim", "False", "True")
_CLAIM_UNSEEN = Edit(_RUNDIR, "RunDir.is_claimed", "os.path.exists(self.file('claim'))", "False")
_NO_LOCK = Edit(_RUNDIR, "take_lock", "durable.lock_within(fd, fcntl.LOCK_EX, timeout_s)", "True")
_NO_FENCE = Edit(_FENCE, "HeldFence.enter", "attempt < self.seen or attempt <= self.closed", "False")
_CLAIMED_TWICE = Edit(_CLAIM, "Claims._make_claim", "raise Known from error", "pass")
_STRAY = "self._watch.others(under_way)"

MUTANTS = (
    Mutant("a claim can be made twice, and is not looked for", (_NO_CLAIM, _CLAIM_UNSEEN, _CLAIMED_TWICE), NODE),
    Mutant("the lock is not taken, and the claim not looked for", (_NO_LOCK, _CLAIM_UNSEEN, _NO_CLAIM), NODE),
    Mutant(
        "the lock proves nothing",
        (Edit(_RUNDIR, "RunDir.is_alive", "not durable.lock_within(fd, fcntl.LOCK_SH, 0)", "False"),),
        NODE,
    ),
    Mutant("the fence lets older attempts in", (_NO_FENCE,), NODE),
    Mutant(
        "a start of before a restart of the machine is taken",
        (Edit("ugro.node.runs.start", "_is_of_this_boot", "meant is not None and meant != boot_id()", "False"),),
        SHARED,
    ),
    Mutant(
        "a start that is meant for another folder is taken",
        (Edit("ugro.node.runs.start", "_expect_root", "meant is not None and meant != agent.root", "False"),),
        SHARED,
    ),
    Mutant(
        "what has a node's name now is asked for what another has",
        (
            Edit(
                "ugro.kernel.jobs.engine.reconciler",
                "Engine._node_run",
                "job.placement is not None and self._watch.is_elsewhere(job.placement.on(node))",
                "False",
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
        (Edit(_CLAIM, "Claims._take", "seen and (not self._is_patient) and _older(run)", "False"),),
        SHARED,
    ),
    Mutant(
        "a supervisor does not take the lock of a run",
        (
            Edit(_CLAIM, "Claims._lock", "take_lock", "os.open"),
            Edit(_CLAIM, "Claims._lock", "_LOCK_S if self._is_patient else 0", "os.O_RDWR"),
        ),
        SHARED,
    ),
    Mutant(
        "the lock of a GPU is not taken",
        (
            Edit(_GPU_LOCKS, "_locked", "not durable.lock_within(file, fcntl.LOCK_EX, _LOCK_S)", "False"),
            Edit(_GPU_LOCKS, "_locked", "record and (not is_over(record))", "False"),
        ),
        GPUS,
    ),
    Mutant(
        "what a killed supervisor left does not hold its GPU",
        (Edit(_GPU_LOCKS, "_locked", "is_held or (record and (not is_over(record)))", "is_held"),),
        GPUS,
    ),
    Mutant(
        "a second name for a machine gets work",
        (Edit(_SCHEDULER_INPUT, "_Standing.objection", "self.same_as is not None", "False"),),
        ONE_MACHINE,
    ),
    Mutant(
        "a GPU at an index is taken for the one that was there",
        (Edit("ugro.node.runs.start", "_expect_gpus", "uuid and now != uuid and (now != '')", "False"),),
        GPUS,
    ),
    Mutant(
        "nobody ends what a killed supervisor left",
        (Edit("ugro.node.runs.reaper", "_Watch.run", "(is_ended := _end_all())", "(is_ended := True)"),),
        SHARED_ENDS,
    ),
    Mutant(
        "a run is over while something it left lives",
        (
            Edit(
                _OWNERSHIP,
                "RunFamily.is_empty",
                "not self._running() and (not self._ownership.orphans_of(self))",
                "True",
            ),
        ),
        SHARED_ENDS,
    ),
    Mutant(
        "a process that kept nothing but its log is nobody's",
        (Edit(_OWNERSHIP, "Ownership._owner", "_user_of_folder(pid, possible)", "None"),),
        SHARED_ENDS,
    ),
    Mutant(
        "a folder is used again whatever its run did to it",
        (Edit("ugro.node.runs.dir_pool", "clear", "if not _is_plain(run):\n    return False", ""),),
        SHARED_ENDS,
    ),
    Mutant(
        "a stop that comes first does not close the fence",
        (Edit(_STOPPING, "stop", "fence.close(run.attempt)", "pass"),),
        NODE,
    ),
    Mutant(
        "an older generation is admitted",
        (Edit(_RUNDIR, "AgentDir.admit", "generation < newest", "False"),),
        NODE,
    ),
    Mutant(
        "older attempts are not ended before a newer starts",
        (Edit(_CLAIM, "_older", "older.attempt < run.attempt", "False"),),
        NODE,
    ),
    Mutant(
        "no space is kept for the exit record",
        (
            Edit(
                _CLAIM,
                "Claims._locked_in",
                "dir_pool.reserve_exit(path, LEAST_EXIT_BYTES if wanted.spec.is_shared else EXIT_BYTES)",
                "(path, LEAST_EXIT_BYTES if wanted.spec.is_shared else EXIT_BYTES)",
            ),
        ),
        FILES,
    ),
    Mutant(
        "the lease is not looked at while a run goes on",
        (
            Edit(_SUPERVISOR, "Supervisor._tick", "run.claimed.is_lease_over()", "False"),
            Edit("ugro.node.runs.reaper", "_Watch.run", "self._keep_leases()", ""),
        ),
        NODE,
    ),
    Mutant(
        "the lease is not looked at before a run starts",
        (Edit(_CLAIM, "Claims._take", "wanted.is_lease_over()", "False"),),
        NODE,
    ),
    Mutant(
        "a lease is taken for over too soon",
        (
            Edit(
                "ugro.kernel.jobs.engine.leases",
                "Leases.is_over",
                "boot_clock_s() > vouched_s + dead_after_s(limit_s, job.spec.stop.grace_s)",
                "True",
            ),
        ),
        LEASES,
    ),
    Mutant(
        "what a dead supervisor left is not ended",
        (Edit(_STOPPING, "clean", "_end_leftovers(run)", "Ending(dict, dict, 0.0)"),),
        TREES,
    ),
    Mutant(
        "only ranks are ended, not what they started",
        (
            Edit(
                _OWNERSHIP,
                "RunFamily._all",
                "{**terminate.with_start(roots), **terminate.below(roots), **terminate.marked(self.mark)}",
                "terminate.with_start(self._running())",
            ),
            Edit(
                _OWNERSHIP,
                "RunFamily.is_empty",
                "not self._running() and (not self._ownership.orphans_of(self))",
                "not self._running() or not self._ownership.orphans_of(self)",
            ),
        ),
        TREES,
    ),
    Mutant(
        "a run is removed that is not over",
        (Edit(_STOPPING, "_over", "run.exit() is None", "False"),),
        NODE,
    ),
    Mutant(
        "an older view may move a job",
        (
            Edit(
                _MOVES,
                "_current",
                "(state, attempt) != (seen.state, seen.attempt)",
                "False and (state, attempt) != (seen.state, seen.attempt)",
            ),
        ),
        MACHINE,
    ),
    Mutant(
        "a move that the table does not have",
        (
            Edit("ugro.kernel.jobs.model", "check_move", "new not in MOVES[old]", "False"),
            Edit(
                _MOVES,
                "_current",
                "(state, attempt) != (seen.state, seen.attempt)",
                "False and (state, attempt) != (seen.state, seen.attempt)",
            ),
        ),
        MACHINE,
    ),
    Mutant(
        "a submit is not known by its key",
        (Edit(_SUBMISSIONS, "submit", "(known := submitted(db, key)) is not None", "(known := None)"),),
        MACHINE,
    ),
    Mutant(
        "devices are given twice: by the scheduler and by the store",
        (
            Edit(
                "kernel/store/migrations/0001_state.sql",
                "",
                "    attempt INTEGER NOT NULL,\n    PRIMARY KEY (node, device)\n",
                "    attempt INTEGER NOT NULL\n",
            ),
            Edit(
                "tests.proof.model",
                "ModelInput.take",
                "(_holding(job, self.clock.reading()) for job in live.holding() if job.placement is not None)",
                "(_holding(job, self.clock.reading()) for job in [])",
            ),
        ),
        MACHINE,
    ),
    Mutant(
        "devices are released before the ranks are proven dead",
        (
            Edit(
                _ATTEMPT,
                "_is_over",
                "(RunState.DONE, RunState.FAILED)",
                "(RunState.DONE, RunState.FAILED, RunState.DEAD)",
            ),
        ),
        RULES,
    ),
    Mutant(
        "a silent node counts as over",
        (
            Edit(
                _ATTEMPT,
                "_is_over",
                "run.is_gone or run.state in (RunState.DONE, RunState.FAILED)",
                "not run.is_reachable or run.is_gone or run.state in (RunState.DONE, RunState.FAILED)",
            ),
        ),
        MACHINE,
    ),
    Mutant(
        "a cancel is acknowledged and not written down",
        (Edit(_MOVES, "ask_to_end", "db.execute('UPDATE jobs SET ending = ? WHERE id = ?', (ending, job))", "pass"),),
        MACHINE,
    ),
    Mutant(
        "a job that was cancelled is started",
        (
            Edit(_MOVES, "start", "current.ending is not None", "False"),
            Edit("ugro.kernel.jobs.engine.live_jobs", "LiveJobs._take_waiting", "job.ending is None", "True"),
            Edit(_ENGINE, "Engine._schedule", "await self._drop(self.live.cancelled())", "pass"),
        ),
        MACHINE,
    ),
    Mutant(
        "strays are left alone",
        (Edit(_ENGINE, "Engine._clear_away", "self._watch.others(under_way)", "()"),),
        STRAYS,
    ),
    Mutant(
        "strays are left alone (model)",
        (Edit(_ENGINE, "Engine._clear_away", "self._watch.others(under_way)", "()"),),
        MACHINE,
    ),
    Mutant(
        "an attempt under way counts as stray",
        (
            Edit(_ENGINE, "Engine._clear_away", "under_way", "set()"),
            Edit(
                "ugro.kernel.jobs.engine.finish",
                "OrphanRuns.clear",
                "if not (job.state in HOLDING_STATES and job.attempt == "
                "status.attempt):\n"
                "    point('sweep.found')\n"
                "    await self._clear(node, status)",
                "point('sweep.found')\nawait self._clear(node, status)",
            ),
        ),
        CRASHES,
    ),
    Mutant(
        "logs are not waited for",
        (
            Edit("ugro.kernel.files.results.collector", "Collector.fetch_logs_of", "all(done)", "True"),
            Edit(
                "ugro.kernel.files.results.log_mirror",
                "LogMirror.finish",
                "await asyncio.wait(tasks, timeout=timeout_s)",
                "pass",
            ),
        ),
        CRASHES,
    ),
    Mutant(
        "the logs of small commands are not recorded with their end",
        (Edit(_MOVES, "finish", "put(db, log)", ""),),
        CRASHES,
    ),
    Mutant(
        "two agents in one state directory",
        (Edit("ugro.kernel.agent.main", "HomeLock.take", "os.close(descriptor)\nreturn None", "break"),),
        AGENTS,
    ),
    Mutant(
        "a run goes before its files were fetched",
        (Edit(_ORPHANS, "OrphanRuns._clear", "await self._collector.fetch_outputs(node, status)", ""),),
        MADE,
    ),
    Mutant(
        "files that are not fetched go with their run",
        (
            Edit(
                "ugro.kernel.files.results.output_sync",
                "OutputSync._fetch_all",
                "await transfer.files.keep(transfer.source, names, with_unlisted=unlisted > 0)",
                "",
            ),
        ),
        MADE,
    ),
    Mutant(
        "checkpoints go with their run",
        (Edit(_STOPPING, "remove", "checkpoints.save(run)", "pass"),),
        CHECKPOINTS,
    ),
    Mutant(
        "checkpoints go with a run that is removed quickly",
        (
            Edit(
                _STOPPING,
                "remove_quickly",
                "entries is None or checkpoint_dir.of_run(run) is not None",
                "entries is None",
            ),
        ),
        CHECKPOINTS,
    ),
)
