"""A lab: unequal nodes on this machine, served by the agent of one state directory, created and removed as a whole.

Each node has a home directory, a share of a core and, on request, simulated GPUs. Every process of a lab carries its
mark in the environment, so it can be ended without the agent and after any crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from ugro.client.client import Client
from ugro.core.errors import NotAllowed, UgroError, Unreachable
from ugro.core.job import HOLDING_STATES
from ugro.core.support.state_dir import StateDir
from ugro.lab import cgroups, files, processes
from ugro.lab.shape import LabNode, Shape, Throttle, Wish


class Outcome(StrEnum):
    MADE = "made"
    CHANGED = "changed"
    WAS_UP = "was up"


class Lab:
    def __init__(
        self, home: StateDir, *, log_level: str = "info", on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.home = home
        # Resolved: the processes of a lab are found by this path, however the user writes it.
        self.root = Path(os.path.realpath(home.lab))
        self.group_name = f"ugro-lab-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}"
        self._log_level = log_level
        self._on_wait = on_wait or (lambda text: None)

    def shape(self) -> Shape | None:
        return files.remembered(self.root)

    def is_left_over(self) -> bool:
        """Part of a lab exists, but not enough to use it."""
        return self.home.lab.exists() and self.shape() is None

    def processes(self) -> dict[int, str]:
        """pid → home of its node."""
        return processes.of_lab(self.root)

    def client(self) -> Client:
        return Client(
            home=self.home.path, cluster=self.home.lab_cluster, log_level=self._log_level, on_wait=self._on_wait
        )

    def up(self, wish: Wish) -> Outcome:
        """Also repairs a lab that is partly up, for example after a restart of the machine."""
        speeds, gpus = wish.wanted_speeds(), wish.wanted_gpus()
        with _os_errors("cannot create the lab"), self._alone():
            self._refuse_another_cluster()
            found = self.shape()
            if found is not None and wish.is_granted_by(found):
                has_cgroups = any(node.cgroup for node in found.nodes)
                self._serve(self._plan(replace(wish, without_cgroups=not has_cgroups), found.speeds, found.gpus))
                return Outcome.WAS_UP
            was_there = self._take_down()
            try:
                self._serve(self._plan(wish, speeds, gpus))
            except UgroError:
                self._take_down()
                raise
            return Outcome.CHANGED if was_there else Outcome.MADE

    def down(self, *, with_agent: bool = False) -> bool:
        """Ends and removes everything; False if there was nothing. Needs no agent and no complete lab.

        The agent then serves this machine, or is stopped with the lab.
        """
        if not self.home.path.is_dir():
            return False
        with _os_errors("cannot remove the lab"), self._alone():
            return self._take_down(with_agent=with_agent)

    def has_agent(self) -> bool:
        """Whether an agent of this state directory runs, with the lab or without it."""
        try:
            with Client(home=self.home.path, any_cluster=True) as client:
                return client.running_agent() is not None
        except Unreachable:
            return False

    # --- up ----------------------------------------------------------------------------------------------------

    def _plan(self, wish: Wish, speeds: tuple[float, ...], gpus: int) -> Shape:
        self._on_wait("making the nodes")
        names = {f"lab{number}": speed for number, speed in enumerate(speeds, start=1)}
        hierarchy = None if wish.without_cgroups else cgroups.cpu_hierarchy()
        is_first = wish.takes_precedence
        group = cgroups.create(hierarchy, self.group_name, names, takes_precedence=is_first) if hierarchy else None
        throttle = Throttle.CGROUP if group else Throttle.DUTY_CYCLE
        nodes = [
            LabNode(name, speed, str(self.root / name), throttle, str(group / name) if group else None)
            for name, speed in names.items()
        ]
        return Shape(tuple(nodes), gpus)

    def _serve(self, shape: Shape) -> None:
        files.write(self.root, shape, self.home.lab_cluster)
        self._on_wait("connecting")
        with self.client() as client:
            client.use_cluster(self.home.lab_cluster)
            client.reload_cluster()

    def _refuse_another_cluster(self) -> None:
        with Client(home=self.home.path, any_cluster=True) as client:
            agent = client.running_agent()
            is_alone = agent is not None and agent.cluster_file is None
            live = client.jobs.newest(1, states=HOLDING_STATES) if is_alone else []
        if live:
            raise NotAllowed(
                f"job {live[0].id} {live[0].spec.name} runs on this machine, which the lab would replace",
                hint="wait for it or cancel it; or give the lab an agent of its own: UGRO_HOME=~/.ugro-lab ugro lab up",
            )
        if agent is not None and agent.cluster_file and not self._is_ours(agent.cluster_file):
            raise NotAllowed(
                f"the agent of {self.home.path} serves {agent.cluster_file}",
                hint="give the lab an agent of its own: UGRO_HOME=~/.ugro-lab ugro lab up",
            )

    def _is_ours(self, cluster_file: str) -> bool:
        return os.path.realpath(cluster_file) == str(self.root / self.home.lab_cluster.name)

    # --- down --------------------------------------------------------------------------------------------------

    def _take_down(self, *, with_agent: bool = False) -> bool:
        was_there = self._release_agent(with_agent) or self.home.lab.exists()
        groups = self._groups()
        # From here on, no process can enter the lab.
        self.home.lab_cluster.unlink(missing_ok=True)
        left = processes.end(lambda: {*self.processes(), *(pid for group in groups for pid in cgroups.members(group))})
        if left:
            raise UgroError(f"processes of the lab do not exit: {', '.join(map(str, left))}", hint="try it again")
        for group in groups:
            if not cgroups.remove(group):
                raise UgroError(f"cannot remove {group}", hint="try it again")
        if self.root.exists():
            shutil.rmtree(self.root)
        return was_there or bool(groups)

    def _release_agent(self, is_to_end: bool) -> bool:
        """Ignores an agent that is dead or hangs: it finds no lab to connect to."""
        try:
            with Client(home=self.home.path, any_cluster=True) as client:
                agent = client.running_agent()
                if agent is None or not agent.cluster_file or not self._is_ours(agent.cluster_file):
                    return False
                self._on_wait("closing the links")
                if is_to_end:
                    client.stop_agent()
                else:
                    client.use_cluster(None)
        except Unreachable:
            return False
        return True

    def _groups(self) -> list[Path]:
        """The recorded groups, and the default ones of a lab without a record."""
        shape = self.shape()
        found = {Path(node.cgroup).parent for node in shape.nodes if node.cgroup} if shape else set()
        hierarchy = cgroups.cpu_hierarchy()
        found.update(cgroups.find(hierarchy, self.group_name) if hierarchy else [])
        return [group for group in found if group.name == self.group_name and group.is_dir()]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Allows one lab command at a time per state directory; the kernel releases the lock when this process ends."""
        self.home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.home.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(folder)
            raise NotAllowed("another lab command is running", hint="try again when it has ended") from error
        try:
            yield
        finally:
            os.close(folder)


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UgroError(f"{what}: {error}", hint="set UGRO_HOME=DIR to use another folder") from error
