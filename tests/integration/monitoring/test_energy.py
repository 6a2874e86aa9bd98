"""What a job used, from a GPU's counter on the node to every place where somebody looks for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig.browser import Dashboard, dashboards
from tests.rig.training import Pretend
from tests.rig.waiting import wait_until
from tests.rig.web import ask, cookie_of, sign_in
from ugro.features.training.operations import GetJobEnergy
from ugro.kernel.files.operations import GetJobResults
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

POWERS_W = (120.0, 30.0)
PRICE = 0.40
# Each rank has a GPU; the first one logs two epochs.
TRAIN = """\
import json, os, pathlib, sys, time
if os.environ["RANK"] == "0":
    with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "w", buffering=1) as out:
        for step in range(6):
            time.sleep(0.1)
            out.write(json.dumps({"step": step, "time": time.time(), "epoch": float(step // 3), "loss": 1.0}) + "\\n")
if len(sys.argv) > 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
"""
# The first rank writes records as a training does: those in the file of its argument, at the time of each.
TELLS = """\
import json, os, sys, time
if os.environ["RANK"] == "0":
    with open(sys.argv[1]) as records, open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "w") as out:
        for line in records:
            time.sleep(0.01)
            out.write(json.dumps({**json.loads(line), "time": time.time()}) + "\\n")
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler")


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("gpus")
    write_gpus(folder / "gpus", [SimulatedGpu(power_w=power) for power in POWERS_W])
    pretended = f"UGRO_NVML_LIBRARY: {build_nvml_stub(folder)}, UGRO_PRETEND_GPUS: {folder}/gpus"
    env = f"env: {{{pretended}, UGRO_POWERCAP: /nowhere}}"
    node = f"nodes: {{here: {{transport: local, remote_root: '%(home)s/root', {env}}}}}\n"
    with dashboards(f"{node}energy: {{price_per_kwh: {PRICE}, currency: CHF}}\n") as found:
        yield found


@pytest.fixture
def ugro(dashboard: Dashboard) -> Ugro:
    found = InProcess(dashboard.home)
    found.cluster = dashboard.cluster
    (dashboard.home / "cwd").mkdir(exist_ok=True)
    return found


def submitted(dashboard: Dashboard, folder: Path, *words: str, script: str = TRAIN) -> int:
    (folder / "train.py").write_text(script)
    given = {"script": "train.py", "args": list(words), "gpus_per_node": str(len(POWERS_W)), "cpus": 0}
    return dashboard.client.jobs.submit(fields={**given, "workdir": str(folder)}, env={}).id


def document(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro("--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def page(dashboard: Dashboard, path: str) -> str:
    cookie = cookie_of(sign_in(dashboard, dashboard.link()))
    return ask(dashboard, "GET", path, {"cookie": cookie}).text


def test_what_a_job_used_is_everywhere(dashboard: Dashboard, ugro: Ugro, tmp_path: Path) -> None:
    job = submitted(dashboard, tmp_path)
    assert dashboard.client.jobs.wait(job, timeout_s=60).exit_code == 0
    wait_until(lambda: dashboard.client.ask(GetJobResults(str(job))).results.state == "home", 30, "its files")
    energy = document(ugro, "results", str(job))["job"]["results"]["energy"]
    by_device = {one["device"]: one for one in energy["devices"]}
    for number, power_w in enumerate(POWERS_W):
        one = by_device[f"gpu{number}"]
        assert one["joules"] / one["measured_s"] == pytest.approx(power_w, rel=0.2)
        assert (one["source"], one["ranks"]) == ("counter", [number])
    assert [one["rank"] for one in energy["ranks"]] == [0, 1]
    assert energy["joules"] == pytest.approx(sum(one["joules"] for one in energy["devices"]))
    assert energy["wh"] == pytest.approx(energy["joules"] / 3600)
    assert energy["cost"] == pytest.approx(energy["wh"] / 1000 * PRICE)
    assert energy["currency"] == "CHF"
    assert [one["epoch"] for one in energy["epochs"]] == [0, 1]
    assert 0 < sum(one["joules"] for one in energy["epochs"]) <= energy["joules"] * 1.001

    assert document(ugro, "status", str(job))["job"]["energy"]["joules"] == energy["joules"]
    words = energy["words"]
    assert words in ugro("status", str(job)).stdout
    shown = ugro("results", str(job)).stdout
    assert words in shown
    assert "by device  here gpu0: " in shown
    text = page(dashboard, f"/jobs/{job}")
    assert words.partition(",")[0] in text
    assert "CHF" in text
    wait_until(lambda: ">energy" in page(dashboard, "/experiments?all=1"), 30, "its total in the table")
    assert ">cost" in page(dashboard, "/experiments?all=1")


def test_a_profile_has_samples_per_joule_and_names_the_device_that_only_costs_energy(
    dashboard: Dashboard, ugro: Ugro, tmp_path: Path
) -> None:
    """The second rank needs more time for no sample at all than the first for the whole batch."""
    records = tmp_path / "records.jsonl"
    pretend = Pretend([0.001, 0.001], fixed_s=[0.0, 0.3], names=("here:0", "here:1"))
    records.write_bytes(b"".join(pretend.run(60)))
    job = submitted(dashboard, tmp_path, str(records), script=TELLS)
    assert dashboard.client.jobs.wait(job, timeout_s=60).exit_code == 0
    wait_until(lambda: dashboard.client.ask(GetJobResults(str(job))).results.state == "home", 30, "its files")
    found = document(ugro, "profile", str(job))["job"]["profile"]
    first, second = found["ranks"]
    assert first["watts"] / second["watts"] == pytest.approx(POWERS_W[0] / POWERS_W[1], rel=0.1)
    assert found["watts"] == pytest.approx(sum(POWERS_W), rel=0.5), "nothing is read while the driver is loaded"
    for one in (first, second):
        assert one["samples_per_joule"] == pytest.approx(one["samples"] / (one["watts"] * found["step_s"]))
    assert found["samples_per_joule"] == pytest.approx(pretend.batch / (found["watts"] * found["step_s"]))
    wasteful = found["findings"][-1]
    assert (wasteful["kind"], wasteful["ranks"]) == ("energy", [1])
    share = f"{100 * second['watts'] / found['watts']:.0f} %"
    assert wasteful["words"].startswith(f"here:1 makes it slower, with {share} of the energy: without it, a joule")
    assert wasteful["remedy"].endswith("launch it without here:1")

    done = ugro("profile", str(job))
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [float(row[header.index("watts")]) for row in rows] == pytest.approx(
        [first["watts"], second["watts"]], rel=1e-4
    )
    assert wasteful["words"] in done.stderr


@pytest.mark.proof
def test_a_running_job_is_counted_and_its_energy_outlives_its_files(
    dashboard: Dashboard, ugro: Ugro, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    job = submitted(dashboard, tmp_path, str(go_on))
    name = f'ugro_job_energy_joules_total{{job_id="{job}"'
    wait_until(lambda: name in ugro("metrics").stdout, 60, "the energy of a job that runs")
    first = dashboard.client.ask(GetJobEnergy(str(job))).energy
    assert first is not None
    wait_until(lambda: _joules(dashboard, job) > first.joules, 60, "it to grow")
    go_on.touch()
    dashboard.client.jobs.wait(job, timeout_s=60)
    assert _joules(dashboard, job) > first.joules
    assert "ugro_gpu_energy_joules_total" in ugro("metrics").stdout
    removed = ugro("results", str(job), "--rm", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert _joules(dashboard, job) > first.joules, "what it cost stays when its files go"


def _joules(dashboard: Dashboard, job: int) -> float:
    found = dashboard.client.ask(GetJobEnergy(str(job))).energy
    return 0.0 if found is None else found.joules
