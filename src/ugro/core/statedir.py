"""Where an agent keeps its things, and where its clients find it: one folder, by default ``~/.ugro``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CLUSTER_FILE = "cluster.yaml"
CLUSTER_VARIABLE = "UGRO_CLUSTER"


@dataclass(frozen=True, slots=True)
class StateDir:
    path: Path

    @classmethod
    def find(cls, env: Mapping[str, str]) -> StateDir:
        chosen = env.get("UGRO_HOME")
        return cls(Path(chosen).expanduser().absolute() if chosen else Path.home() / ".ugro")

    @property
    def socket(self) -> Path:
        return self.path / "agent.sock"

    @property
    def lock(self) -> Path:
        return self.path / "agent.lock"

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    @property
    def database(self) -> Path:
        return self.path / "state.db"

    @property
    def lab(self) -> Path:
        return self.path / "lab"

    @property
    def lab_cluster(self) -> Path:
        return self.lab / CLUSTER_FILE
