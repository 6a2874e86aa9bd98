"""An application of Ray Serve on a Ray cluster of UGRO, as the example deploys it."""

from __future__ import annotations

import importlib.util
import urllib.request
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Clusters, Nodes
from tests.rig.ports import free_port
from tests.rig.ray import document, run_driver

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("grpc_reflection") is None, reason="ray[serve] is not installed"),
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_serve.py"


def test_the_example_deploys_an_application_that_stays_when_its_script_has_ended(
    ugro: Ugro, nodes: Nodes, clusters: Clusters
) -> None:
    nodes(1)
    clusters.start()
    address = document(ugro("cluster", "status", "ray", "--json"))["cluster"]["client_address"]
    token = {name: value for name, value in clusters.env().items() if name.startswith("RAY_AUTH")}
    port = free_port()
    words = ("--address", address, "--port", str(port), "--replicas", "1")
    done = run_driver(token, EXAMPLE.read_text(), *words)
    assert f"ready at port {port}" in done.stdout, done.stdout + done.stderr
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", b"hello", 60) as answer:
        assert answer.read() == b'{"said":"olleh"}'
