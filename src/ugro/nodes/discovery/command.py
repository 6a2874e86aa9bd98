"""Machines that a program of the user's prints as JSON: a list, a map of names, or an Ansible inventory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ugro.core.support.inherited import inherited
from ugro.nodes.discovery.source import Offer, Offers, SourceDown
from ugro.remote import foreign

_MOST_BYTES = 4 * 1024 * 1024
_SHAPE = 'it must print a list such as ["gpu1", {"name": "gpu2", "host": "10.0.0.2"}], or a map of names'
_ALL = ("all", "ungrouped")  # groups that every inventory has


@dataclass(frozen=True, slots=True)
class CommandSource:
    argv: tuple[str, ...]
    folder: Path  # that of the cluster file
    interval_s: float
    timeout_s: float
    name = "command"
    is_polled = True
    may_name_users = True  # the user wrote it, or allowed it

    @property
    def place(self) -> str:
        return " ".join(self.argv)

    async def watch(self) -> AsyncGenerator[Offers]:
        while True:
            yield offers_in(await self._output())
            await asyncio.sleep(self.interval_s)

    async def _output(self) -> bytes:
        program = self.argv[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                cwd=self.folder,
                env=inherited(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            hint = "correct discovery.command"
            raise SourceDown(f"{program} cannot be started: {reason.lower()}", hint=hint) from error
        try:
            async with asyncio.timeout(self.timeout_s):
                output, said = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
                code = await process.wait()
        except TimeoutError:
            hint = "discovery.timeout sets the limit"
            raise SourceDown(f"{program} did not end within {self.timeout_s:g} s", hint=hint) from None
        finally:
            await _end(process)
        if code != 0:
            last = (said.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:200]
            raise SourceDown(f"{program} ended with exit code {code}" + (f": {last}" if last else ""))
        if len(output) > _MOST_BYTES:
            raise SourceDown(f"{program} printed more than {_MOST_BYTES // 2**20} MiB")
        return output


def offers_in(text: bytes) -> Offers:
    """Raises SourceDown for what is no inventory; single machines are checked later."""
    try:
        tree = foreign.parsed(text, _MOST_BYTES)
    except ValueError as error:
        raise SourceDown("its output is not JSON", hint=_SHAPE) from error
    if isinstance(tree, list):
        return [_offer(one) for one in tree]
    if not isinstance(tree, dict):
        raise SourceDown("its output is neither a list nor a map", hint=_SHAPE)
    if "_meta" in tree or any(isinstance(one, dict) and "hosts" in one for one in tree.values()):
        return _ansible(tree)
    return [_offer({"name": name, **(fields if isinstance(fields, dict) else {})}) for name, fields in tree.items()]


def _offer(one: object) -> Offer:
    if not isinstance(one, dict):
        return Offer(one)
    host = one.get("host", one.get("ip"))
    return Offer(one.get("name", host), host, one.get("user"), one.get("port"), one.get("labels", ()))


def _ansible(tree: Mapping[str, object]) -> Offers:
    """What ``--list`` of an Ansible inventory prints; a host's groups are its labels."""
    groups = {name: group for name, group in tree.items() if name != "_meta"}
    members = {name: _members(name, groups, frozenset()) for name in groups}
    hosts = list(dict.fromkeys(host for found in members.values() for host in found))
    meta = tree.get("_meta")
    found = meta.get("hostvars") if isinstance(meta, dict) else None
    variables = found if isinstance(found, dict) else {}
    return [_ansible_host(host, variables.get(host), members) for host in hosts]


def _ansible_host(host: str, variables: object, members: Mapping[str, list[str]]) -> Offer:
    of = variables if isinstance(variables, dict) else {}
    labels = [name for name, hosts in members.items() if name not in _ALL and host in hosts]
    user = of.get("ansible_user", of.get("ansible_ssh_user"))
    return Offer(host, of.get("ansible_host"), user, of.get("ansible_port"), labels)


def _members(name: str, groups: Mapping[str, object], above: frozenset[str]) -> list[str]:
    """With those of the groups below it."""
    group = groups.get(name)
    if isinstance(group, list):  # the short form of a group without variables
        group = {"hosts": group}
    if not isinstance(group, dict) or name in above:
        return []
    own, children = group.get("hosts"), group.get("children")
    found = [host for host in own if isinstance(host, str)] if isinstance(own, list) else []
    for child in children if isinstance(children, list) else []:
        if isinstance(child, str):
            found += _members(child, groups, above | {name})
    return found


async def _bounded(stream: asyncio.StreamReader | None) -> bytes:
    """At most a little more than is allowed; the rest is read and thrown away, so that the program can end."""
    assert stream is not None
    kept = b""
    while part := await stream.read(64 * 1024):
        if len(kept) <= _MOST_BYTES:
            kept += part
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
