"""``client.jobs.submit`` with keys of a job file, against a real agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sharing import commands
from ugro.client.client import Client
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.errors import ConfigError, Unsatisfiable


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("nodes")
    file = folder / "cluster.yaml"
    file.write_text("nodes:\n" + "".join(f"  n{n}: {{transport: local, remote_root: {folder}/n{n}}}\n" for n in (1, 2)))
    with commands(file) as ugro, Client(home=ugro.home, cluster=file) as client:
        yield client


def test_keys_work_as_in_a_job_file_alone_and_over_one(client: Client, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os\nprint(os.environ['RANK'], os.environ['WORD'])\n")
    (tmp_path / "job.yaml").write_text("script: show.py\nresources: {nodes: 1}\nenv: {WORD: file}\n")
    job = client.jobs.submit(tmp_path / "job.yaml", resources={"nodes": 2}, env={"WORD": "python"}, name="both")
    ended = client.jobs.wait(job.id, timeout_s=60)
    assert (ended.state, ended.placement and len(ended.placement.shares)) == (JobState.SUCCEEDED, 2)
    content = b"".join(piece.content for piece in client.jobs.logs(job.id))
    assert sorted(content.decode().split()) == ["0", "1", "python", "python"]
    planned = client.jobs.dry_run({"command": ["true"], "retry": {"max": 3}}, time_limit="1h")
    assert (planned.spec.retry.max_retries, planned.spec.time_limit_s) == (3, 3600)


def test_a_variable_without_a_value_gets_that_of_this_process(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UGRO_TEST_WORD", "mine")
    wanted = {"command": ["sh", "-c", "echo $UGRO_TEST_WORD"], "sync": False, "cwd": str(tmp_path)}
    job = client.jobs.wait(client.jobs.submit(wanted, env={"UGRO_TEST_WORD": None}).id, timeout_s=60)
    assert b"".join(piece.content for piece in client.jobs.logs(job.id)) == b"mine\n"


def test_an_error_is_in_the_terms_of_python(client: Client) -> None:
    with pytest.raises(ConfigError, match=r"^comand: unknown key$") as caught:
        client.jobs.submit({"comand": ["true"]})
    assert caught.value.hint == "did you mean command?"
    with pytest.raises(ConfigError, match=r"^resources\.node: unknown key$"):
        client.jobs.submit(script="a.py", resources={"node": 2})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ConfigError, match=r"^nodes: expected"):
        client.jobs.submit_many([{"command": ["true"], "nodes": "two"}])
    with pytest.raises(Unsatisfiable) as unfit:
        client.jobs.submit(command=["true"], resources={"cpus": 100_000})
    assert unfit.value.hint is not None
    assert unfit.value.hint.startswith("with resources.cpus ")
    with pytest.raises(Unsatisfiable) as unfit:
        client.jobs.submit_many([{"command": ["true"], "cpus": 100_000}])
    assert unfit.value.hint is not None
    assert unfit.value.hint.startswith("with resources.cpus ")
