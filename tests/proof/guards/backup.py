"""The guards of the agent's own state: what is damaged is not served, what is kept is whole, nothing is deleted."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

DAMAGE = ("tests/unit/store/test_damage.py",)
COPIES = ("tests/unit/store/test_backup.py", "-m", "not proof")
ROTATION = ("tests/unit/agent/test_backups.py",)
COMMANDS = ("tests/integration/agent/test_state_files.py",)

_EXAMINE = "src/ugro/store/examine.py"
_ENGINE = "src/ugro/store/engine.py"
_BACKUP = "src/ugro/store/backup.py"
_BACKUPS = "src/ugro/agent/ops/backups.py"
_RECOVERY = "src/ugro/agent/recovery.py"

MUTANTS = (
    Mutant("what SQLite finds wrong is served", (Edit(_EXAMINE, 'if first != "ok":', "if False:"),), DAMAGE),
    Mutant("rows that refer to nothing are served", (Edit(_EXAMINE, "if orphan is not None:", "if False:"),), DAMAGE),
    Mutant(
        "a log that has lost changes is used",
        (Edit(_EXAMINE, "if problem := wal.lost_changes(path, index):", "if problem := None:"),),
        DAMAGE,
    ),
    Mutant(
        "the proof of lost changes is gone after the first look",
        (Edit(_EXAMINE, "    except Damaged:\n        wal.put_back(path, index)\n", "    except Damaged:\n"),),
        DAMAGE,
    ),
    Mutant(
        "the log of another database is mixed in",
        (Edit(_EXAMINE, "if ours is not None and both != ours:", "if False:"),),
        DAMAGE,
    ),
    Mutant(
        "a state whose damage was met is used on",
        (Edit(_ENGINE, "if self.damage is not None:\n            self._refuse_all(batch)", "if False:"),),
        DAMAGE,
    ),
    Mutant("a backup is not checked", (Edit(_BACKUP, "        check(part)\n", ""),), COPIES),
    Mutant(
        "a backup is begun again for each change",
        (Edit(_BACKUP, '        state.execute("BEGIN")\n', ""),),
        COPIES,
    ),
    Mutant(
        "a state is changed by a migration without a backup",
        (Edit(_BACKUPS, "            self._make(found.schema)\n", ""),),
        ROTATION,
    ),
    Mutant(
        "a missing state is begun again in silence",
        (Edit(_BACKUPS, "        if found.schema == 0:", "        if False:"),),
        ROTATION,
    ),
    Mutant(
        "a restore deletes the state that was there",
        (Edit(_RECOVERY, "            old.rename(new)\n", "            old.unlink()\n"),),
        (*COMMANDS, "-k", "restored"),
    ),
    Mutant(
        "a state is restored while an agent runs",
        (Edit(_RECOVERY, "    if HomeLock.take(home) is None:\n        raise", "    if False:\n        raise"),),
        (*COMMANDS, "-k", "begun_again"),
    ),
    Mutant(
        "an agent does not notice that its folder was removed",
        (Edit("src/ugro/agent/lock.py", "        if self.is_lost():\n", "        if False:\n"),),
        (*COMMANDS, "-k", "home_was_removed"),
    ),
)
