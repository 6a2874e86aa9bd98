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

_JUDGE = "ugro.kernel.jobs.engine.rules.reported_run"
_RUNS = "ugro.kernel.jobs.engine.runs"
_TRACKER = "ugro.kernel.jobs.engine.run_tracker"
_PLACED = "ugro.kernel.jobs.engine.placed_runs"
_ORPHANS = "ugro.kernel.jobs.engine.finish"
_ENVIRONMENTS = "ugro.features.environments.service.installed"


def _mutant(name: str, edit: Edit, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, (edit,), tests)


MUTANTS = (
    _mutant(
        "a node is believed about attempts that were placed elsewhere",
        Edit(_JUDGE, "judge_run", "reported.node not in placement.nodes", "False"),
        _RULE,
    ),
    _mutant(
        "another machine of the same name is believed",
        Edit(_JUDGE, "judge_run", "reported.machine is not None and (not share.is_of(reported.machine))", "False"),
        _RULE,
    ),
    _mutant(
        "a job that was never submitted counts as removed",
        Edit(_JUDGE, "_without_attempt", "reported.job > recorded.newest_job", "False"),
        _RULE,
    ),
    _mutant(
        "any digits are the number of a job",
        Edit(
            _JUDGE,
            "run_number",
            "text.isascii() and text.isdigit() and (len(text) <= _LONGEST_NUMBER) and (text[0] != '0')",
            "text.isdigit()",
        ),
        _RULE,
    ),
    _mutant(
        "all runs that a node reports are believed",
        Edit(_TRACKER, "_Believed._look_up", "one.belief is Belief.STRANGE", "False"),
        _OTHER_JOBS,
    ),
    _mutant(
        "a lie is reported each time",
        Edit(_PLACED, "PlacedRuns.report", "if node in self._told:\n    return", ""),
        _OTHER_JOBS,
    ),
    _mutant(
        "all names of strange runs are kept",
        Edit(_TRACKER, "_Believed._note_strange", "len(self._strange) < _MOST_STRANGE", "True"),
        _MANY,
    ),
    _mutant(
        "a node is believed about ranks that it was not given",
        Edit(_TRACKER, "_NodeWatch.learn", "status = status.of_ranks(ranks)", ""),
        _RANKS,
    ),
    _mutant(
        "files are fetched for a job that was removed",
        Edit(_ORPHANS, "OrphanRuns.clear", "job is None", "False"),
        _REMOVED,
    ),
    _mutant(
        "a log may begin anywhere",
        Edit(_RUNS, "Runs.follow", "not offset < end <= most_bytes()", "False"),
        _LOGS,
    ),
    _mutant(
        "an answer about another run is taken",
        Edit(_RUNS, "Runs._status_of", "(status.job, status.attempt) != (job, attempt)", "False"),
        _ANSWERS,
    ),
    _mutant(
        "a message may have any number of runs",
        Edit(_RUNS, "parse_news", "len(reports) > _MOST_RUNS or len(gone) > _MOST_RUNS", "len(gone) > _MOST_RUNS"),
        _VALUES,
    ),
    _mutant(
        "numbers of a node are taken as they are",
        Edit(_RUNS, "_whole", "type(value) is not int or not least <= value <= most", "False"),
        _VALUES,
    ),
    _mutant(
        "logs of any size come with an exit",
        Edit(
            _RUNS, "_logs", "total <= inline_logs.MOST_BYTES and len(found) <= _MOST_RANKS", "len(found) <= _MOST_RANKS"
        ),
        _VALUES,
    ),
    _mutant(
        "the last lines of a log may be any number",
        Edit(_RUNS, "_tail", "if left < 0:\n    break", ""),
        _VALUES,
    ),
    _mutant(
        "a node is asked for its packages by everybody at once",
        Edit(_ENVIRONMENTS, "Environments._ask", "self._asking.setdefault(node, asyncio.Lock())", "asyncio.Lock()"),
        _PACKAGES,
    ),
    _mutant(
        "an answer about packages is not shared",
        Edit(
            _ENVIRONMENTS,
            "Environments._answer",
            "known.is_usable(link, wanted_at if is_fresh else wanted_at - age_s)",
            "False and known.is_usable(link, wanted_at if is_fresh else wanted_at - age_s)",
        ),
        _PACKAGES,
    ),
)
