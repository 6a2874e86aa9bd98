"""How an experiment looks on a terminal, and the nodes it ran on, in words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import ugro
from ugro.cli.jobs.options import option_with
from ugro.cli.output import Cell, Output
from ugro.client.client import Client
from ugro.features.experiments.client import PAGE, Abilities, Measured, summary_lines
from ugro.features.sweeps.model import SweepReport, SweepState
from ugro.kernel.links.model import NodeReport
from ugro.kernel.support.errors import UgroError

# --- abilities --------------------------------------------------------------------------------------------------------
# What this version's jobs and trainings can do, as their own declarations say: nothing here is a list of features.


_LOCAL = "local"
_STALENESS, _ROUND_S = "UGRO_MAX_STALENESS", "UGRO_ROUND_S"  # variables of trainings with local updates
_COMPRESS = "compress"
_KINDS = ("fp16", "powersgd", "auto")


def abilities() -> Abilities:
    from ugro.train.run import Run  # without torch

    option = option_with(_LOCAL)
    compress = _KINDS if _COMPRESS in inspect.signature(Run.wrap).parameters else None
    if option is None:
        return Abilities(compress=compress)
    return Abilities({option: _LOCAL}, _STALENESS, _ROUND_S, compress)


# --- show -------------------------------------------------------------------------------------------------------------


_HEADER = ("MODEL", "VARIANT", "RUNS", "SAMPLES/S", "RELATIVE", "EPOCH", "LOAD VARIANCE", "WAITING", "LOSS")


def show(output: Output, measured: Measured) -> None:
    output.table(_HEADER, [[Cell(line[0], "bold"), *map(Cell, line[1:])] for line in summary_lines(measured)])
    sweep = measured.sweep
    reason = f": {sweep.reason}" if sweep.reason else ""
    ended = sum(not trial.is_open for trial in sweep.trials)
    output.note(f"experiment {sweep.name} is {sweep.state}{reason}; {ended} of {sweep.total} runs have ended")


def follow(output: Output, client: Client, found: SweepReport) -> SweepReport | None:
    """None if we detached."""
    note = "runs are made one at a time: on the same devices they would disturb each other"
    output.note(f"experiment {found.name}: {found.total} runs; {note}")
    try:
        for seen in client.sweeps.watch(found.id):
            found = seen
            output.progress(_line(found))
    except KeyboardInterrupt:
        see = f"ugro experiment status {found.name}"
        output.note(f"detached: experiment {found.name} continues; see: {see} · ugro experiment stop {found.name}")
        return None
    output.end_progress()
    return found


def _line(found: SweepReport) -> str:
    ended = sum(not trial.is_open for trial in found.trials)
    running = next((trial for trial in found.trials if trial.is_open), None)
    now = f": now {', '.join(str(value) for value in running.values.values())}" if running else ""
    left = f", about {found.eta_s / 60:.0f} min left" if found.eta_s and found.state is SweepState.RUNNING else ""
    return f"{ended} of {found.total} runs{left}{now}"


def written(output: Output, client: Client, measured: Measured, folder: Path) -> None:
    machine = machine_lines(client, measured)
    client.experiments.write(measured, folder, machine)
    output.note(f"report: {folder / PAGE}, with the raw data beside it")


def machine_lines(client: Client, measured: Measured) -> list[str]:
    """The nodes as they are now; a node that is gone is named all the same."""
    names = list(dict.fromkeys(name.partition(":")[0] for run in measured.runs for name in run.figures.nodes))
    if not names:
        return [f"UGRO {ugro.__version__}."]
    try:
        known = {one.name: one for one in client.health()}
    except UgroError:
        known = {}
    said = [_node(name, known.get(name)) for name in names]
    return [f"Nodes: {'; '.join(said)}.", f"UGRO {ugro.__version__}."]


def _node(name: str, report: NodeReport | None) -> str:
    if report is None or report.machine is None:
        return name
    machine, facts = report.machine, report.facts
    gpus = _counted([gpu.name for gpu in facts.gpus]) if facts else []
    parts = [*report.labels, f"{machine.cores} cores {machine.cpu_model}", *gpus]
    return f"{name} ({', '.join(parts)})"


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
