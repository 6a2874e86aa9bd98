"""Shows and accepts a node's host key, using OpenSSH's own tools so that jump hosts, aliases and ports work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import Destination
from ugro.kernel.config.section import is_host, is_user
from ugro.kernel.files.client_files import expect_local
from ugro.kernel.links import diagnosis
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import HostKey, NodeReport, NodeSpec
from ugro.kernel.links.node import Dialling, Node
from ugro.kernel.links.operations import ExamineHosts, GetHostKey, TrustHostKey
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.links.transport import SshOptions, ssh_command
from ugro.kernel.operations.request import answers
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import NotAllowed, UgroError, Unreachable, UsageError


@dataclass(frozen=True, slots=True)
class Way:
    """How ssh is called for a node."""

    spec: NodeSpec
    options: SshOptions
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Look:
    key: HostKey
    lines: tuple[str, ...]  # for known_hosts, as ssh would write them


async def look_up(way: Way) -> HostKey:
    """Asks the node for its key, and known_hosts for the old one. Changes nothing."""
    return (await _look(way)).key


async def trust(way: Way, fingerprints: tuple[str, ...], *, replace: bool) -> HostKey:
    """Writes the key to known_hosts if it is still the one that was shown."""
    look = await _look(way)
    key, name = look.key, way.spec.name
    if key.fingerprints != fingerprints:
        raise NotAllowed(
            "the host key differs from the one that was shown", subject=name, hint="show it again before you accept it"
        )
    if key.is_trusted:
        return key
    if key.is_changed and not replace:
        raise NotAllowed(
            "its host key has changed", subject=name, hint=f"if that is right: ugro node trust {name} --replace"
        )
    file = Path(key.known_hosts)
    if key.is_changed and file.exists():
        await _run(way, "ssh-keygen", "-R", key.address, "-f", str(file))
    try:
        # These lines and not new ones: the node may offer another key now than the one that was compared.
        await asyncio.to_thread(_append, file, look.lines)
    except OSError as error:
        raise UgroError(f"{file} cannot be written: {error.strerror}", subject=name) from error
    return await look_up(way)


async def _look(way: Way) -> _Look:
    with tempfile.TemporaryDirectory() as folder:
        settings = await ssh_settings(way.spec, way.options)
        offered = await _offered(way, settings, Path(folder) / "known_hosts")
        files = _files(settings.get("userknownhostsfile", ""))
        if not files:
            text = "ssh is configured to store no host keys"
            raise NotAllowed(text, subject=way.spec.name, hint="see: UserKnownHostsFile")
        address = _address(way.spec, settings)
        everywhere = [*files, *_files(settings.get("globalknownhostsfile", ""))]
        known = [line for file in everywhere for line in await _find(way, address, file)]
        if any(line.startswith("@revoked") and _key(line) in map(_key, offered) for line in known):
            raise NotAllowed("its host key is revoked", subject=way.spec.name, hint=f"see {files[0]}")
        key = HostKey(
            node=way.spec.name,
            address=address,
            fingerprints=await _fingerprints(way, offered, Path(folder)),
            known_fingerprints=await _fingerprints(way, known, Path(folder)),
            is_trusted=any(_key(line) in map(_key, known) for line in offered),
            known_hosts=str(files[0]),
        )
        return _Look(key, tuple(offered))


def _append(file: Path, lines: tuple[str, ...]) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as stream:
        size = os.fstat(descriptor).st_size
        starts_a_line = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        stream.write(b"".join(f"{line}\n".encode() for line in ([] if starts_a_line else [""]) + list(lines)))


async def _offered(way: Way, settings: Mapping[str, str], file: Path) -> list[str]:
    """The node's key as ssh itself would store it: ssh connects, stores it, and is not allowed to log in."""
    command = ssh_command(
        way.spec,
        way.options,
        StrictHostKeyChecking="accept-new",
        UserKnownHostsFile=str(file),
        GlobalKnownHostsFile="/dev/null",
        PreferredAuthentications="none",
    )
    code, _, stderr = await _run(way, *command, "true", timeout_s=2 * way.options.connect_timeout_s)
    lines = file.read_text().splitlines() if file.exists() else []
    if lines:
        return lines
    error = diagnosis.from_ssh(way.spec, code, stderr)
    if error.cause.startswith("host-key-"):
        # The node's own key would have been stored: this is about a machine on the way there.
        jump = settings.get("proxyjump", "").partition(",")[0]
        message = f"the host key is not known or has changed, and {way.spec.name} is reached through it"
        hint = f"accept it first: ugro node trust {jump}" if jump else f"try: ssh {way.spec.target} true"
        raise Unreachable(message, subject=jump or "the jump host", cause=error.cause, hint=hint)
    raise error


async def ssh_settings(spec: NodeSpec, options: SshOptions) -> dict[str, str]:
    """The ssh configuration that applies to this node (``ssh -G``); keys in lower case."""
    words = ssh_command(spec, options)
    _, stdout, _ = await _run(Way(spec, options, {}), words[0], "-G", *words[1:])
    pairs = (line.partition(" ") for line in stdout.splitlines())
    return {key.lower(): value for key, _, value in pairs}


def _files(words: str) -> list[Path]:
    """ssh prints paths without quotes; each begins with / or ~, and a space may be part of a name."""
    files = [Path(word).expanduser() for word in re.split(r" (?=[/~])", words) if word not in ("", "none")]
    return [file for file in files if str(file) != os.devnull]


def _address(spec: NodeSpec, settings: Mapping[str, str]) -> str:
    host = settings.get("hostkeyalias") or settings.get("hostname") or spec.host or spec.name
    port = settings.get("port", "22")
    return host if port == "22" or settings.get("hostkeyalias") else f"[{host}]:{port}"


async def _find(way: Way, address: str, file: Path) -> list[str]:
    if not file.is_file():
        return []
    _, stdout, _ = await _run(way, "ssh-keygen", "-F", address, "-f", str(file))
    return [line for line in stdout.splitlines() if line and not line.startswith("#")]


async def _fingerprints(way: Way, lines: list[str], folder: Path) -> tuple[str, ...]:
    if not lines:
        return ()
    file = folder / "keys"
    file.write_text("".join(f"{line}\n" for line in lines))
    _, stdout, _ = await _run(way, "ssh-keygen", "-l", "-f", str(file))
    # "256 SHA256:… name (ED25519)": people compare the hash and the type.
    words = [line.split() for line in stdout.splitlines()]
    return tuple(f"{word[1]} {word[-1]}" for word in words if len(word) > 2)


def _key(line: str) -> tuple[str, ...]:
    words = line.split()
    return tuple(words[2:4] if words and words[0].startswith("@") else words[1:3])


async def _run(way: Way, *argv: str, timeout_s: float = 10.0) -> tuple[int, str, str]:
    if shutil.which(argv[0]) is None:
        raise UsageError(f"{argv[0]}: no such program", hint="install OpenSSH's client: apt-get install openssh-client")
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **way.environment},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        message = f"{argv[0]} did not end within {timeout_s:g} s"
        raise Unreachable(message, subject=way.spec.name, cause="timed-out") from None
    finally:
        if process.returncode is None:
            # Includes the processes it started, such as a jump, which would outlive it and hold its pipes.
            os.killpg(process.pid, 9)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")


# --- hosts that need not be nodes -------------------------------------------------------------------------------------
# Shows the keys of hosts as a user writes them, and what they are.


def host_spec(word: str, remote_root: str) -> NodeSpec:
    to = Destination.parse(word)
    if not is_host(to.host) or (to.user and not is_user(to.user)):
        raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
    return NodeSpec(name=word, host=to.host, user=to.user, port=to.port, remote_root=remote_root)


def _expect_own_config(ssh_config: str | None) -> None:
    if ssh_config is not None:
        expect_local(f"the ssh configuration {ssh_config}", "the master uses its own")


class Examiner:
    """Probes hosts that are not (yet) part of the cluster."""

    def __init__(self, cluster: Cluster, health: HealthCheck) -> None:
        self._cluster = cluster
        self._health = health
        self.trusted = ChangeSignal()  # some host key was accepted

    async def examine(
        self, specs: Sequence[NodeSpec], ssh_config: str | None = None
    ) -> AsyncGenerator[list[NodeReport]]:
        dialling = self.dialling(ssh_config)
        nodes = [Node(spec, dialling) for spec in specs]
        try:
            # A first connection may take longer than a probe over an open link.
            timeout_s = 2 * self._cluster.config.ssh.connect_timeout + self._cluster.config.health_check.timeout
            async with contextlib.aclosing(self._health.reports(nodes, timeout_s=timeout_s)) as batches:
                async for reports in batches:
                    yield reports
        finally:
            await asyncio.gather(*(node.close() for node in nodes))

    def dialling(self, ssh_config: str | None) -> Dialling:
        dialling = self._cluster.inventory.dialling(self._cluster.config)
        if ssh_config is None:
            return dialling
        return replace(dialling, options=replace(dialling.options, config_file=ssh_config))


class Hosts:
    def __init__(
        self, cluster: Cluster, examiner: Examiner, found: Callable[[str], Awaitable[NodeSpec | None]]
    ) -> None:
        """``found`` returns a machine that was found, by its name."""
        self._cluster = cluster
        self._examiner = examiner
        self._found = found

    @answers(GetHostKey)
    async def host_key(self, asked: GetHostKey, caller: Caller) -> HostKey:
        """Of a node, of a machine that was found, or of another host that ssh finds by this word."""
        try:
            return await look_up(await self._way(asked.name, asked.ssh_config))
        except Unreachable as error:
            if error.cause == "name-not-found":
                self._cluster.inventory.named(asked.name)  # if it is no node either: the nearest name is more helpful
            raise

    @answers(TrustHostKey)
    async def trust(self, asked: TrustHostKey, caller: Caller) -> HostKey:
        _expect_own_config(asked.ssh_config)
        key = await trust(await self._way(asked.name, asked.ssh_config), asked.fingerprints, replace=asked.replace)
        for node in (*self._cluster.inventory, *self._cluster.inventory.logins):
            if node.link is None:  # it may be this host by another name, or behind it
                node.wake()
        self._examiner.trusted.notify()
        return key

    @answers(ExamineHosts)
    async def examine_hosts(self, asked: ExamineHosts, caller: Caller) -> AsyncGenerator[list[NodeReport]]:
        _expect_own_config(asked.ssh_config)
        specs = [host_spec(word, self._cluster.config.remote_root) for word in asked.hosts]
        return self._examiner.examine(specs, asked.ssh_config)

    async def _way(self, word: str, ssh_config: str | None) -> Way:
        node = next((one for one in self._cluster.inventory if one.spec.name == word), None)
        spec = node.spec if node is not None else await self._found(word) or self._host(word)
        if spec.transport != "ssh":
            raise NotAllowed("is not reached by ssh and has no host key", subject=word)
        dialling = self._examiner.dialling(ssh_config)
        return Way(spec, dialling.options, dialling.environment())

    def _host(self, word: str) -> NodeSpec:
        try:
            return host_spec(word, self._cluster.config.remote_root)
        except UsageError:
            return self._cluster.inventory.named(word).spec  # raises: it is no node either
