"""What differs between jobs, and what git says of a folder."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from ugro.cli.jobs.origin import origin_of, parsed
from ugro.features.experiments.rules.comparison import Side, compare
from ugro.features.training.model import JobEnergy
from ugro.kernel.jobs.config.file import settings
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    ANY_GPUS,
    Environment,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Origin,
    Placement,
    Resources,
    Share,
)
from ugro.kernel.telemetry.model import Figure, MetricsSummary

ENVIRONMENT = Environment("3.11.7", "/usr/bin/python3", "x86_64", (("numpy", "1.0"), ("torch", "2.0")))


def side(number: int, environment: Environment = ENVIRONMENT, loss: float = 0.5, **changes: object) -> Side:
    spec = replace(JobSpec("train", ("python", "train.py"), env=(("LR", "0.1"), ("API_KEY", "hush"))), **changes)  # type: ignore[arg-type]
    job = Job(number, spec, "ann", JobState.SUCCEEDED, "", "2020-01-01T00:00:00+00:00", 1, Placement((Share("n1"),)))
    figures = {"loss": Figure(loss, loss / 2, 9.0, 10, 10), "acc": Figure(0.5, 0.1, 0.75, 10, 10)}
    parameters = {"lr": "0.1", "env.LR": "0.1"}
    return Side(job, {"n1": environment}, settings(spec), parameters, figures, MetricsSummary(10, "loss", loss), 2)


def differing(*sides: Side) -> dict[str, tuple[str | None, ...]]:
    return {row.key: row.values for row in compare(sides) if not row.is_same}


def test_jobs_that_are_alike_differ_in_nothing() -> None:
    rows = compare([side(1), side(2)])
    assert all(row.is_same for row in rows)
    assert {"command", "env.LR", "package torch", "python", "metric loss last", "nodes"} <= {row.key for row in rows}


def test_whatever_differs_is_told_and_nothing_else() -> None:
    newer = replace(ENVIRONMENT, packages=(("scipy", "1"), ("torch", "2.1")))
    other = side(2, newer, 0.25, argv=("python", "train.py", "--fast"), env=(("LR", "0.2"), ("API_KEY", "hush")))
    assert differing(side(1), other) == {
        "command": ("python train.py", "python train.py --fast"),
        "env.LR": ("0.1", "0.2"),
        "package numpy": ("1.0", None),
        "package torch": ("2.0", "2.1"),
        "package scipy": (None, "1"),
        "metric loss best": ("0.25", "0.125"),
        "metric loss last": ("0.5", "0.25"),
    }


def test_the_same_code_looks_the_same_although_others_see_a_part_of_its_hash() -> None:
    own, same, other = "a" * 64, "a" * 12, "b" * 12
    assert differing(side(1, snapshot=own), side(2, snapshot=same)) == {}
    found = differing(side(1, snapshot=own), side(2, snapshot=other), side(3))
    assert found == {"code": ("a" * 12, "b" * 12, "not sent")}
    assert differing(side(1, snapshot=own), side(2, snapshot="b" * 64)) == {"code": (own, "b" * 64)}


def test_what_jobs_used_and_cost_is_compared_where_it_was_measured() -> None:
    cheap = JobEnergy(3600.0, 1.0, 1, 1.0, "1.00 Wh", 0.5, "EUR")
    costly = replace(cheap, wh=2.0, cost=1.0)
    assert differing(replace(side(1), energy=cheap), replace(side(2), energy=costly), side(3)) == {
        "energy (Wh)": ("1", "2", None),
        "cost (EUR)": ("0.5", "1", None),
    }


def test_where_nothing_was_recorded_packages_are_one_row_and_not_all_missing() -> None:
    never_ran = replace(side(2), environments={})
    assert differing(side(1), never_ran) == {"packages": ("recorded", "not recorded")}
    assert differing(replace(side(1), environments={}), never_ran) == {}


def test_a_metric_that_should_be_large_is_best_where_it_is_largest() -> None:
    rows = {row.key: row.values for row in compare([side(1), side(2)])}
    assert rows["metric acc best"] == ("0.75", "0.75")
    assert rows["parameter lr"] == ("0.1", "0.1")
    assert "parameter env.LR" not in rows


def test_settings_are_shown_as_a_user_writes_them() -> None:
    """No -1 or -2: those are internal."""
    some = side(1, launcher=Launcher.DDP, resources=Resources(gpus_per_node=ANY_GPUS))
    every = side(2, launcher=Launcher.DDP, resources=Resources(1, 4, gpus_per_node=ALL_GPUS), priority=90)
    found = differing(some, every)
    assert found == {
        "resources.nodes": ("default", "1..4"),
        "resources.gpus_per_node": ("default", "all"),
        "priority": ("default", "urgent"),
    }


def test_a_secret_is_told_to_differ_and_never_shown() -> None:
    other = side(2, env=(("LR", "0.1"), ("API_KEY", "secret")))
    assert differing(side(1), other, side(3)) == {"env.API_KEY": ("*** (a)", "*** (b)", "*** (a)")}
    assert "hush" not in str(compare([side(1), other]))


def test_what_git_says_is_read() -> None:
    status = "# branch.oid 1234abcd\n# branch.head main\n1 .M N... 100644 100644 100644 1 2 train.py\n"
    assert parsed(status) == Origin("1234abcd", is_dirty=True, branch="main")
    assert parsed("# branch.oid (initial)\n# branch.head (detached)\n") == Origin()


def test_a_folder_that_git_does_not_know_has_no_origin(tmp_path: Path) -> None:
    assert origin_of(tmp_path) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    assert origin_of(tmp_path) == Origin(branch="main")
    (tmp_path / "a.py").write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    (tmp_path / "inner").mkdir()
    clean = origin_of(tmp_path / "inner")
    assert clean is not None
    assert (len(clean.commit or ""), clean.is_dirty) == (40, False)
    (tmp_path / "new.py").write_text("2")
    assert origin_of(tmp_path) == replace(clean, is_dirty=True)
