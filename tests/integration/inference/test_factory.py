"""A model of the user's own behind the server: what holds for every model, in a process that needs no torch."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rig.inference import InferenceServer, inference_server, refusal
from tests.rig.waiting import wait_until
from ugro.kernel.files.code import service as sdk

KEY = "a-secret-of-this-service"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
MODEL = """
import os, time

class Model:
    def predict(self, items):
        with open("batches", "a") as file:
            file.write(f"{len(items)}\\n")
        while os.path.exists("wait"):
            time.sleep(0.005)
        return [1 / item for item in items]

def make():
    return Model()

def none():
    return 7

class Where:
    def predict(self, items):
        import ugro
        return [ugro.__file__] * len(items)

def where():
    return Where()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "key").write_text(f"{KEY}\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[InferenceServer]:
    options = ("--factory", "mine:make", "--max-batch", "4", "--batch-wait-ms", "1", "--queue", "3", "--name", "own")
    with inference_server(*options, cwd=folder, env={"UGRO_SERVICE_KEY_FILE": str(folder / "key")}) as server:
        server.wait_ready()
        yield server


def predict(server: InferenceServer, *inputs: object) -> tuple[int, object]:
    status, found = server.post("/predict", {"inputs": inputs}, AUTHORISED)
    return status, found.get("outputs", found)


def test_a_model_of_ones_own_is_batched_guarded_and_drained(server: InferenceServer, folder: Path) -> None:
    assert server.get("/health")[1] == {"status": "ok", "model": "own", "task": "predict"}
    assert predict(server, 1, 2, 4) == (200, [1.0, 0.5, 0.25])
    for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}, {"Authorization": "Bearer "}):
        status, found = server.post("/predict", {"inputs": [1]}, headers)
        assert (status, found["error"]["code"]) == (401, "invalid_api_key")
    assert server.get("/metrics")[0] == 401
    status, found = server.post("/predict", {"inputs": [0]}, AUTHORISED)
    assert status == 500
    assert found["error"]["message"] == "the model failed: ZeroDivisionError: division by zero"
    for body, words in ((b"{", "not valid JSON"), (b"[]", "JSON object"), (b'{"inputs": []}', "inputs"), (b"", "body")):
        status, found = server.post("/predict", body, AUTHORISED)
        assert status == 400
        assert words in found["error"]["message"]
    assert server.post("/classify", {"texts": ["x"]}, AUTHORISED)[1]["error"]["code"] == "wrong_task"
    assert server.get("/nothing", AUTHORISED)[1]["error"]["message"] == "Not Found"
    _fill_and_drain(server, folder)


def _fill_and_drain(server: InferenceServer, folder: Path) -> None:
    """One request is computed, two wait and are computed together, the next is refused; SIGTERM waits for all."""
    (folder / "batches").unlink()
    (folder / "wait").touch()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(predict, server, 1)
        wait_until(lambda: (folder / "batches").exists(), 20, "the first batch")
        others = [pool.submit(predict, server, 2), pool.submit(predict, server, 4)]
        wait_until(lambda: _gauge(server, "queue") == 2, 20, "two that wait")
        with server.open("POST", "/predict", b'{"inputs": [8]}', _JSON) as (_, answer):
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert json.loads(answer.read())["error"]["code"] == "queue_full"
        threading.Timer(0.3, (folder / "wait").unlink).start()
        assert server.stop() == 0
        assert [first.result(), *(other.result() for other in others)] == [(200, [1.0]), (200, [0.5]), (200, [0.25])]
    assert (folder / "batches").read_text(encoding="utf-8").split() == ["1", "2"]


_JSON = {"Content-Type": "application/json", **AUTHORISED}


def _gauge(server: InferenceServer, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics", headers=AUTHORISED)
    text = connection.getresponse().read().decode()
    connection.close()
    return float(next(line for line in text.splitlines() if line.startswith(f"ugro_inference_{name} ")).split()[1])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--factory", "nowhere:make"), "No module named 'nowhere'"),
        (("--factory", "mine"), "not of the form module:function"),
        (("--factory", "mine:gone"), "has no attribute 'gone'"),
        (("--factory", "mine:none"), "returned int, which has no predict"),
        (("--model", "gone/there/at/all"), "there is no folder"),
        (("--model", "somebody/something"), "neither a folder nor in the Hugging Face cache"),
        (("--model", "."), "neither config.json nor adapter_config.json"),
        (("--factory", "mine:make", "--queue", "none"), "not a whole number"),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(folder: Path, options: tuple[str, ...], message: str) -> None:
    code, text = refusal(*options, cwd=folder)
    assert code == 64
    assert message in text
    assert "Traceback" not in text


@pytest.mark.proof
def test_a_port_that_is_taken_and_a_key_that_is_missing_are_said(folder: Path, server: InferenceServer) -> None:
    code, text = refusal("--factory", "mine:make", "--port", str(server.port), cwd=folder)
    assert (code, "address already in use" in text) == (1, True)
    code, text = refusal("--factory", "mine:make", cwd=folder, env={"UGRO_SERVICE_KEY_FILE": str(folder / "gone")})
    assert (code, "cannot be read" in text) == (64, True)


@pytest.mark.proof
def test_it_runs_from_the_zip_that_nodes_get(folder: Path) -> None:
    package = folder / "ugro.zip"
    package.write_bytes(sdk.package())
    with inference_server("--factory", "mine:where", cwd=folder, env={"PYTHONPATH": str(package)}) as server:
        server.wait_ready()
        found = server.post("/predict", {"inputs": [1]})[1]["outputs"]
    assert found == [f"{package}/ugro/__init__.py"]
