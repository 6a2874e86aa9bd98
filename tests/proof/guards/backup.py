"""The guards of the agent's own state: what is damaged is not served, what is kept is whole, nothing is deleted."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

DAMAGE = ("tests/unit/store/test_damage.py",)
COPIES = ("tests/unit/store/test_backup.py", "-m", "not proof")
ROTATION = ("tests/unit/agent/test_backups.py",)
COMMANDS = ("tests/integration/agent/test_state_files.py",)

_EXAMINE = "ugro.kernel.store.examine"
_ENGINE = "ugro.kernel.store.engine"
_BACKUP = "ugro.kernel.store.backup"
_BACKUPS = "ugro.kernel.agent.backups"
_RECOVERY = "ugro.kernel.agent.backups"

MUTANTS = (
    Mutant("what SQLite finds wrong is served", (Edit(_EXAMINE, "check_content", "first != 'ok'", "False"),), DAMAGE),
    Mutant(
        "rows that refer to nothing are served",
        (Edit(_EXAMINE, "check_content", "orphan is not None", "False"),),
        DAMAGE,
    ),
    Mutant(
        "a log that has lost changes is used",
        (Edit(_EXAMINE, "_examine", "lost_changes(path, index)", "None"),),
        DAMAGE,
    ),
    Mutant(
        "the proof of lost changes is gone after the first look",
        (
            Edit(
                _EXAMINE,
                "examine",
                "try:\n"
                "    with closing(sqlite3.connect(f'{path.absolute().as_uri()}?mode"
                "=ro', uri=True)) as db:\n"
                "        schema = _examine(path, db, tables, "
                "parse_index(index))\n"
                "        return Examined(schema, check_content(path, db, how, "
                "on_progress))\n"
                "except Damaged:\n"
                "    put_back(path, index)\n"
                "    raise\n"
                "except sqlite3.DatabaseError as error:\n"
                "    put_back(path, index)\n"
                "    raise unusable(path, error) from error",
                "try:\n"
                "    with closing(sqlite3.connect(f'{path.absolute().as_uri()}?mode"
                "=ro', uri=True)) as db:\n"
                "        schema = _examine(path, db, tables, "
                "parse_index(index))\n"
                "        return Examined(schema, check_content(path, db, how, "
                "on_progress))\n"
                "except Damaged:\n"
                "    raise\n"
                "except sqlite3.DatabaseError as error:\n"
                "    put_back(path, index)\n"
                "    raise unusable(path, error) from error",
            ),
        ),
        DAMAGE,
    ),
    Mutant(
        "the log of another database is mixed in",
        (Edit(_EXAMINE, "_check_identity", "ours is not None and both != ours", "False"),),
        DAMAGE,
    ),
    Mutant(
        "a state whose damage was met is used on",
        (
            Edit(
                _ENGINE,
                "Database._run_together",
                "if self.damage is not None:\n    self._refuse_all(batch)\n    return",
                "if False:\n    return",
            ),
        ),
        DAMAGE,
    ),
    Mutant("a backup is not checked", (Edit(_BACKUP, "make", "check(part)", ""),), COPIES),
    Mutant(
        "a backup is begun again for each change",
        (Edit(_BACKUP, "_copy_snapshot", "state.execute('BEGIN')", ""),),
        COPIES,
    ),
    Mutant(
        "a state is changed by a migration without a backup",
        (Edit(_BACKUPS, "Backups.before_use", "self._make(found.schema)", ""),),
        ROTATION,
    ),
    Mutant(
        "a missing state is begun again in silence",
        (Edit(_BACKUPS, "Backups.before_use", "found.schema == 0", "False"),),
        ROTATION,
    ),
    Mutant(
        "a restore deletes the state that was there",
        (Edit(_RECOVERY, "_set_aside", "old.rename(new)", "old.unlink()"),),
        (*COMMANDS, "-k", "restored"),
    ),
    Mutant(
        "a state is restored while an agent runs",
        (Edit(_RECOVERY, "restore", "HomeLock.take(home) is None", "False"),),
        (*COMMANDS, "-k", "begun_again"),
    ),
    Mutant(
        "an agent does not notice that its folder was removed",
        (Edit("ugro.kernel.agent.main", "HomeLock.look", "self.is_lost()", "False"),),
        (*COMMANDS, "-k", "home_was_removed"),
    ),
)
