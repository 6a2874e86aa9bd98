"""An engine on two nodes, the second of which lies when a test says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.rig import liar
from tests.rig.engine import EngineRig

HONEST, LIAR = "n1", "n2"


class LyingRig(EngineRig):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)

    def _entry(self, name: str, root: str) -> str:
        if name != LIAR:
            return super()._entry(name, root)
        transport = f"[{sys.executable}, {liar.__file__}, {self.lies}]"
        return f"{{transport: {transport}, remote_root: {self.folder}/{root}}}"

    @property
    def lies(self) -> Path:
        return self.folder / "lies.json"

    def tell(self, **lies: Any) -> None:
        """From now on the node lies like that; ``tests.rig.liar`` says how."""
        fresh = self.folder / "lies.new"
        fresh.write_text(json.dumps(lies))
        fresh.rename(self.lies)

    def is_heard(self) -> bool:
        """Whether the node lies by now."""
        return "lies" in self.calls()

    def asked(self) -> list[str]:
        """What was asked about forged runs."""
        return _lines(self.lies.with_suffix(".asked"))

    def calls(self) -> list[str]:
        """Everything that was asked of the node that may lie."""
        return _lines(self.lies.with_suffix(".calls"))

    def files(self, job: int) -> dict[str, bytes]:
        folder = self.folder / "jobs" / str(job)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
