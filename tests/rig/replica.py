"""A replica of a service, as a process of its own: answers after a given time, one request at a time if asked to.

    python replica.py ADDRESS:PORT NAME SECONDS [serial]

SIGUSR1 has it load its model, as after a crash: it answers 503 to everything, until the next one.

The paths: /health · /fail (500) · /stream (ten pieces) · /headers · /socket (an echo after an upgrade) · all others.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import signal
import sys

_WEBSOCKET = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # as RFC 6455 has it


class Replica:
    def __init__(self, name: str, seconds: float, *, is_serial: bool) -> None:
        self.name = name
        self.seconds = seconds
        self.turn = asyncio.Semaphore(1 if is_serial else 1_000_000)
        self.answered = 0
        self.is_loading = False

    def load(self) -> None:
        self.is_loading = not self.is_loading

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await _head(reader):
                await self._answer(head, reader, writer)
                if any(line.lower() == "connection: close" for line in head):
                    break
        writer.close()

    async def _answer(self, head: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pairs = (line.split(": ", 1) for line in head[1:])
        headers = {key.lower(): value for key, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split(" ")[1]
        if self.is_loading:
            _send(writer, 503, "it loads")
        elif path == "/health":
            _send(writer, 200, "well")
        elif path == "/socket":
            await _echo(headers["sec-websocket-key"], reader, writer)
        elif path.startswith("/stream"):
            await self._stream(writer)
        else:
            async with self.turn:
                await asyncio.sleep(self.seconds)
            self.answered += 1
            document = {"name": self.name, "bytes": len(body), "headers": headers, "answered": self.answered}
            _send(writer, 500 if path == "/fail" else 200, json.dumps(document))
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(10):
            piece = f"data: {self.name} {number}\n\n".encode()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(self.seconds)
        writer.write(b"0\r\n\r\n")


async def _head(reader: asyncio.StreamReader) -> list[str]:
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return []
    return text.decode("latin-1").strip().split("\r\n")


def _send(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    head = f"HTTP/1.1 {status} So\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())


async def _echo(key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    accepted = base64.b64encode(hashlib.sha1((key + _WEBSOCKET).encode()).digest()).decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    writer.write(f"{head}Sec-WebSocket-Accept: {accepted}\r\n\r\n".encode())
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()


async def main(place: str, name: str, seconds: str, *more: str) -> None:
    address, _, port = place.rpartition(":")
    replica = Replica(name, float(seconds), is_serial="serial" in more)
    server = await asyncio.start_server(replica.serve, address, int(port), backlog=1024)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, replica.load)
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
