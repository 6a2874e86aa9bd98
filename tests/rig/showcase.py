"""A cluster with something to show on every page: jobs that run, wait, failed and ended; curves with a pause; 12 GPUs.

    python -m tests.rig.showcase FOLDER     # pictures of all pages: light and dark, wide and narrow
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.rig.browser import Dashboard, browsers, contexts, dashboards
from tests.rig.training import Pretend
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.model import JobState, Share
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.metricstore import MetricStore, node_owner
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus
from ugro.train.rules.shares import Mode

if TYPE_CHECKING:
    from playwright.sync_api import Page

GPUS = {"gpu1": 12, "gpu2": 2, "cpu1": 0}
AWAY = "a-node-that-never-answers"
WIDTHS = (1280, 390)
THEMES = ("light", "dark")
_GIB = 1 << 30
_TOTAL = 2000
_SOON_S = 60
# All ranks log; the first 600 steps lie in the past, with a pause among them. It ends when a file is there.
_TRAINING = """\
import json, math, os, pathlib, random, sys, time
rank, gate = int(os.environ.get("RANK", 0)), pathlib.Path(sys.argv[1])
drawn, begun = random.Random(rank), time.time() - 1500
name = "metrics.jsonl" if rank == 0 else f"metrics_{rank}.jsonl"
with open(os.environ["UGRO_OUTPUT"] + "/" + name, "w", buffering=1) as out:
    for step in range(1, 100_000):
        loss = 0.3 + 2.4 * math.exp(-step / 250) + drawn.gauss(0, 0.03)
        values = {"loss": loss, "lr": 3e-4 * min(1, step / 100), "grad_norm": abs(drawn.gauss(1, 0.2))}
        if rank == 0:
            values["samples_per_s"] = 412 + drawn.gauss(0, 9)
        if rank == 0 and step % 50 == 0:
            values |= {"val/loss": loss + 0.1, "val/acc": 1 - loss / 4}
        at = begun + step * 2 + (300 if step > 300 else 0) if step <= 600 else time.time()
        out.write(json.dumps({"step": step, "time": at, "rank": rank, "values": values}) + "\\n")
        if step % 100 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
        while step >= 600 and not gate.exists():
            time.sleep(0.2)
        if step > 600:
            break
"""
_FAILING = """\
import json, os, time
with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "w") as out:
    for step in range(40):
        out.write(json.dumps({"step": step, "time": time.time() - 40 + step, "loss": 2 - step / 40}) + "\\n")
for step in range(60):
    print(f"epoch 1 step {step}: a line of the log that is long enough to be wider than a telephone, by far")
raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 12.00 GiB total capacity)")
"""
_PAUSED = """\
import json, math, os, time
begun = time.time() - 3000
with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "w") as out:
    for step in [*range(200), *range(400, 600)]:
        at = begun + 5 * step
        values = {"loss": 2 * math.exp(-step / 200), "validation/a_name_without_end_and_without_any_blank": step}
        out.write(json.dumps({"step": step, "time": at, **values}) + "\\n")
open(os.environ["UGRO_OUTPUT"] + "/a-file-" + 9 * "with-a-very-long-name-" + ".txt", "w").close()
"""
_BAR = r"printf '\rfine-tune:  45%%|████▌     | 450/1000 [01:02<01:15,  7.2it/s]'; until [ -e "


@dataclass(frozen=True, slots=True)
class Showcase:
    dashboard: Dashboard
    jobs: dict[str, int]

    @property
    def pages(self) -> dict[str, str]:
        """By name, their addresses."""
        jobs = self.jobs
        return {
            "cluster": "/",
            "node": "/nodes/gpu1?hours=6",
            "node-without-gpus": "/nodes/cpu1",
            "node-away": f"/nodes/{AWAY}",
            "jobs": "/jobs",
            **{f"job-{name}": f"/jobs/{number}" for name, number in jobs.items()},
            "job-running-all": f"/jobs/{jobs['running']}?ranks=all&key=loss&key=val%2Facc&key=lr",
            "experiments": "/experiments",
            "compare": f"/compare?jobs={jobs['running']},{jobs['paused']},{jobs['failed']}",
            "settings": "/settings",
            "about": "/about",
        }


@contextmanager
def showcases() -> Iterator[Showcase]:
    with dashboards(_CLUSTER, before=_prepare) as dashboard:
        dashboard.client.health()
        gate = dashboard.home / "gate"
        try:
            yield Showcase(dashboard, _submit(dashboard, gate))
        finally:
            gate.touch()


def settled(page: Page) -> None:
    """Waits for its parts: the stream of changes never ends, so that a page is never idle."""
    page.locator("#live[data-state=live]").wait_for()
    page.wait_for_function("() => !document.querySelector('main .loading')")
    for chart in page.locator("ugro-chart").all():
        chart.scroll_into_view_if_needed()  # only then it is loaded
    page.wait_for_function(
        "() => [...document.querySelectorAll('ugro-chart')].every(one => one.isReady && one.data.series.length)"
    )
    page.evaluate("() => scrollTo(0, 0)")


def take_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with showcases() as shown, browsers() as browser:
        for width in WIDTHS:
            for theme in THEMES:
                look: Any = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
                with contexts(browser, **look) as context:
                    page = shown.dashboard.sign_in(context)
                    for name, path in shown.pages.items():
                        page.goto(shown.dashboard.url + path)
                        settled(page)
                        page.screenshot(path=folder / f"{name}.{width}.{theme}.png", full_page=True)


# --- what is shown ------------------------------------------------------------------------------------------------


def _node(name: str, count: int) -> str:
    env = f", env: {{UGRO_NVML_LIBRARY: '%(home)s/libnvidia-ml.so.1', UGRO_PRETEND_GPUS: '%(home)s/{name}.gpus'}}"
    return f"  {name}: {{transport: local, remote_root: '%(home)s/{name}'{env if count else ''}}}\n"


_CLUSTER = "cluster: {name: showcase}\nnodes:\n" + "".join(_node(name, count) for name, count in GPUS.items())
_CLUSTER += f"  {AWAY}: {{transport: [/bin/false], labels: [a-long-label-without-any-blank, other]}}\n"


def _prepare(home: Path) -> None:
    build_nvml_stub(home)
    for name, count in GPUS.items():
        write_gpus(home / f"{name}.gpus", [SimulatedGpu()] * count)
    asyncio.run(_make_history(home))


async def _make_history(home: Path) -> None:
    """Of the first node, six hours in which it was away for one."""
    store = MetricStore(StateDir(home).metrics)
    await store.open()
    now = int(time.time())
    times = [at for at in range(now - 6 * 3600, now - 60, 20) if not 2 * 3600 < now - at < 3 * 3600]
    drawn = random.Random(1)
    levels = {"cpu/use_ratio": 0.3, "memory/used_ratio": 0.5, "score": 95.0, "link/latency_s": 0.0006, "cpu/load": 3.0}
    for gpu in range(GPUS["gpu1"]):
        parts = {"use_ratio": 0.5 + gpu / 30, "memory_used_ratio": 0.6, "temperature_c": 60.0 + gpu, "power_w": 110.0}
        levels |= {f"gpu/{gpu}/{part}": level for part, level in parts.items()}
    curves = {}
    for key, level in levels.items():
        values = [level * (1 + 0.2 * math.sin(at / 900) + drawn.gauss(0, 0.03)) for at in times]
        values = [min(value, 1.0) if key.endswith("ratio") else value for value in values]
        curves[SeriesKey(node_owner("gpu1"), 0, 0, key)] = Points(times, [1000 * at for at in times], values)
    await store.append(curves)
    await store.close()


def _make_busy(home: Path, share: Share) -> None:
    """The GPUs that a job was given are in use."""
    gpus = [SimulatedGpu()] * GPUS[share.node]
    for at in share.gpus:
        gpus[at] = SimulatedGpu(memory_used_bytes=6 * _GIB, use_percent=85 + at, temperature_c=60 + at, power_w=170.0)
    write_gpus(home / f"{share.node}.gpus", gpus)


def _submit(dashboard: Dashboard, gate: Path) -> dict[str, int]:
    client, home = dashboard.client, dashboard.home
    code = home / "code"
    code.mkdir()
    for name, text in {"train.py": _TRAINING, "failing.py": _FAILING, "paused.py": _PAUSED}.items():
        (code / name).write_text(text)
    records = home / "records.jsonl"
    pretend = Pretend([0.001, 0.004], names=("gpu1", "gpu2"), mode=Mode.OFF, gradient_bytes=10 << 20)
    pretend.run(80)
    for at, record in enumerate(pretend.records):
        record["time"] = time.time() - 100 + at  # what is a year old is forgotten
    records.write_text("".join(json.dumps(record) + "\n" for record in pretend.records))

    def submit(name: str, **fields: Any) -> int:
        given = {"name": name, "cpus": 0, "workdir": str(code)} | fields
        return client.jobs.submit(fields=given, env={}).id

    jobs = {}
    copy = f"cp {records} $UGRO_OUTPUT/metrics.jsonl"
    jobs["profiled"] = submit("resnet-balance", command=["sh", "-c", copy], sync=False)
    long = "vit-paused-with-a-name-that-is-rather-long-for-a-telephone"
    jobs["paused"] = submit(long, command=[sys.executable, "paused.py", "--lr", "1e-3"])
    jobs["failed"] = submit("llama-fails", command=[sys.executable, "failing.py", "--epochs", "3"])
    jobs["plain"] = submit("hostname", command=["hostname"], sync=False)
    for number in jobs.values():
        client.jobs.wait(number, timeout_s=_SOON_S)
    training = {"script": "train.py", "args": [str(gate), "--max-steps", str(_TOTAL)], "launcher": "ddp"}
    jobs["running"] = submit("gpt-small", **training, gpus_per_node="4")
    jobs["bar"] = submit("fine-tune", command=["sh", "-c", f"{_BAR}{gate} ]; do sleep 0.2; done"], sync=False)
    jobs["queued"] = submit("too-large-for-now", **training, gpus_per_node="12")
    client.jobs.set_note(jobs["paused"], "Paused while the node was away; the loss is fine.", tags=["base", "paper"])
    wait_until(lambda: _is_shown(dashboard, jobs), _SOON_S, "the running training's steps and the ended ones' curves")
    placement = client.jobs.get(jobs["running"]).placement
    assert placement is not None
    _make_busy(home, placement.shares[0])
    wait_until(lambda: _is_busy(dashboard, jobs), _SOON_S, "the use of the running training's GPUs")
    return jobs


def _is_busy(dashboard: Dashboard, jobs: dict[str, int]) -> bool:
    dashboard.client.health()
    devices = dashboard.client.jobs.headline(jobs["running"]).devices
    return devices is not None and (devices.use or 0) > 0.5


def _is_shown(dashboard: Dashboard, jobs: dict[str, int]) -> bool:
    headlines = [dashboard.client.jobs.headline(jobs[name]) for name in ("running", "paused", "failed")]
    bar = dashboard.client.jobs.headline(jobs["bar"]).progress
    waits = dashboard.client.jobs.get(jobs["queued"]).state is JobState.QUEUED
    return waits and bar is not None and all(one.loss is not None and one.loss.values for one in headlines)


if __name__ == "__main__":
    take_all(Path(sys.argv[1]))
