"""The guards of leases and of what is left when a supervisor is stopped, hangs or is killed."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_REAPER = "src/ugro/remote/runs/reaper.py"
_STOP = "src/ugro/remote/runs/stop.py"
_LEASE = "src/ugro/remote/runs/lease.py"
_SUPERVISOR = "src/ugro/remote/runs/supervisor.py"

STOPPED = ("tests/integration/runs/test_reaper.py", "-k", "stopped or hangs")
LEFT = ("tests/integration/runs/test_reaper.py", "-k", "left_has_ended or claim_more")
SUCCESSOR = ("tests/integration/runs/test_reaper.py", "-k", "successor or claim_more or another_reaper")
RULE = ("tests/unit/remote/test_lease.py",)

MUTANTS = (
    Mutant(
        "nobody but the supervisor keeps a lease",
        (Edit(_REAPER, "            self._keep_leases()\n", ""),),
        STOPPED,
    ),
    Mutant(
        "two attempts run while a supervisor is stopped",
        (Edit(_REAPER, "            self._keep_leases()\n", ""),),
        ("tests/proof/test_leases.py", "-k", "stopped_supervisor"),
    ),
    Mutant(
        "a supervisor that hangs keeps its ranks",
        (Edit(_REAPER, "if step == KILL:", "if False:"),),
        STOPPED,
    ),
    Mutant(
        "a file server that hangs keeps a lease alive",
        (
            Edit(_REAPER, "                _thread.start_new_thread(self._listen, ())\n", ""),
            Edit(_REAPER, "                self._is_listening = True\n", "                pass\n"),
        ),
        STOPPED,
    ),
    Mutant(
        "reaper and supervisor are in one session",
        (Edit(_REAPER, "            os.setsid()\n", "            pass\n"),),
        ("tests/integration/runs/test_reaper.py", "-k", "group"),
    ),
    Mutant(
        "a reaper adopts nothing",
        (Edit(_REAPER, "    process_tree.become_subreaper()\n", ""),),
        LEFT,
    ),
    Mutant(
        "a run is said to be over before its reaper is done",
        (Edit(_STOP, "            _await_reaper(run)\n", ""),),
        LEFT,
    ),
    Mutant(
        "all is said to have ended when both were killed",
        (Edit(_STOP, "return is_alive or is_older or", "return True or"),),
        LEFT,
    ),
    Mutant(
        "a reaper ends with a supervisor that was killed before it had read all",
        (Edit(_REAPER, "except (BlockingIOError, ConnectionResetError):", "except BlockingIOError:"),),
        STOPPED,
    ),
    Mutant(
        "what is left in a run's control group is not ended",
        (Edit(_STOP, ", **terminate.in_groups(_groups(run))", ""),),
        ("tests/integration/runs/test_reaper.py", "-k", "control_group"),
    ),
    Mutant(
        "a killed reaper has no successor",
        (Edit(_SUPERVISOR, "            self._reaper.replace()\n", ""),),
        SUCCESSOR,
    ),
    Mutant(
        "a second reaper is taken for what a run left",
        (Edit(_SUPERVISOR, "self._ownership.helper = self._reaper.pid", "pass"),),
        SUCCESSOR,
    ),
    Mutant(
        "a lease that was over is renewed",
        (Edit(_LEASE, "if not self._is_over:\n            self._heard_s", "if True:\n            self._heard_s"),),
        RULE,
    ),
    Mutant(
        "an agent does not wait for the reaper's kill",
        (Edit("src/ugro/agent/engine/leases.py", "* _CLOCK_DRIFT + _MARGIN_S", "* _CLOCK_DRIFT"),),
        RULE,
    ),
    Mutant(
        "a run that ends slowly outlives its lease",
        (
            Edit(_SUPERVISOR, "            run.life.ending.hasten(grace_s)\n", "            pass\n"),
            Edit(_REAPER, "if step == KILL:", "if False:"),
        ),
        ("tests/integration/runs/test_reaper.py", "-k", "ends_slowly"),
    ),
)
