"""A program that uses the API through a client that was generated from its description. It knows nothing of UGRO.

Runs in ``build/api-tools``: python generated_client.py FOLDER URL CERTIFICATE
On stdin are the tokens of a user and of a viewer, a line each. It prints what it saw, as JSON.
"""

from __future__ import annotations

import importlib
import json
import ssl
import sys
import time
from types import ModuleType
from typing import Any

_MOST_S = 120.0
_PAUSE_S = 0.2
_FINAL = ("succeeded", "failed", "cancelled")


class Program:
    """``package``: the name of the generated client."""

    def __init__(self, package: str, url: str, certificate: str) -> None:
        self._package = package
        self._url = url
        self._trusting = ssl.create_default_context(cafile=certificate)
        self.models = importlib.import_module(f"{package}.models")

    def client(self, secret: str) -> Any:
        made = importlib.import_module(self._package).AuthenticatedClient
        return made(base_url=self._url, token=secret, verify_ssl=self._trusting, timeout=60)

    def call(self, name: str) -> ModuleType:
        """``jobs.list_jobs``"""
        return importlib.import_module(f"{self._package}.api.{name}")

    def submit(self, client: Any, name: str, *command: str) -> Any:
        asked = {"name": name, "command": list(command), "sync": False, "cwd": "/"}
        body = self.models.Submit(user="", key=name, fields=self.models.SubmitFields.from_dict(asked))
        return self.call("jobs.submit_job").sync(client=client, body=body)

    def ended(self, client: Any, number: int) -> Any:
        deadline = time.monotonic() + _MOST_S
        while True:
            found = self.call("jobs.get_job").sync(str(number), client=client).job
            if found.state in _FINAL:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(_PAUSE_S)


def main(folder: str, url: str, certificate: str, user: str, viewer: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    program = Program("ugro_client", url, certificate)
    client = program.client(user)
    made = program.submit(client, "made", "echo", "hello").job
    other = program.submit(client, "other", "sleep", "600").job
    program.call("jobs.cancel_job").sync(str(other.id), client=client)
    refused = program.call("jobs.cancel_job").sync_detailed(str(made.id), client=program.client(viewer))
    whoami = program.call("whoami.get_whoami")
    wrong = whoami.sync_detailed(client=program.client("ugro_wrong"))
    lines = program.call("jobs.wait_for_job").sync(str(made.id), client=client)
    return {
        "whoami": whoami.sync(client=client).to_dict(),
        "made": [type(made).__name__, str(program.ended(client, made.id).state)],
        "other": str(program.ended(client, other.id).state),
        "log": program.call("jobs.read_job_log").sync(str(made.id), client=client),
        "last line": json.loads(lines.splitlines()[-1])["state"],
        "listed": sorted(job.spec.name for job in program.call("jobs.list_jobs").sync(client=client).jobs),
        "viewer": [int(refused.status_code), type(refused.parsed).__name__, refused.parsed.error.kind],
        "wrong token": [int(wrong.status_code), wrong.parsed.error.kind],
        "no such job": program.call("jobs.get_job").sync("none", client=client).error.kind,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:], *sys.stdin.read().split())))
