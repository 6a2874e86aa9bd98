"""What is to be known of a run besides how it ended: ranks that never met, and what ranks say of themselves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, in_loop, is_final, submitted, until
from tests.rig.ranks import ROOT
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Launcher, Resources
from ugro.kernel.store.database import Store

pytestmark = pytest.mark.timeout(200)

DONE = "every rank ended with 0"
APART = "its 2 ranks never met: each trains alone, on all data that the script does not divide itself"
# As long as a short training: its supervisor looks at it after a second.
SCRIPT = """
import mmap, os, socket, sys, time
until = time.monotonic() + 5
if "torch" in sys.argv:  # as far as one sees from outside
    with open("libtorch_stub.so", "w+b") as file:
        file.write(b"0" * 4096)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 4096)
if "meet" in sys.argv:
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(("", place[1])) as server:
            server.accept()[0].close()
    else:
        while time.monotonic() < until:
            try:
                socket.create_connection(place).close()
                break
            except OSError:
                time.sleep(0.01)
while time.monotonic() < until:
    time.sleep(0.1)
"""
TELLING = """
import os, sys, time
from pathlib import Path
from ugro.train.reporting import Notices
folder = Path(os.environ["UGRO_RUN_DIR"])
notices = Notices(folder, f"{os.environ['UGRO_JOB']}.{os.environ['UGRO_ATTEMPT']}", int(os.environ["RANK"]))
notices.say("a", "the loss of rank 1 was not finite in step 3")
notices.say("b", "\\x1b[31mred")
while not Path(os.environ["GATE"]).exists():
    time.sleep(0.01)
raise SystemExit(int(sys.argv[1]))
"""

LIGHTNING = """
import lightning.pytorch as pl
import torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.randn(64, 4))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
"""
TOGETHER = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


class Rig(EngineRig):
    def _entry(self, name: str, root: str) -> str:
        return super()._entry(name, root).replace("{", f"{{python: {sys.executable}, ", 1)

    def spec(self, text: str, *args: str) -> JobSpec:
        script = self.folder / f"{len(text)}.py"
        script.write_text(text)
        env = {"PYTHONPATH": str(ROOT / "src"), "GATE": str(self.folder / "gate")}
        two = Resources(min_nodes=2, max_nodes=2)
        return JobSpec("train", (str(script), *args), Launcher.DDP, env=tuple(env.items()), resources=two)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, 2)
    yield made
    made.end()


async def notices(store: Store, job: Job) -> list[str]:
    return [one.text for one in await store.jobs.events(job=job.id) if one.kind == "notice"]


def test_ranks_that_never_met_are_noticed(rig: Rig) -> None:
    """Also without any word of the script; those that met, or compute nothing with torch, are left in peace."""

    async def work() -> None:
        async with rig.agent() as (store, engine):
            wanted = (("torch",), ("torch", "meet"), ())
            jobs = [await submitted(store, engine, rig.spec(SCRIPT, *args), "-".join(args) + "k") for args in wanted]
            apart, together, others = [await until(store, job, is_final) for job in jobs]
            assert (apart.state, apart.reason) == (JobState.SUCCEEDED, f"{DONE}; {APART}")
            assert f"ugro: {APART}" in await rig.log(apart)
            assert (together.state, together.reason) == (JobState.SUCCEEDED, DONE)
            assert (others.state, others.reason) == (JobState.SUCCEEDED, DONE)

    in_loop(work())


def test_what_ranks_say_is_told_while_they_run_and_when_they_have_ended(rig: Rig) -> None:
    said = "the loss of rank 1 was not finite in step 3;  [31mred"

    async def work() -> None:
        async with rig.agent() as (store, engine):
            job = await submitted(store, engine, rig.spec(TELLING, "0"))
            async with asyncio.timeout(60):
                while len(await notices(store, job)) < 2:  # noqa: ASYNC110  # nobody is told of rows
                    await asyncio.sleep(0.05)
            assert engine.remark(await store.jobs.get(job.id)) == said
            (rig.folder / "gate").touch()
            ended = await until(store, job, is_final)
            assert (ended.state, ended.reason) == (JobState.SUCCEEDED, f"{DONE}; {said}")
            assert len(await notices(store, job)) == 2, "two ranks said the same"
            failed = await until(store, await submitted(store, engine, rig.spec(TELLING, "3"), "f"), is_final)
            assert failed.state is JobState.FAILED
            assert failed.reason.startswith("rank ")
            assert said in failed.reason

    in_loop(work())


@pytest.mark.proof
@pytest.mark.skipif(find_spec("lightning") is None, reason="not installed: lightning")
def test_lightning_without_num_nodes_trains_on_every_node_alone(rig: Rig) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            apart = await submitted(store, engine, rig.spec(LIGHTNING), "a")
            together = await submitted(store, engine, rig.spec(TOGETHER), "b")
            apart = await until(store, apart, is_final)
            assert (apart.state, apart.reason) == (JobState.SUCCEEDED, f"{DONE}; {APART}"), await rig.log(apart)
            together = await until(store, together, is_final)
            assert (together.state, together.reason) == (JobState.SUCCEEDED, DONE), await rig.log(together)

    in_loop(work())
