"""The node program's protocol: what is declared in one file is what is served."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ugro.kernel.links import transport as bootstrap
from ugro.kernel.links.model import Facts, Machine
from ugro.kernel.support.codec import decode
from ugro.node import check, loader
from ugro.node.hardware import probe
from ugro.node.main import MODULES
from ugro.node.messages import CHECKS, METHODS


def test_every_method_that_is_served_is_declared_and_the_other_way_round() -> None:
    served = {"echo", "probe"}
    for group, module in MODULES.items():
        names = importlib.import_module(module).METHODS
        served |= {group if name == group else f"{group}.{name}" for name in names}
    assert served == set(METHODS)
    assert sorted(check.WORK) == sorted(CHECKS)


def test_the_node_program_starts_without_loading_what_it_serves(tmp_path: Path) -> None:
    archive = tmp_path / "program"
    archive.write_bytes(bootstrap.node_program().content)
    code = (
        f"import sys; exec({inspect.getsource(loader)!r}); install(open(sys.argv[1], 'rb').read())\n"
        "import ugro.node.home, ugro.node.main; print(*sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(archive)]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "ugro.node.main" in loaded.stdout.split()
    late = {"typing", "dataclasses", "ugro.node.messages", "ugro.node.runs.rundir", *MODULES.values()}
    assert not late & set(loaded.stdout.split())


def test_what_a_node_says_of_itself_has_the_fields_that_the_agent_expects(tmp_path: Path) -> None:
    machine, facts = probe.machine(str(tmp_path)), probe.Prober(str(tmp_path)).sample()
    assert set(machine) == {field.name for field in fields(Machine)}
    assert set(facts) <= {field.name for field in fields(Facts)}
    assert decode(Machine, machine).python_path == sys.executable
    assert decode(Facts, facts).memory_total_bytes > 0
