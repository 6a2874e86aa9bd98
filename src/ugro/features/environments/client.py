"""Makes a Python environment on nodes, with variables of this process that the agent asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ugro.client.client import Client
from ugro.client.http import asked_for
from ugro.features.environments.model import Setup, SetupStep
from ugro.features.environments.operations import PrepareEnvironment, SettingUp
from ugro.kernel.operations.request import Needs


def set_up(
    client: Client, asked: PrepareEnvironment, env: Mapping[str, str] | None = None
) -> Iterator[SetupStep | Setup]:
    """Makes an environment on nodes (default: all): that of a job file, of fields, or of the cluster file.

    Of ``env`` (default: this process's environment), only variables that the environment names are sent. Yields how
    far each node is, and at the end the versions on all of them. Closing the iterator stops it.
    """
    # No time limit: a large package may take an hour on a slow line.
    for said in client.follow(asked, timeout_s=None):
        if isinstance(said, Needs):
            yield from set_up(client, replace(asked, env=asked_for(said.needs, env)), env)
        else:
            yield said.step if isinstance(said, SettingUp) else said.setup
