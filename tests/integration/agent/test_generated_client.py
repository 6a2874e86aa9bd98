"""A client that openapi-python-client generates from a running agent's description does what a person would."""

from __future__ import annotations

import getpass
import json
import shutil
import ssl
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.rig import generated_client
from tests.rig.agent import AgentProcess, log_tail
from tests.rig.api_tools import api_tools
from tests.rig.certificates import make_certificate
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.kernel.access.model import Role
from ugro.kernel.access.operations import CreateToken

# Streams of lines, and frames that only UGRO's commands read, as a generator without words for them can take them.
SETTINGS = {
    "content_type_overrides": {
        "application/x-ndjson": "text/plain",
        "application/vnd.ugro.frames": "application/octet-stream",
    }
}


def generated(folder: Path, url: str, secret: str) -> Path:
    """The folder that has the package ``ugro_client``."""
    trusting = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    asked = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {secret}"})
    with urllib.request.urlopen(asked, timeout=60, context=trusting) as answer:
        (folder / "openapi.json").write_bytes(answer.read())
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    argv = [str(api_tools() / "openapi-python-client"), "generate", "--path", "openapi.json", "--meta", "none"]
    argv += ["--output-path", "client/ugro_client", "--config", "settings.json"]
    (folder / "client").mkdir()
    env = {"PATH": f"{api_tools()}:/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "WARNING" not in done.stdout, done.stdout
    assert "Unable" not in done.stdout, done.stdout
    return folder / "client"


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="not installed: openssl")
def test_a_generated_client_submits_follows_and_cancels_jobs_over_https(tmp_path: Path) -> None:
    home, file, certificate = tmp_path / "home", tmp_path / "cluster.yaml", make_certificate(tmp_path)
    home.mkdir(mode=0o700)
    file.write_text(
        "nodes: {here: {transport: local}}\ndashboard: {enabled: false}\n"
        f"api: {{bind: '127.0.0.1:0', tls: {{cert: {certificate}, key: {tmp_path / 'key.pem'}}}}}\n"
    )
    agent = AgentProcess(home, file)
    try:
        assert agent.wait_ready(), log_tail(home)
        with Client(home=home, cluster=file) as client:
            user = client.ask(CreateToken(Role.USER, 3600, "program")).secret
            viewer = client.ask(CreateToken(Role.VIEWER, 3600, "looks")).secret
            url = str(wait_until(lambda: (status := client.running_agent()) and status.api_url, 30, "the API"))
        assert url.startswith("https://")
        folder = generated(tmp_path, url, viewer)
        argv = [str(api_tools() / "python"), generated_client.__file__, str(folder), url.removesuffix("/api/v1")]
        tokens = f"{user}\n{viewer}\n"
        done = subprocess.run(
            [*argv, str(certificate)], input=tokens, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        assert done.returncode == 0, f"{done.stderr}\n{log_tail(home)}"
        me = getpass.getuser()
        assert json.loads(done.stdout) == {
            "whoami": {"user": me, "role": "user", "owner": me},
            "made": ["Job", "succeeded"],
            "other": "cancelled",
            "log": "hello\n",
            "last line": "succeeded",
            "listed": ["made", "other"],
            "viewer": [403, "Error", "not_allowed"],
            "wrong token": [401, "not_allowed"],
            "no such job": "not_found",
        }
    finally:
        agent.stop()
