"""Run inside a network namespace: announces a service by mDNS, or prints what our source finds there.

    python -m tests.rig.mdns announce NAME ADDRESS PORT     until its stdin ends; then it says goodbye
    python -m tests.rig.mdns browse SERVICE                 a line of JSON for every list
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys


async def announce(name: str, address: str, port: str) -> None:
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    service = AsyncServiceInfo(
        "_ssh._tcp.local.",
        f"{name}._ssh._tcp.local.",
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
    from ugro.nodes.discovery.mdns import MdnsSource

    async for offers in MdnsSource(service).watch():
        say(json.dumps([[one.name, one.host, one.port, one.labels] for one in offers]))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(announce(*sys.argv[2:]) if sys.argv[1] == "announce" else browse(sys.argv[2]))
