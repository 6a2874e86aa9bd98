"""``client.experiments``: the same trainings in several ways, as a sweep, and a report of what they measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ugro
from ugro.client.http import text_of
from ugro.client.jobs import new_key
from ugro.features.experiments.rules.grid import MODELS, expect_experiment, parts_of
from ugro.features.experiments.rules.grid import Abilities as Abilities
from ugro.features.experiments.rules.grid import Wish as Wish
from ugro.features.experiments.rules.grid import document as document
from ugro.features.experiments.rules.measure import METRICS, Row, Run, figures, joined, moments, rows
from ugro.features.experiments.rules.page import Experiment, gain, of_runs, of_steps, page, shown
from ugro.features.sweeps.client import SweepText, SweepWish
from ugro.features.sweeps.model import SweepReport, SweepState, Trial, TrialState
from ugro.features.sweeps.operations import GetSweep, GetSweepDocument, ListSweeps, ResumeSweep, StopSweep
from ugro.features.training.model import JobEnergy
from ugro.features.training.operations import GetJobEnergy, GetJobSteps
from ugro.kernel.jobs.operations import GetJobFile
from ugro.kernel.support.errors import ConfigError, NotAllowed, NotFound, UgroError
from ugro.kernel.telemetry.records import AttemptSteps
from ugro.web.report import csv_text

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.features.sweeps.model import SweepPlan

PAGE, FILE, DATA = "report.html", "experiment.yaml", "experiment.json"
_OF_TERMINAL = ("samples_per_s", "epoch_s", "load_variance", "waiting", "loss")
_ENTRY = "/static/experiment/report.js"
_SHEETS = ("/static/ugro.css", "/static/chart.css", "/static/experiment/report.css")


@dataclass(frozen=True, slots=True)
class Measured:
    """An experiment with what its runs have measured until now."""

    sweep: SweepReport
    document: Mapping[str, Any]
    runs: tuple[Run, ...]
    steps: Mapping[int, Sequence[AttemptSteps]]  # by run

    @property
    def rows(self) -> list[Row]:
        return rows(self.runs)


class Experiments:
    """Created by ``Client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def start(self, name: str, tree: Mapping[str, Any], *, key: str | None = None) -> SweepReport:
        """The same key is the same experiment. Runs are made one at a time, unless the document says otherwise."""
        expect_experiment(name, tree)
        text = SweepText(json.dumps(tree), FILE)
        return self._client.sweeps.start(text, _wish(name), key=key or new_key())

    def plan(self, name: str, tree: Mapping[str, Any]) -> SweepPlan:
        """What it would do; starts nothing."""
        expect_experiment(name, tree)
        return self._client.sweeps.plan(SweepText(json.dumps(tree), FILE), _wish(name))

    def resume(self, name: str, tree: Mapping[str, Any] | None = None) -> SweepReport:
        """Continues it. With a document, it must be the same experiment."""
        found = self.get(name)
        if tree is not None and self._document(found) != tree:
            hint = "give the new one another --name, or leave --resume out"
            raise NotAllowed(f"experiment {found.name} has other models, modes or options than these", hint=hint)
        if found.state not in (SweepState.STOPPED, SweepState.FAILED):
            return found
        return self._client.ask(ResumeSweep(str(found.id))).sweep

    def newest(self) -> list[SweepReport]:
        """The newest first."""
        sweeps = self._client.ask(ListSweeps()).sweeps
        return [one for one in sweeps if parts_of(self._document(one)) is not None]

    def get(self, name: str | int) -> SweepReport:
        """By name, by number, or ``last``: the last experiment."""
        if name == "last":
            if not (known := self.newest()):
                raise NotFound("there are no experiments", hint="start one: ugro experiment run balance")
            return known[0]
        found = self._client.ask(GetSweep(str(name))).sweep
        expect_experiment(found.name, self._document(found))
        return found

    def stop(self, name: str | int) -> SweepReport:
        return self._client.ask(StopSweep(str(self.get(name).id))).sweep

    def measured(self, name: str | int) -> Measured:
        """Reads the records of all its runs, but of those that were stopped and made again."""
        found = self.get(name)
        again = {one.settings for one in found.trials if one.state is not TrialState.STOPPED}
        trials = [one for one in found.trials if one.state is not TrialState.STOPPED or one.settings not in again]
        steps = {one.number: self._steps(one.job) for one in trials if one.job is not None}
        runs = tuple(self._run(trial, steps.get(trial.number, ())) for trial in trials)
        return Measured(found, self._document(found), runs, steps)

    def write(self, measured: Measured, folder: Path, machine: Sequence[str] = ()) -> list[Path]:
        """Writes the page, the raw data and the file that runs it again. Raises UgroError."""
        from ugro.web.report_assets import assets

        file = file_text(measured.document)
        sweep, steps = measured.sweep, [(run, joined(measured.steps.get(run.number, ()))) for run in measured.runs]
        about = Experiment(sweep.name, sweep.state, sweep.reason, sweep.created_at, machine, measured.runs, file)
        texts = {
            PAGE: page(about, assets(_ENTRY, _SHEETS)),
            "runs.csv": csv_text(of_runs(measured.runs)),
            "steps.csv": csv_text(of_steps(steps)),
            DATA: json.dumps(as_document(measured, machine), indent=1),
            FILE: file,
            **self._job_files(measured.runs),
        }
        try:
            for name, text in texts.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            said = (error.strerror or str(error)).lower()
            raise UgroError(f"{folder}: {said}", hint="choose another folder: -o DIR") from None
        return [folder / name for name in texts]

    def _job_files(self, runs: Sequence[Run]) -> dict[str, str]:
        """One for each model and variant: its seeds differ by a flag."""
        first: dict[tuple[str, str], Run] = {}
        for run in runs:
            first.setdefault((run.model, run.variant), run)
        texts = {}
        for (model, variant), run in first.items():
            with contextlib.suppress(NotFound):  # removed meanwhile
                label = "".join(letter if letter.isalnum() else "-" for letter in f"{model} {variant}")
                texts[f"jobs/{label}.yaml"] = "" if run.job is None else self._client.ask(GetJobFile(str(run.job))).file
        return {name: text for name, text in texts.items() if text}

    def _run(self, trial: Trial, steps: Sequence[AttemptSteps]) -> Run:
        values = trial.values
        energy = self._energy(trial.job) if trial.job is not None and steps else None
        return Run(
            trial.number,
            str(values.get("model")),
            str(values.get("variant")),
            int(values.get("seed", 0)),
            str(trial.state),
            trial.job,
            trial.reason,
            figures(steps, energy),
            tuple(moments(steps)),
        )

    def _document(self, sweep: SweepReport) -> dict[str, Any]:
        return self._client.ask(GetSweepDocument(str(sweep.id))).document

    def _steps(self, job: int) -> tuple[AttemptSteps, ...]:
        try:
            return self._client.ask(GetJobSteps(str(job))).attempts
        except NotFound:  # the job was removed
            return ()

    def _energy(self, job: int) -> JobEnergy | None:
        with contextlib.suppress(NotFound):
            return self._client.ask(GetJobEnergy(str(job))).energy
        return None


def as_document(measured: Measured, machine: Sequence[str] = ()) -> dict[str, Any]:
    """For programs. Curves are in ``steps.csv``."""
    runs = [{name: value for name, value in asdict(run).items() if name != "curve"} for run in measured.runs]
    sweep = measured.sweep
    about = {"id": sweep.id, "name": sweep.name, "state": sweep.state, "reason": sweep.reason}
    about |= {"created_at": sweep.created_at, "total": sweep.total, "version": ugro.__version__}
    compared = [asdict(row) for row in measured.rows]
    return {**about, "machine": list(machine), "summary": compared, "runs": runs, "file": measured.document}


def summary_lines(measured: Measured) -> list[list[str]]:
    """For a terminal: a line for each model and variant."""
    named = {metric.key: metric for metric in METRICS}
    lines = []
    for row in measured.rows:
        speed, *others = (shown(row.values.get(key), named[key]) for key in _OF_TERMINAL)
        lines.append([row.model, row.variant, f"{row.runs}/{row.wanted}", speed, gain(row), *others])
    return lines


def read_file(path: Path) -> dict[str, Any]:
    """An experiment file as ``write`` leaves it. Raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(text_of(path, "an experiment file"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}", hint="a report has an experiment.yaml") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a map of keys to values", hint="a report has an experiment.yaml")
    expect_experiment(str(path), found)
    return found


def file_text(tree: Mapping[str, Any]) -> str:
    import yaml  # slower to load than the rest

    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def scripts() -> Path:
    """The folder of the trainings. Raises UgroError if this installation has none."""
    package = Path(ugro.__file__).parent
    names = {model.script for model in MODELS.values()}
    for place in (package / "examples", package.parents[1] / "examples"):  # of a wheel, of a clone
        if all((place / name).is_file() for name in names):
            return place
    hint = "install UGRO from its wheel or from a clone"
    raise UgroError(f"the trainings are missing: {', '.join(sorted(names))}", hint=hint)


def _wish(name: str) -> SweepWish:
    return SweepWish({"name": name, "workdir": str(scripts())})
