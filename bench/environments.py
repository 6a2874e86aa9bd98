"""A Python environment on a node over a real sshd: UGRO against ``python -m venv`` and pip, in turn, in one run.

Small packages of our own, in a folder: what is measured is the work around them, not a network. The peer reads the
folder where it is; UGRO resolves, pins hashes, sends the packages to the node and verifies them there.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.rig.sshd import SshdFarm
from tests.rig.wheels import wheel

from bench.bars import Bar, Row, print_rows
from ugro.client.client import Client
from ugro.features.environments.client import set_up
from ugro.features.environments.model import Setup
from ugro.features.environments.operations import PrepareEnvironment, RemoveUnusedEnvironments

_PACKAGES, _FILES = 30, 40  # 1,200 files of 4 kB
_LIMIT_S = 300


def measure(rounds: int) -> list[Bar]:
    with (
        tempfile.TemporaryDirectory(prefix="bench") as folder,
        SshdFarm(Path(folder) / "farm", 1, wrapped=False) as farm,
    ):
        wheels = Path(folder) / "wheels"
        wheels.mkdir()
        names = _make(wheels)
        with _ugro(Path(folder), farm, wheels) as ours:
            return _contest(ours, _Pip(farm, wheels), names, rounds)


def _contest(ours: _Ours, pip: _Pip, names: list[str], rounds: int) -> list[Bar]:
    ours.make(names[:1])  # uv is fetched and sent once for a cluster, and the agent runs
    titles = ("venv and pip", "UGRO, nothing on the node", "UGRO, packages known there", "UGRO, made before")
    rows = {title: Row(title) for title in titles}
    wanted = names[:-1]
    for number in range(rounds):
        rows["venv and pip"].seconds.append(_timed(partial(pip.make, f"e{number}", wanted)))
        ours.forget()
        rows["UGRO, nothing on the node"].seconds.append(_timed(partial(ours.make, wanted)))
        # Another environment, of mostly the same packages.
        rows["UGRO, packages known there"].seconds.append(_timed(partial(ours.make, names)))
        rows["UGRO, made before"].seconds.append(_timed(partial(ours.make, wanted)))
    print_rows(f"an environment of {len(names) - 1} packages", rows.values())
    peer, *ours_s = (rows[title].median_s for title in titles)
    claims = ("a first environment", "another one of mostly the same packages", "one that was made before")
    return [
        Bar(claim, took_s, peer, "venv and pip", share)
        for claim, took_s, share in zip(claims, ours_s, (1.0, 0.75, 0.05), strict=True)
    ]


class _Ours:
    def __init__(self, client: Client, farm: SshdFarm, wheels: Path) -> None:
        self._client = client
        self._root = farm.nodes[0].home / "grid_workspace" / ".ugro"
        self._file = wheels.parent / "job.yaml"
        self._wheels = wheels

    def make(self, names: list[str]) -> None:
        self._file.write_text(
            f"command: 'true'\nenvironment: {{packages: [{', '.join(names)}], find_links: ['{self._wheels}'], "
            "no_index: true}\n"
        )
        *_, last = set_up(self._client, PrepareEnvironment(file=str(self._file)))
        if not isinstance(last, Setup) or last.exit_code:
            raise RuntimeError(f"ugro: {last}")

    def forget(self) -> None:
        """The node has no environment and no package any more; uv stays."""
        self._client.ask(RemoveUnusedEnvironments(everything=True), timeout_s=600.0)
        for folder in self._root.glob("contents*"):
            shutil.rmtree(folder, ignore_errors=True)


class _Pip:
    def __init__(self, farm: SshdFarm, wheels: Path) -> None:
        self._ssh = farm.ssh_argv(farm.nodes[0])
        self._wheels = wheels

    def make(self, name: str, packages: list[str]) -> None:
        """As a user would type it."""
        install = f"{name}/bin/pip install -q --no-index --find-links {self._wheels} {' '.join(packages)}"
        argv = [*self._ssh, f"python3 -m venv {name} && {install}"]
        subprocess.run(argv, check=True, capture_output=True, timeout=_LIMIT_S)


@contextmanager
def _ugro(folder: Path, farm: SshdFarm, wheels: Path) -> Iterator[_Ours]:
    with Client(home=folder / "home", cluster=farm.cluster_yaml()) as client:
        try:
            client.health()
            yield _Ours(client, farm, wheels)
        finally:
            client.stop_agent()


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _make(folder: Path) -> list[str]:
    """Returns the packages' names."""
    names = []
    for number in range(_PACKAGES):
        name = f"ugro-bench-{number}"
        files = {f"ugro_bench_{number}/m{one}.py": b"X = 1\n" * 700 for one in range(_FILES)}
        wheel(folder, name, "1.0", files=files)
        names.append(name)
    return names
