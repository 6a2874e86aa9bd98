"""The guards of Python environments on nodes."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_MAKING = "tests/integration/environments/test_making.py"
_KEEPING = "tests/integration/environments/test_keeping.py"
_UNIT = "tests/unit/remote/test_python_env.py"
_ROOM = "src/ugro/remote/python_env"

_LOCKED = '    if lock is None:  # a run has it, or somebody makes it\n        return "in-use"'
_CREATED = "            self._create(tool)\n"
_COUNTED = '        if usage.counts(place).get(name):\n            return "in-use"'

MUTANTS = (
    Mutant(
        "the hash of the installer is not compared",
        (Edit(f"{_ROOM}/blobs.py", '"")) == sha256', '"")) != ""'),),
        (_MAKING, "-k", "never_started"),
    ),
    Mutant(
        "an environment that lacks a package gets its name",
        (Edit(f"{_ROOM}/build.py", "        if lacking:", "        if False:"),),
        (_MAKING, "-k", "leaves_something_out"),
    ),
    Mutant(
        "a folder without a record is an environment",
        (Edit(f"{_ROOM}/place.py", '        if record is None or record.get("folder") != folder or', "        if"),),
        (_UNIT,),
    ),
    Mutant(
        "an environment gets its name before it is installed",
        (
            Edit(f"{_ROOM}/build.py", _CREATED, f"{_CREATED}            self._publish(self._check(tool))\n"),
            Edit(f"{_ROOM}/build.py", "        if lacking:", "        if False:"),
        ),
        (_MAKING, "-k", "killed_leaves_no_half"),
    ),
    Mutant(
        "two make the same environment at once",
        (Edit(f"{_ROOM}/making.py", "while not durable.lock_within(self._lock, fcntl.LOCK_EX, 0):", "while False:"),),
        (_MAKING, "-k", "make_it_once"),
    ),
    Mutant(
        "who waited for another makes it again",
        (Edit(f"{_ROOM}/making.py", "return self._found() or self._build(progress)", "return self._build(progress)"),),
        (_MAKING, "-k", "make_it_once"),
    ),
    Mutant(
        "an environment is removed while a run uses it",
        (
            Edit(f"{_ROOM}/tidy.py", _LOCKED, _LOCKED.replace("lock is None", "False")),
            Edit(f"{_ROOM}/tidy.py", _COUNTED, _COUNTED.replace("usage.counts(place).get(name)", "False")),
            Edit(f"{_ROOM}/tidy.py", "        os.close(lock)\n    if aside", "        pass\n    if aside"),
        ),
        (_KEEPING, "-k", "as_long_as_a_run"),
    ),
    Mutant(
        "a run whose supervisor was killed does not count",
        (Edit(f"{_ROOM}/tidy.py", _COUNTED, _COUNTED.replace("usage.counts(place).get(name)", "False")),),
        (_KEEPING, "-k", "supervisor_was_killed"),
    ),
    Mutant(
        "a run starts without its environment",
        (Edit(f"{_ROOM}/usage.py", "    if place.made(name) is None:", "    if False:"),),
        (_KEEPING, "-k", "does_not_start_without"),
    ),
    Mutant(
        "the password of an index is among the words of a command",
        (
            Edit(
                f"{_ROOM}/installers.py",
                '["--no-config", "--require-hashes", "--no-deps", *offline]',
                '["--no-config", "--no-deps", "--index-url", self._recipe.index_url or ""]',
            ),
        ),
        (_MAKING, "-k", "nowhere_to_be_seen"),
    ),
)  # fmt: skip
