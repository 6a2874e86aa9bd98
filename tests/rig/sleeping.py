"""Machines that sleep: sshds that end when a real command asks for it, and start again when another one does.

A command writes what is asked of which node into a folder; this process, which has started the sshds, does it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rig.sshd import Farm, SshdNode
from tests.rig.waiting import wait_until

_LOOK_S = 0.02
_SCRIPT = """
echo "$2 $3" >> "$1/calls"
echo "asked to $2 $3"
touch "$1/$3.$2"
"""


class Beds:
    """``power`` is the section of a cluster file; ``calls`` what its commands were asked for, in order."""

    def __init__(self, farm: Farm[Any], **keys: Any) -> None:
        self.farm = farm
        self.folder = farm.directory / "beds"
        self.folder.mkdir()
        self.script = self.folder / "ask.sh"
        self.script.write_text(_SCRIPT)
        self.dev = farm.directory / "dev"  # the terminals that count
        self.dev.mkdir()
        self.power = {
            "suspend_after": "1s",
            "suspend": ["sh", str(self.script), str(self.folder), "suspend", "{node}"],
            "resume": ["sh", str(self.script), str(self.folder), "resume", "{node}"],
            "cool_down": 0,
            "most_per_hour": 100,
            "idle_load": 1000,
            "resume_timeout": "30s",
            **keys,
        }
        self.acts: dict[str, Callable[[SshdNode], None]] = {"suspend": SshdNode.stop, "resume": SshdNode.start}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beds", daemon=True)

    def __enter__(self) -> Beds:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(20)

    def cluster(self, **extra: Any) -> Path:
        of_nodes = extra.pop("nodes", {})
        env = {"UGRO_PRESENCE_DEV": str(self.dev)}
        nodes = {node.name: {"env": env, **of_nodes.get(node.name, {})} for node in self.farm.nodes}
        return self.farm.cluster_yaml(power=self.power, nodes=nodes, **extra)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def called(self, what: str, timeout_s: float = 30) -> None:
        wait_until(lambda: what in self.calls(), timeout_s, f"{what} among {self.calls()}")

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for node in self.farm.nodes:
                for word, act in self.acts.items():
                    mark = self.folder / f"{node.name}.{word}"
                    if mark.exists():
                        mark.unlink()
                        act(node)
