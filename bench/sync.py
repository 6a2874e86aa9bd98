"""Code to a node over a real sshd: UGRO's sync against rsync, tar and scp, in turn, in one run.

UGRO is asked over its API, with its agent and its link there, as a user's second command finds them: the time until the
agent says that the node has everything, verified. What a job's own folder costs is measured apart; the peers write
that folder right away, and keep nothing to make the next one from.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.rig.sshd import SshdFarm

from bench.bars import Bar, Row, fastest, print_rows
from ugro.client.client import Client
from ugro.kernel.files.operations import SyncCode, SyncSent

_FOLDERS, _FILES = 100, 100  # in all 10,000 files of 10 kB on average
_LIMIT_S = 300
_WARM_ROUNDS = 5

Send = Callable[[Path, Path], None]  # from a folder here to one on the node


@dataclass(slots=True)
class Peer:
    name: str
    send: Send
    only_first: bool = False  # it always sends everything


def measure(rounds: int) -> list[Bar]:
    with (
        tempfile.TemporaryDirectory(prefix="bench") as folder,
        SshdFarm(Path(folder) / "farm", 1, wrapped=False) as farm,
    ):
        tree = Path(folder) / "tree"
        _make(tree)
        peers = _peers(farm)
        with _master(farm), _ugro(Path(folder), farm) as ours:
            return _Contest(Path(folder), tree, peers, ours, farm).run(rounds)


class _Contest:
    def __init__(self, folder: Path, tree: Path, peers: list[Peer], ours: Ours, farm: SshdFarm) -> None:
        self._folder = folder
        self._tree = tree
        self._peers = peers
        self._ours = ours
        self._there = farm.nodes[0].home
        self._edits = 0
        self._tables: dict[str, dict[str, Row]] = {"first": {}, "unchanged": {}, "one changed": {}}

    def run(self, rounds: int) -> list[Bar]:
        for number in range(rounds):
            ways = [*self._sent_first(number), ("ugro", self._ours_first())]
            # In turn, so that other load on the machine affects all alike.
            for _ in range(_WARM_ROUNDS):
                for name, send in ways:
                    send()  # the previous contestant has edited it
                    self._time("unchanged", name, send)
                    self._edit()
                    self._time("one changed", name, send)
            self._time("first", "ugro: a job's folder, made of it", lambda: self._ours.run_job(self._tree))
            for target in self._there.glob("peer*"):
                shutil.rmtree(target)
        for what, rows in self._tables.items():
            print_rows(f"10,000 files, 100 MB: {what}", rows.values())
        print(f"ugro: memory of the agent {self._ours.memory_mb():.0f} MB at most\n")
        return list(self._bars())

    def _sent_first(self, number: int) -> Iterator[tuple[str, Callable[[], None]]]:
        for place, peer in enumerate(self._peers):
            if number and peer.name == "scp -r":  # it is far behind, and takes most of the time
                continue
            send = partial(peer.send, self._tree, self._there / f"peer{place}")
            self._time("first", peer.name, send)
            if not peer.only_first:
                yield peer.name, send

    def _ours_first(self) -> Callable[[], None]:
        self._ours.forget(self._there)
        send = partial(self._ours.sync, self._tree)
        self._time("first", "ugro", send)
        return send

    def _time(self, what: str, name: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        self._tables[what].setdefault(name, Row(name)).seconds.append(time.perf_counter() - begun)

    def _edit(self) -> None:
        self._edits += 1
        (self._tree / "d7" / "f7.py").write_text(f"edited {self._edits}\n")

    def _bars(self) -> Iterator[Bar]:
        first = dict(self._tables["first"])
        ours = first.pop("ugro")
        others = [row for name, row in first.items() if not name.startswith("ugro")]
        if (best := fastest(others)) is not None:
            yield Bar("first sync", ours.median_s, best.median_s, best.name, 1.0)
        shares = {"rsync over ControlMaster": 1 / 2, "rsync": 1 / 8}
        for what, names in (("unchanged", shares), ("one changed", {"rsync over ControlMaster": 1 / 2})):
            rows = self._tables[what]
            for name, share in names.items():
                if name in rows:
                    yield Bar(f"sync, {what}", rows["ugro"].median_s, rows[name].median_s, name, share)


# --- UGRO ---------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, client: Client, home: Path) -> None:
        self._client = client
        self._home = home

    def sync(self, tree: Path) -> None:
        told = [one for one in self._client.follow(SyncCode(str(tree))) if isinstance(one, SyncSent)]
        if not told or told[-1].node.state != "done":
            raise RuntimeError(f"ugro: {told}")

    def run_job(self, tree: Path) -> None:
        job = self._client.jobs.submit(fields={"command": ["true"], "workdir": str(tree), "cpus": "0"})
        self._client.jobs.wait(job.id, timeout_s=_LIMIT_S)

    def forget(self, there: Path) -> None:
        """The node has nothing, and neither has the agent: both read and write all of it."""
        self._client.stop_agent()
        shutil.rmtree(self._home / "contents", ignore_errors=True)
        shutil.rmtree(there / "grid_workspace" / ".ugro" / "contents", ignore_errors=True)
        self._client.health()

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self._client.agent().pid}/status").read_text().splitlines()
        [peak] = [line for line in status if line.startswith("VmHWM:")]
        return int(peak.split()[1]) / 1024


@contextmanager
def _ugro(folder: Path, farm: SshdFarm) -> Iterator[Ours]:
    home = folder / "home"
    with Client(home=home, cluster=farm.cluster_yaml()) as client:
        try:
            client.health()
            yield Ours(client, home)
        finally:
            client.stop_agent()


# --- the others ---------------------------------------------------------------------------------------------------


def _peers(farm: SshdFarm) -> list[Peer]:
    host, plain = farm.nodes[0].name, ["ssh", "-F", str(farm.ssh_config)]
    shared = [*plain, "-o", f"ControlPath={_socket(farm)}"]

    def rsync(ssh: list[str]) -> Send:
        return lambda source, target: _run("rsync", "-az", "-e", " ".join(ssh), f"{source}/", f"{host}:{target}/")

    def tar(source: Path, target: Path) -> None:
        unpack = f"mkdir -p {target} && zstd -dc | tar -C {target} -x"
        pack = f"tar -C {source} -c . | zstd -qc | {' '.join(plain)} {host} '{unpack}'"
        _run("sh", "-c", pack)

    def scp(source: Path, target: Path) -> None:
        _run("scp", "-q", "-r", "-F", str(farm.ssh_config), str(source), f"{host}:{target}")

    found = [
        ("rsync", Peer("rsync", rsync(plain))),
        ("rsync", Peer("rsync over ControlMaster", rsync(shared))),
        ("zstd", Peer("tar | zstd | ssh", tar, only_first=True)),
        ("scp", Peer("scp -r", scp, only_first=True)),
    ]
    return [peer for program, peer in found if shutil.which(program)]


@contextmanager
def _master(farm: SshdFarm) -> Iterator[None]:
    words = ["ssh", "-F", str(farm.ssh_config), "-o", f"ControlPath={_socket(farm)}"]
    _run(*words, "-o", "ControlMaster=yes", "-o", "ControlPersist=600", "-fN", farm.nodes[0].name)
    try:
        yield
    finally:
        _run(*words, "-O", "exit", farm.nodes[0].name)


def _socket(farm: SshdFarm) -> Path:
    return farm.ssh_config.parent / "control"


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=_LIMIT_S)


def _make(tree: Path) -> None:
    """Text that compresses about as code does."""
    chance = random.Random(1)
    words = [f"{chance.getrandbits(40):x}"[: chance.randint(2, 10)] for _ in range(2000)]
    for folder in range(_FOLDERS):
        (tree / f"d{folder}").mkdir(parents=True)
        for number in range(_FILES):
            size = chance.randint(2000, 18_000)
            text = " ".join(chance.choices(words, k=size // 6))[:size]
            (tree / f"d{folder}" / f"f{number}.py").write_text(text)
    os.sync()
