"""The node program's protocol: what is declared in one file is what is served."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ugro.features.hardware.node.bench import bench
from ugro.kernel.links import transport as bootstrap
from ugro.kernel.links.calls import asked
from ugro.kernel.links.model import Facts, Machine
from ugro.kernel.links.node import Identity
from ugro.kernel.support.codec import decode
from ugro.node import loader
from ugro.node.hardware import probe
from ugro.node.program import METHODS
from ugro.node.runs import api


def test_every_declared_method_is_found_by_the_table_that_is_sent() -> None:
    files = bootstrap.program_files()
    names: dict[str, object] = {}
    exec(files[bootstrap.SERVED], names)
    for file in files:
        if file != bootstrap.SERVED:
            importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    assert names["MODULES"] == {name: serve.__module__ for name, serve in METHODS.items()}
    assert {"echo", "runs.start", "presence.watch", "hub.cached"} <= set(METHODS)


def test_a_link_asks_by_the_name_and_the_keywords_of_the_function_that_serves() -> None:
    assert asked(bench, part="machine", seconds=1) == ("bench", {"part": "machine", "seconds": 1})
    identity = Identity("ann", 3)
    assert identity.asks(api.watch) == ("runs.watch", {"agent": "ann", "generation": 3})
    assert METHODS["runs.watch"] is api.watch


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
    late = {"typing", "dataclasses", "ugro.node.served", "ugro.node.messages", "ugro.node.runs.rundir"}
    late |= {serve.__module__ for serve in METHODS.values()} - {"ugro.node.main"}
    assert not late & set(loaded.stdout.split())


def test_what_a_node_says_of_itself_has_the_fields_that_the_agent_expects(tmp_path: Path) -> None:
    machine, facts = probe.machine(str(tmp_path)), probe.Prober(str(tmp_path)).sample()
    assert set(machine) == {field.name for field in fields(Machine)}
    assert set(facts) <= {field.name for field in fields(Facts)}
    assert decode(Machine, machine).python_path == sys.executable
    assert decode(Facts, facts).memory_total_bytes > 0
