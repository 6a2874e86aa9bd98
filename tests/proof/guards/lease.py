"""The guards of leases and of what is left when a supervisor is stopped, hangs or is killed."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_REAPER = "ugro.node.runs.reaper"
_STOP = "ugro.node.runs.stop"
_LEASE = "ugro.node.runs.reaper"
_SUPERVISOR = "ugro.node.runs.supervisor"

STOPPED = ("tests/integration/runs/test_reaper.py", "-k", "stopped or hangs")
LEFT = ("tests/integration/runs/test_reaper.py", "-k", "left_has_ended or claim_more")
SUCCESSOR = ("tests/integration/runs/test_reaper.py", "-k", "successor or claim_more or another_reaper")
RULE = ("tests/unit/remote/test_lease.py",)

MUTANTS = (
    Mutant(
        "nobody but the supervisor keeps a lease",
        (Edit(_REAPER, "_Watch.run", "self._keep_leases()", ""),),
        STOPPED,
    ),
    Mutant(
        "two attempts run while a supervisor is stopped",
        (Edit(_REAPER, "_Watch.run", "self._keep_leases()", ""),),
        ("tests/proof/test_leases.py", "-k", "stopped_supervisor"),
    ),
    Mutant(
        "a supervisor that hangs keeps its ranks",
        (Edit(_REAPER, "_Watch._keep_leases", "step == KILL", "False"),),
        STOPPED,
    ),
    Mutant(
        "a file server that hangs keeps a lease alive",
        (
            Edit(_REAPER, "_Watch._begin_lease", "_thread.start_new_thread(self._listen, ())", ""),
            Edit(_REAPER, "_Watch._begin_lease", "self._is_listening = True", "pass"),
        ),
        STOPPED,
    ),
    Mutant(
        "reaper and supervisor are in one session",
        (Edit(_REAPER, "_serve", "os.setsid()", "pass"),),
        ("tests/integration/runs/test_reaper.py", "-k", "group"),
    ),
    Mutant(
        "a reaper adopts nothing",
        (Edit(_REAPER, "fork", "process_tree.become_subreaper()", ""),),
        LEFT,
    ),
    Mutant(
        "a run is said to be over before its reaper is done",
        (Edit(_STOP, "clean", "_await_reaper(run)", ""),),
        LEFT,
    ),
    Mutant(
        "all is said to have ended when both were killed",
        (
            Edit(
                _STOP,
                "_is_proven",
                "is_alive or run.has_all_ended() or has_group",
                "True or run.has_all_ended() or has_group",
            ),
        ),
        LEFT,
    ),
    Mutant(
        "a reaper ends with a supervisor that was killed before it had read all",
        (Edit(_REAPER, "_Watch._hear", "(BlockingIOError, ConnectionResetError)", "BlockingIOError"),),
        STOPPED,
    ),
    Mutant(
        "what is left in a run's control group is not ended",
        (
            Edit(
                _STOP,
                "_end_leftovers.find",
                "{**terminate.in_cgroup(cgroup), **terminate.in_groups(_groups(run))}",
                "{**terminate.in_cgroup(cgroup)}",
            ),
        ),
        ("tests/integration/runs/test_reaper.py", "-k", "control_group"),
    ),
    Mutant(
        "a killed reaper has no successor",
        (Edit(_SUPERVISOR, "Supervisor._replace_reaper", "self._reaper.replace()", ""),),
        SUCCESSOR,
    ),
    Mutant(
        "a second reaper is taken for what a run left",
        (Edit(_SUPERVISOR, "Supervisor._replace_reaper", "self._ownership.helper = self._reaper.pid", "pass"),),
        SUCCESSOR,
    ),
    Mutant(
        "a lease that was over is renewed",
        (
            Edit(
                _LEASE,
                "KeptLease.look",
                "if not self._is_over:\n"
                "    self._heard_s = max(self._heard_s, heard_s)\n"
                "    self._is_over = self.silent_s(now_s) > self._lease.lease_s",
                "if True:\n"
                "    self._heard_s = max(self._heard_s, heard_s)\n"
                "    self._is_over = self.silent_s(now_s) > self._lease.lease_s",
            ),
        ),
        RULE,
    ),
    Mutant(
        "an agent does not wait for the reaper's kill",
        (
            Edit(
                "ugro.kernel.jobs.engine.leases",
                "dead_after_s",
                "(lease_s + grace_s) * _CLOCK_DRIFT + _MARGIN_S",
                "(lease_s + grace_s) * _CLOCK_DRIFT",
            ),
        ),
        RULE,
    ),
    Mutant(
        "a run that ends slowly outlives its lease",
        (
            Edit(_SUPERVISOR, "Supervisor._expire", "run.life.ending.hasten(grace_s)", "pass"),
            Edit(_REAPER, "_Watch._keep_leases", "step == KILL", "False"),
        ),
        ("tests/integration/runs/test_reaper.py", "-k", "ends_slowly"),
    ),
)
