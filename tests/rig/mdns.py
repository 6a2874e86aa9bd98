"""Inside a network namespace: announces a service by mDNS, or prints what our source finds there.

    announce SERVICE NAME ADDRESS PORT     until its stdin ends; then it says goodbye
    browse SERVICE                         a line of JSON for every change
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.rig.netns import Cable
from tests.rig.sshd import command


@contextmanager
def inside(cable: Cable, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Runs one of the above at the far end of a cable."""
    argv = [command("ip"), "netns", "exec", cable.namespace, sys.executable, "-m", "tests.rig.mdns", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=dict(os.environ)) as process:
        try:
            yield process
        finally:
            process.kill()


async def announce(kind: str, name: str, address: str, port: str) -> None:
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    service = AsyncServiceInfo(
        f"{kind}.local.",
        f"{name}.{kind}.local.",
        addresses=[socket.inet_aton(address)],
        port=int(port),
        properties={"labels": "fast,lab2"},
        server=f"{name}.local.",
    )
    network = AsyncZeroconf(ip_version=IPVersion.V4Only)
    await (await network.async_register_service(service))
    say("announced")
    await asyncio.to_thread(sys.stdin.read)
    await (await network.async_unregister_service(service))
    await network.async_close()


async def browse(service: str) -> None:
    from ugro.features.discovery.candidates import Rules, SourceWatch
    from ugro.features.discovery.sources import MdnsSource

    changed = asyncio.Event()
    watch = SourceWatch(MdnsSource(service, look_s=0.2), Rules(), changed.set)
    while await changed.wait():
        changed.clear()
        listed = [[one.name, one.host, one.port, one.labels] for one in watch.checked.candidates]
        say(json.dumps({"listed": listed, "error": str(watch.error or "")}))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(announce(*sys.argv[2:]) if sys.argv[1] == "announce" else browse(sys.argv[2]))
