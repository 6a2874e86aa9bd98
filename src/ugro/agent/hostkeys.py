"""Showing and accepting a node's host key, with OpenSSH's own tools, so that jumps, aliases and ports are its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from ugro.core.errors import NotAllowed, UgroError, Unreachable, UsageError
from ugro.core.hostkey import HostKey
from ugro.core.node import NodeSpec
from ugro.nodes import diagnosis
from ugro.nodes.transport import SshOptions, ssh_command


async def look_up(spec: NodeSpec, options: SshOptions) -> HostKey:
    """Asks the node for its key, and known_hosts for what it held. Nothing is changed."""
    with tempfile.TemporaryDirectory() as folder:
        offered = await _offered(spec, options, Path(folder) / "known_hosts")
        settings = await _settings(spec, options)
        files = [Path(name).expanduser() for name in settings.get("userknownhostsfile", "").split()]
        target = files[0] if files else Path("~/.ssh/known_hosts").expanduser()
        address = _address(spec, settings)
        known = [line for file in files for line in await _find(address, file)]
        return HostKey(
            node=spec.name,
            address=address,
            fingerprints=await _fingerprints(offered, Path(folder)),
            known_fingerprints=await _fingerprints(known, Path(folder)),
            is_trusted=any(_key(line) in {_key(other) for other in known} for line in offered),
            known_hosts=str(target),
        )


async def trust(spec: NodeSpec, options: SshOptions, fingerprints: tuple[str, ...], *, replace: bool) -> HostKey:
    """Writes the key to known_hosts, if it still is the one that was shown."""
    seen = await look_up(spec, options)
    if seen.fingerprints != fingerprints:
        raise NotAllowed(
            "the host key is another one than was shown", subject=spec.name, hint="look again before you accept it"
        )
    if seen.is_trusted:
        return seen
    if seen.is_changed and not replace:
        raise NotAllowed(
            "its host key has changed",
            subject=spec.name,
            hint=f"if that is right: ugro node trust {spec.name} --replace",
        )
    file = Path(seen.known_hosts)
    if seen.is_changed:
        await _run("ssh-keygen", "-R", seen.address, "-f", str(file))
    with tempfile.TemporaryDirectory() as folder:
        lines = await _offered(spec, options, Path(folder) / "known_hosts")
    await asyncio.to_thread(_append, file, lines)
    return await look_up(spec, options)


def _append(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write("".join(f"{line}\n" for line in lines))


async def _offered(spec: NodeSpec, options: SshOptions, file: Path) -> list[str]:
    """The node's key as ssh itself would note it: it connects, notes, and is not allowed to log in."""
    command = ssh_command(
        spec,
        options,
        StrictHostKeyChecking="accept-new",
        UserKnownHostsFile=str(file),
        GlobalKnownHostsFile="/dev/null",
        HashKnownHosts="no",
        PreferredAuthentications="none",
    )
    code, _, stderr = await _run(*command, "true", timeout_s=2 * options.connect_timeout_s)
    lines = file.read_text().splitlines() if file.exists() else []
    if not lines:
        raise diagnosis.from_ssh(spec, code, stderr)
    return lines


async def _settings(spec: NodeSpec, options: SshOptions) -> dict[str, str]:
    words = ssh_command(spec, options)
    _, stdout, _ = await _run(words[0], "-G", *words[1:])
    pairs = (line.partition(" ") for line in stdout.splitlines())
    return {key.lower(): value for key, _, value in pairs}


def _address(spec: NodeSpec, settings: dict[str, str]) -> str:
    host = settings.get("hostkeyalias") or settings.get("hostname") or spec.host or spec.name
    port = settings.get("port", "22")
    return host if port == "22" or settings.get("hostkeyalias") else f"[{host}]:{port}"


async def _find(address: str, file: Path) -> list[str]:
    if not file.is_file():
        return []
    _, stdout, _ = await _run("ssh-keygen", "-F", address, "-f", str(file))
    return [line for line in stdout.splitlines() if line and not line.startswith("#")]


async def _fingerprints(lines: list[str], folder: Path) -> tuple[str, ...]:
    if not lines:
        return ()
    file = folder / "keys"
    file.write_text("".join(f"{line}\n" for line in lines))
    _, stdout, _ = await _run("ssh-keygen", "-l", "-f", str(file))
    # "256 SHA256:… name (ED25519)": what people compare is the hash and the kind.
    words = [line.split() for line in stdout.splitlines()]
    return tuple(f"{word[1]} {word[-1]}" for word in words if len(word) > 2)


def _key(line: str) -> tuple[str, ...]:
    words = line.split()
    return tuple(words[2:4] if words and words[0].startswith("@") else words[1:3])


async def _run(*argv: str, timeout_s: float = 10.0) -> tuple[int, str, str]:
    if shutil.which(argv[0]) is None:
        raise UsageError(f"{argv[0]}: no such program", hint="install OpenSSH's client: apt-get install openssh-client")
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise Unreachable(f"{argv[0]} did not end within {timeout_s:g} s", cause="timed-out") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode is None:
        raise UgroError(f"{argv[0]} has no exit code")
    return process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
