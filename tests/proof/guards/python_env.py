"""The guards of Python environments on nodes."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_MAKING = "tests/integration/environments/test_making.py"
_KEEPING = "tests/integration/environments/test_keeping.py"
_UNIT = "tests/unit/remote/test_python_env.py"
_ROOM = "ugro.features.environments.node"

_LOCKED = '    if lock is None:  # a run has it, or somebody makes it\n        return "in-use"'
_CREATED = "            self._create(tool)\n"
_COUNTED = '        if usage.counts(place).get(name):\n            return "in-use"'

MUTANTS = (
    Mutant(
        "the hash of the installer is not compared",
        (
            Edit(
                f"{_ROOM}.installers",
                "_is_valid",
                "_sha256(iter(lambda: file.read(_PIECE), b'')) == sha256",
                "_sha256(iter(lambda: file.read(_PIECE), b'')) != ''",
            ),
        ),
        (_MAKING, "-k", "never_started"),
    ),
    Mutant(
        "an environment that lacks a package gets its name",
        (
            Edit(
                f"{_ROOM}.build",
                "Build._check",
                "[name for name in required_names(self._recipe.requirements) if name not in there]",
                "[]",
            ),
        ),
        (_MAKING, "-k", "leaves_something_out"),
    ),
    Mutant(
        "a folder without a record is an environment",
        (
            Edit(
                f"{_ROOM}.place",
                "Place.made",
                "record is None or record.get('folder') != folder or (not "
                "os.access(str(record.get('python')), os.X_OK))",
                "not os.access(str(record.get('python')), os.X_OK)",
            ),
        ),
        (_UNIT,),
    ),
    Mutant(
        "an environment gets its name before it is installed",
        (
            Edit(
                f"{_ROOM}.build",
                "Build.run",
                "self._create(uv)",
                "self._create(uv)\nself._publish(self._check())",
            ),
            Edit(
                f"{_ROOM}.build",
                "Build._check",
                "[name for name in required_names(self._recipe.requirements) if name not in there]",
                "[]",
            ),
        ),
        (_MAKING, "-k", "killed_leaves_no_half"),
    ),
    Mutant(
        "two make the same environment at once",
        (Edit(f"{_ROOM}.making", "Making._wait", "not durable.lock_within(self._lock, fcntl.LOCK_EX, 0)", "False"),),
        (_MAKING, "-k", "make_it_once"),
    ),
    Mutant(
        "who waited for another makes it again",
        (Edit(f"{_ROOM}.making", "Making._made", "self._found() or self._build(progress)", "self._build(progress)"),),
        (_MAKING, "-k", "make_it_once"),
    ),
    Mutant(
        "an environment is removed while a run uses it",
        (
            Edit(f"{_ROOM}.tidy", "_take_away", "lock is None", "False"),
            Edit(f"{_ROOM}.tidy", "_take_away", "usage.counts(place).get(name)", "False"),
            Edit(f"{_ROOM}.tidy", "_take_away", "os.close(lock)", "pass"),
        ),
        (_KEEPING, "-k", "as_long_as_a_run"),
    ),
    Mutant(
        "a run whose supervisor was killed does not count",
        (Edit(f"{_ROOM}.tidy", "_take_away", "usage.counts(place).get(name)", "False"),),
        (_KEEPING, "-k", "supervisor_was_killed"),
    ),
    Mutant(
        "a run starts without its environment",
        (Edit(f"{_ROOM}.place", "hold", "place.made(name) is None", "False"),),
        (_KEEPING, "-k", "does_not_start_without"),
    ),
    Mutant(
        "the password of an index is among the words of a command",
        (
            Edit(
                f"{_ROOM}.installers",
                "Uv.install",
                "['--no-config', '--require-hashes', '--no-deps', *offline]",
                "['--no-config', '--no-deps', '--index-url', self._recipe.index_url or '']",
            ),
        ),
        (_MAKING, "-k", "nowhere_to_be_seen"),
    ),
)
