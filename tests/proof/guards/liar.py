"""The guards against nodes that lie: what is believed of what they say, and how much of it."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_RULE = ("tests/unit/policy/lifecycle/test_reported_run.py",)
_VALUES = ("tests/unit/nodes/test_run_reports.py",)
_LYING = "tests/integration/engine/test_lying_node.py"
_OTHER_JOBS = (_LYING, "-k", "placed_elsewhere")
_MANY = (_LYING, "-k", "very_many")
_LOGS = (_LYING, "-k", "than_its_rank")
_REMOVED = (_LYING, "-k", "was_removed")
_RANKS = (_LYING, "-k", "of_ranks")
_ANSWERS = (_LYING, "-k", "another_run")
_PACKAGES = ("tests/integration/artifacts/test_environments.py",)

_JUDGE = "src/ugro/policy/lifecycle/reported_run.py"
_RUNS = "src/ugro/nodes/runs.py"
_TRACKER = "src/ugro/agent/tracking/run_tracker.py"
_PLACED = "src/ugro/agent/tracking/placed_runs.py"
_ORPHANS = "src/ugro/agent/engine/orphan_runs.py"
_ENVIRONMENTS = "src/ugro/agent/artifacts/environments.py"


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, (Edit(file, old, new),), tests)


MUTANTS = (
    _mutant(
        "a node is believed about attempts that were placed elsewhere",
        _JUDGE, "    if reported.node not in placement.nodes:\n", "    if False:\n", _RULE,
    ),
    _mutant(
        "another machine of the same name is believed",
        _JUDGE, "if reported.machine is not None and not share.is_of(reported.machine):", "if False:", _RULE,
    ),
    _mutant(
        "a job that was never submitted counts as removed",
        _JUDGE, "if reported.job > recorded.newest_job:", "if False:", _RULE,
    ),
    _mutant(
        "any digits are the number of a job",
        _JUDGE, "text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER and text[0] != \"0\"",
        "text.isdigit()", _RULE,
    ),
    _mutant(
        "all runs that a node reports are believed",
        _TRACKER, "            if one.belief is Belief.STRANGE:\n", "            if False:\n", _OTHER_JOBS,
    ),
    _mutant(
        "a lie is reported each time",
        _PLACED, "        if node in self._told:\n            return\n", "", _OTHER_JOBS,
    ),
    _mutant(
        "all names of strange runs are kept", _TRACKER, "or len(self._strange) < _MOST_STRANGE:", "or True:", _MANY,
    ),
    _mutant(
        "a node is believed about ranks that it was not given",
        _TRACKER, "        status = status.of_ranks(ranks)\n", "", _RANKS,
    ),
    _mutant(
        "files are fetched for a job that was removed",
        _ORPHANS, "            if job is None:\n", "            if False:\n", _REMOVED,
    ),
    _mutant(
        "a log may begin anywhere",
        _RUNS, "if not offset < end <= most_bytes():", "if False:", _LOGS,
    ),
    _mutant(
        "an answer about another run is taken",
        _RUNS, "or (status.job, status.attempt) != (job, attempt):", "or False:", _ANSWERS,
    ),
    _mutant(
        "a message may have any number of runs", _RUNS, "if len(reports) > _MOST_RUNS or", "if", _VALUES,
    ),
    _mutant(
        "numbers of a node are taken as they are",
        _RUNS, "if type(value) is not int or not least <= value <= most:", "if False:", _VALUES,
    ),
    _mutant(
        "logs of any size come with an exit", _RUNS, "if total <= inline_logs.MOST_BYTES and", "if", _VALUES,
    ),
    _mutant(
        "the last lines of a log may be any number", _RUNS, "        if left < 0:\n            break\n", "", _VALUES,
    ),
    _mutant(
        "a node is asked for its packages by everybody at once",
        _ENVIRONMENTS, "self._asking.setdefault(node, asyncio.Lock()):", "asyncio.Lock():", _PACKAGES,
    ),
    _mutant(
        "an answer about packages is not shared",
        _ENVIRONMENTS, "            if known.is_usable(", "            if False and known.is_usable(", _PACKAGES,
    ),
)  # fmt: skip
